"""The host side of the forward: descriptors, the compiled kernel and the grid, worked out once a Problem."""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kilat.backends.gluon import heuristics, tuning
from kilat.backends.gluon.forward import forward_kernel
from kilat.masks.affine import affine
from kilat.numerics import LOG2E
from kilat.scores import Softcap

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.problem import Operands, Problem

TINY_SCALE = 1e-30
_GLUON_DTYPES = {"float16": gl.float16, "bfloat16": gl.bfloat16}


class Box:
    """What a launch reads of a `TensorDescriptor`, without its checks; subclasses have all but `base`."""

    __slots__ = ("base",)
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, base: Tensor) -> None:
        self.base = base


def _box(like: TensorDescriptor | None) -> type[Box] | None:
    if like is None:
        return None
    fixed = {name: getattr(like, name) for name in ("shape", "strides", "block_shape", "layout")}
    return type("Box", (Box,), {"__slots__": (), **fixed})


@dataclass
class Plan:
    """What a call needs beyond its tensors: the kernel and its arguments, tensors left out."""

    kernel: Any
    boxes: tuple[type[Box] | None, ...]  # q q2 k k2 v v2 o o2
    grid: int
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    out_dtype: torch.dtype
    copies: bool  # some input has strides that TMA cannot take


def forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse); see `Backend.forward`."""
    o = operands
    q, k, v = o.q, o.k, o.v
    if not (q.numel() and k.numel()):
        return _without_keys(problem, o)
    device = q.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return forward(problem, operands)
    plans = problem.memo.get("gluon")
    if plans is None:
        plans = problem.memo["gluon"] = {}
    key = (q.stride(), k.stride(), v.stride(), device)
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = _make_plan(problem, o)
    if plan.copies or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        ready = [_aligned(x) if _must_copy(x) or x.data_ptr() & 15 else x for x in (q, k, v)]
        return forward(problem, replace(o, q=ready[0], k=ready[1], v=ready[2]))
    out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=q.device)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
    _launch(plan, o, out, lse)
    return out, lse


def _launch(plan: Plan, o: Operands, out: Tensor, lse: Tensor) -> None:
    """Start the kernel on the current stream, with numbers for pointers: about tensors the driver is asked."""
    q, k, v = o.q, o.k, o.v
    q1, q2, k1, k2, v1, v2, o1, o2 = cast("Any", plan.boxes)
    kernel, hooks, nothing = plan.kernel, triton.knobs.runtime, lse.data_ptr()
    sink, cu_q, cu_kv, used_q, used_kv = o.sink, o.cu_seqlens_q, o.cu_seqlens_kv, o.seqlens_q, o.seqlens_kv
    kernel.run(
        plan.grid, 1, 1, torch._C._cuda_getCurrentRawStream(q.get_device()), kernel.function, kernel.packed_metadata,
        None, hooks.launch_enter_hook, hooks.launch_exit_hook,
        q1(q), None if q2 is None else q2(q), k1(k), None if k2 is None else k2(k),
        v1(v), None if v2 is None else v2(v), None if o1 is None else o1(out), None if o2 is None else o2(out),
        out.data_ptr(), nothing, nothing if sink is None else sink.data_ptr(),
        nothing if cu_q is None else cu_q.data_ptr(), nothing if cu_kv is None else cu_kv.data_ptr(),
        nothing if used_q is None else used_q.data_ptr(), nothing if used_kv is None else used_kv.data_ptr(),
        *plan.numbers, *plan.constants,
    )  # fmt: skip


def _aligned(x: Tensor) -> Tensor:
    """A copy whose rows start at multiples of 16 bytes."""
    wide = -(-x.shape[-1] // 8) * 8
    made = torch.empty((*x.shape[:-1], wide), dtype=x.dtype, device=x.device)[..., : x.shape[-1]]
    return made.copy_(x)


def _box_shape(x: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides as [batch, seqlen, heads, dim]; a ragged tensor is one batch entry."""
    shape, strides = list(x.shape), list(x.stride())
    if x.dim() == 3:
        shape, strides = [1, *shape], [8, *strides]
    strides = [8 if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]
    strides[3] = 1
    return shape, strides


def _must_copy(x: Tensor) -> bool:
    """Whether TMA cannot take the strides: multiples of 16 bytes, above 0."""
    return any(stride % 8 or stride <= 0 for stride in _box_shape(x)[1][:3])


def _descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor | None:
    """A descriptor with boxes of `rows` tokens of one head, `width` wide."""
    if not width:
        return None
    shape, strides = _box_shape(x)
    block = [1, rows, 1, width]
    layout: Any = gl.NVMMASharedLayout.get_default_for(block, _GLUON_DTYPES[str(x.dtype).removeprefix("torch.")])
    return TensorDescriptor(x, shape, strides, block, layout)


@lru_cache(maxsize=16)
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _make_plan(p: Problem, o: Operands) -> Plan:
    """The plan of a Problem; compiles its kernel."""
    copies = any(map(_must_copy, (o.q, o.k, o.v)))
    ragged, q = p.layout == "ragged", o.q
    out_shape = (*q.shape[:-1], p.head_dim_v)
    lse_shape = (p.num_heads_q, q.shape[0]) if ragged else (q.shape[0], p.num_heads_q, q.shape[1])
    out_dtype = getattr(torch, p.out_dtype)
    if copies or any(x.data_ptr() & 15 for x in (o.q, o.k, o.v)):
        return Plan(None, (), 0, (), (), out_shape, lse_shape, out_dtype, copies)
    config, order, bounds = tuning.forward_config(p), tuning.schedule(p), affine(p.mask)
    if bounds is None:
        raise ValueError(f"the gluon backend takes masks of one moving interval; got mask={p.mask!r}")
    block_q = 64 * config.consumers
    tiles = p.seqlen_q // block_q + p.batch + 1 if ragged else -(-p.seqlen_q // block_q)
    units = p.num_heads_q * (1 if ragged else p.batch)
    cap = next((s.cap for s in p.scores if isinstance(s, Softcap)), 0.0)
    # With a softcap the kernel scales tanh(slope s) by the cap; a scale of 0 must leave the -inf of hidden keys alone.
    scale_log2, slope_log2 = (cap or p.scale or TINY_SCALE) * LOG2E, 2.0 * p.scale / cap * LOG2E if cap else 0.0
    kind = sum(bit << i for i, bit in enumerate(bounds.kind))
    together = tuning.heads_together(p, order, units)
    numbers = (
        p.batch, p.num_heads_q, p.group, p.seqlen_q, p.seqlen_kv, p.head_dim_v, bounds.left, bounds.right,
        bounds.right_top_left, tiles, together, tiles * units, scale_log2, slope_log2,
    )  # fmt: skip
    constants = (
        config.consumers, heuristics.STAGES, config.d[1], config.v[1], ragged, p.padded_q + 2 * p.padded_kv, kind,
        bool(kind & 6), p.scale < 0 and not cap, bool(cap), p.has_sink, config.staging, config.registers[0],
    )  # fmt: skip
    out = torch.empty(out_shape, dtype=out_dtype, device=q.device)
    staged = config.staging > 0
    boxes = (
        _descriptor(q, 64, config.d[0]), _descriptor(q, 64, config.d[1]),
        _descriptor(o.k, config.block_kv, config.d[0]), _descriptor(o.k, config.block_kv, config.d[1]),
        _descriptor(o.v, config.block_kv, config.v[0]), _descriptor(o.v, config.block_kv, config.v[1]),
        _descriptor(out, 64, config.v[0]) if staged else None, _descriptor(out, 64, config.v[1]) if staged else None,
    )  # fmt: skip
    grid = min(_processors(q.get_device()), tiles * units) if order.persistent else tiles * units
    kernel = _compile(boxes, numbers, constants, o, (out, torch.empty(lse_shape, device=q.device)), config)
    return Plan(kernel, tuple(map(_box, boxes)), grid, numbers, constants, out_shape, lse_shape, out_dtype, copies)


def _compile(
    boxes: tuple[TensorDescriptor | None, ...],
    numbers: tuple[Any, ...],
    constants: tuple[Any, ...],
    o: Operands,
    results: tuple[Tensor, Tensor],
    config: heuristics.ForwardConfig,
) -> Any:
    """The compiled kernel; Triton finds it in memory or on disk if it has seen the like."""
    out, lse = results
    kernel: Any = forward_kernel.run(
        *boxes, out, lse, lse if o.sink is None else o.sink,
        lse if o.cu_seqlens_q is None else o.cu_seqlens_q, lse if o.cu_seqlens_kv is None else o.cu_seqlens_kv,
        lse if o.seqlens_q is None else o.seqlens_q, lse if o.seqlens_kv is None else o.seqlens_kv,
        *numbers, *constants,
        grid=(1,), warmup=True, num_warps=4, maxnreg=config.registers[1], enable_fp_fusion=True,
    )  # fmt: skip
    return kernel.result() if hasattr(kernel, "result") else kernel


def _without_keys(p: Problem, o: Operands) -> tuple[Tensor, Tensor]:
    """No query, or no key at all: out 0, lse -inf or the sink, but -inf for tokens that no sequence uses."""
    q, ragged = o.q, p.layout == "ragged"
    out = torch.zeros((*q.shape[:-1], p.head_dim_v), dtype=getattr(torch, p.out_dtype), device=q.device)
    lse_shape = (p.num_heads_q, q.shape[0]) if ragged else (q.shape[0], p.num_heads_q, q.shape[1])
    lse = torch.full(lse_shape, -torch.inf, dtype=torch.float32, device=q.device)
    if o.sink is None:
        return out, lse
    token = torch.arange(lse_shape[-1], device=q.device)
    if o.cu_seqlens_q is not None:
        used = token < o.cu_seqlens_q[-1]
    elif o.seqlens_q is not None:
        used = (token < o.seqlens_q[:, None])[:, None]
    else:
        used = token >= 0
    return out, torch.where(used, o.sink.float()[:, None], lse)
