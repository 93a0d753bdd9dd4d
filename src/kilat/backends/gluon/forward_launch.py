"""The host side of the forward: descriptors, the compiled kernel and the grid, worked out once a Problem."""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kilat.backends.gluon import heuristics
from kilat.backends.gluon.forward import forward_kernel
from kilat.masks.affine import affine
from kilat.masks.core import FAR
from kilat.numerics import LOG2E
from kilat.scores import Softcap

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.problem import Operands, Problem

_GLUON_DTYPES = {"float16": gl.float16, "bfloat16": gl.bfloat16}


class Box:
    """What a launch reads of a `TensorDescriptor`, without its checks, which cost microseconds."""

    __slots__ = ("base", "block_shape", "layout", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, like: TensorDescriptor) -> None:
        self.base = base
        self.shape, self.strides, self.block_shape = like.shape, like.strides, like.block_shape
        self.layout, self.padding, self.round_f32_to_tf32 = like.layout, "zero", False


@dataclass
class Plan:
    """What a call needs beyond its tensors: the kernel and its arguments, tensors left out."""

    kernel: Any
    boxes: tuple[TensorDescriptor | None, ...]  # q q2 k k2 v v2 o o2
    grid: int
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    out_dtype: torch.dtype
    copies: tuple[bool, bool, bool]  # q k v: strides that TMA cannot take


def forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse); see `Backend.forward`."""
    o = operands
    q, k, v = o.q, o.k, o.v
    if not (q.numel() and k.numel()):
        return _without_keys(problem, o)
    plans = problem.memo.get("gluon")
    if plans is None:
        plans = problem.memo["gluon"] = {}
    device = q.device.index
    key = (q.stride(), k.stride(), v.stride(), device)
    plan = plans.get(key)
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return forward(problem, operands)
    if plan is None:
        plan = plans[key] = _make_plan(problem, o)
    copies = plan.copies
    if copies[0] or q.data_ptr() & 15:
        q = _aligned(q)
    if copies[1] or k.data_ptr() & 15:
        k = _aligned(k)
    if copies[2] or v.data_ptr() & 15:
        v = _aligned(v)
    if (q is not o.q) or (k is not o.k) or (v is not o.v):
        return _launch_copies(problem, o, (q, k, v))
    out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=q.device)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
    _launch(plan, o, (q, k, v), out, lse)
    return out, lse


def _launch(plan: Plan, o: Operands, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    """Start the kernel on the current stream."""
    q, k, v = qkv
    q1, q2, k1, k2, v1, v2, o1, o2 = cast("Any", plan.boxes)
    kernel = plan.kernel
    hooks = triton.knobs.runtime
    kernel.run(
        plan.grid, 1, 1, torch._C._cuda_getCurrentRawStream(q.device.index), kernel.function, kernel.packed_metadata,
        None, hooks.launch_enter_hook, hooks.launch_exit_hook,
        Box(q, q1), None if q2 is None else Box(q, q2), Box(k, k1), None if k2 is None else Box(k, k2),
        Box(v, v1), None if v2 is None else Box(v, v2), None if o1 is None else Box(out, o1),
        None if o2 is None else Box(out, o2),
        out, lse, lse if o.sink is None else o.sink,
        lse if o.cu_seqlens_q is None else o.cu_seqlens_q, lse if o.cu_seqlens_kv is None else o.cu_seqlens_kv,
        lse if o.seqlens_q is None else o.seqlens_q, lse if o.seqlens_kv is None else o.seqlens_kv,
        *plan.numbers, *plan.constants,
    )  # fmt: skip


def _launch_copies(problem: Problem, o: Operands, qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The call with inputs that had to be copied."""
    from dataclasses import replace

    return forward(problem, replace(o, q=qkv[0], k=qkv[1], v=qkv[2]))


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
    copies = (_must_copy(o.q), _must_copy(o.k), _must_copy(o.v))
    ragged, q = p.layout == "ragged", o.q
    out_shape = (*q.shape[:-1], p.head_dim_v)
    lse_shape = (p.num_heads_q, q.shape[0]) if ragged else (q.shape[0], p.num_heads_q, q.shape[1])
    out_dtype = getattr(torch, p.out_dtype)
    if any(copies) or any(x.data_ptr() & 15 for x in (o.q, o.k, o.v)):
        return Plan(None, (), 0, (), (), out_shape, lse_shape, out_dtype, copies)
    config, bounds = heuristics.forward_config(p), affine(p.mask)
    if bounds is None:
        raise ValueError(f"the gluon backend takes masks of one moving interval; got mask={p.mask!r}")
    block_q = 64 * config.consumers
    tiles = p.seqlen_q // block_q + p.batch + 1 if ragged else -(-p.seqlen_q // block_q)
    units = p.num_heads_q * (1 if ragged else p.batch)
    cap = next((s.cap for s in p.scores if isinstance(s, Softcap)), 0.0)
    scale_log2 = (2.0 * p.scale / cap if cap else p.scale) * LOG2E
    numbers = (
        p.batch, p.num_heads_q, p.group, p.seqlen_q, p.seqlen_kv, p.head_dim_v, bounds.left, bounds.right,
        bounds.right_top_left, tiles, min(heuristics.heads_together(p), units), tiles * units, scale_log2, cap * LOG2E,
    )  # fmt: skip
    kind = sum(bit << i for i, bit in enumerate(x < FAR for x in bounds))
    constants = (
        config.consumers, heuristics.STAGES, config.d[1], config.v[1], ragged, p.padded_q + 2 * p.padded_kv, kind,
        bool(kind & 6), p.scale < 0, bool(cap), p.has_sink, config.staging, config.registers[0],
    )  # fmt: skip
    out = torch.empty(out_shape, dtype=out_dtype, device=q.device)
    staged = config.staging > 0
    boxes = (
        _descriptor(q, 64, config.d[0]), _descriptor(q, 64, config.d[1]),
        _descriptor(o.k, config.block_kv, config.d[0]), _descriptor(o.k, config.block_kv, config.d[1]),
        _descriptor(o.v, config.block_kv, config.v[0]), _descriptor(o.v, config.block_kv, config.v[1]),
        _descriptor(out, 64, config.v[0]) if staged else None, _descriptor(out, 64, config.v[1]) if staged else None,
    )  # fmt: skip
    grid = min(_processors(q.device.index), tiles * units)
    plan = Plan(None, boxes, grid, numbers, constants, out_shape, lse_shape, out_dtype, copies)
    plan.kernel = _compile(plan, o, out, config)
    for box in boxes:
        if box is not None:
            box.base = None  # a plan keeps no tensor alive
    return plan


def _compile(plan: Plan, o: Operands, out: Tensor, config: heuristics.ForwardConfig) -> Any:
    """The compiled kernel of a plan; Triton finds it in memory or on disk if it has seen the like."""
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=out.device)
    kernel: Any = forward_kernel.run(
        *plan.boxes, out, lse, lse if o.sink is None else o.sink,
        lse if o.cu_seqlens_q is None else o.cu_seqlens_q, lse if o.cu_seqlens_kv is None else o.cu_seqlens_kv,
        lse if o.seqlens_q is None else o.seqlens_q, lse if o.seqlens_kv is None else o.seqlens_kv,
        *plan.numbers, *plan.constants,
        grid=(plan.grid,), warmup=True, num_warps=4, maxnreg=config.registers[1], enable_fp_fusion=True,
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
