"""The host side of the forward: descriptors, the compiled kernel and the grid, worked out once a Problem."""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kilat.backends import common
from kilat.backends.common import contiguous_strides
from kilat.backends.gluon import heuristics, schedule, tuning
from kilat.backends.gluon.launching import Of, Step, Steps, aligned_copy, empty, must_copy, rows_box
from kilat.masks.affine import affine
from kilat.numerics import LOG2E
from kilat.problem import Operands
from kilat.scores import Softcap

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kilat.problem import Problem

TINY_SCALE = 1e-30
MAX_ORDERED = 1 << 17
"""Tiles of a dense call up to which a table says whose they are (2 MB)."""
KERNEL = "kilat.backends.gluon.forward:forward_kernel"
KERNELS = (KERNEL,)
OPTIONAL = ("sink", "cu_seqlens_q", "cu_seqlens_kv", "seqlens_q", "seqlens_kv")


@dataclass
class Plan:
    """What a call needs beyond its tensors."""

    launch: Steps | None  # None: the inputs are to be copied first
    optional: bool  # some of `OPTIONAL` are given
    order: Tensor | None  # of tiles, see `schedule`
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    out_dtype: torch.dtype


def forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse); see `Backend.forward`."""
    o = operands
    q, k, v = o.q, o.k, o.v
    if not (q.numel() and k.numel()):
        return _without_keys(problem, o)
    device = q.get_device()
    if device >= 0 and torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return forward(problem, operands)
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        ready = [aligned_copy(x) if x.data_ptr() & 15 else x for x in (q, k, v)]
        return forward(problem, replace(o, q=ready[0], k=ready[1], v=ready[2]))
    plan = _plan(problem, o)
    if plan.launch is None:
        ready = [aligned_copy(x) if must_copy(x) else x for x in (q, k, v)]
        return forward(problem, replace(o, q=ready[0], k=ready[1], v=ready[2]))
    out = empty(plan.out_shape, plan.out_dtype, device)
    lse = empty(plan.lse_shape, torch.float32, device)
    order = lse if plan.order is None else plan.order
    tensors = (q, k, v, out, lse, order, *_optional(o)) if plan.optional else (q, k, v, out, lse, order)
    plan.launch(tensors, tuple([x.data_ptr() for x in tensors]))
    return out, lse


def direct(problem: Problem, operands: Operands) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """The forward of q, k and v with the shapes, strides and device of these, when they are all there is.

    None where that takes more than a launch.
    """
    o = operands
    if not (o.q.numel() and o.k.numel()) or _optional(o):
        return None
    device = o.q.get_device()
    plan = _plan(problem, o)
    launch, out_shape, lse_shape, dtype = plan.launch, plan.out_shape, plan.lse_shape, plan.out_dtype
    if launch is None:
        return None
    current_device, float32 = torch._C._cuda_getDevice, torch.float32
    order, at_order = plan.order, 0 if plan.order is None else plan.order.data_ptr()
    out_strides, lse_strides = contiguous_strides(out_shape), contiguous_strides(lse_shape)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & 15 or current_device() != device:
            return forward(problem, Operands(q, k, v))
        out = common.empty_on_gpu(out_shape, out_strides, dtype)
        lse = common.empty_on_gpu(lse_shape, lse_strides, float32)
        at_lse = lse.data_ptr()
        addresses = (at_q, at_k, at_v, out.data_ptr(), at_lse, at_order or at_lse)
        launch((q, k, v, out, lse, lse if order is None else order), addresses)
        return out, lse

    return call


def _plan(problem: Problem, o: Operands) -> Plan:
    """The plan of tensors with these strides on this device, remembered with the Problem."""
    plans = problem.memo.get("gluon")
    if plans is None:
        plans = problem.memo["gluon"] = {}
    key = (o.q.stride(), o.k.stride(), o.v.stride(), o.q.get_device())
    plan = plans.get(key)
    if plan is None:
        if _is_capturing():
            raise RuntimeError(
                "a call must have been made once with these shapes before a CUDA graph captures it (its kernel is "
                f"compiled and its order of tiles copied then); got q {tuple(o.q.shape)}, k {tuple(o.k.shape)}"
            )
        plan = plans[key] = _make_plan(problem, o)
    return plan


def _optional(o: Operands) -> list[Tensor]:
    return [x for x in (getattr(o, name) for name in OPTIONAL) if x is not None]


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=16)
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _make_plan(p: Problem, o: Operands) -> Plan:
    """The plan of a Problem; compiles its kernel."""
    ragged, q = p.layout == "ragged", o.q
    out_shape = (*q.shape[:-1], p.head_dim_v)
    lse_shape = (p.num_heads_q, q.shape[0]) if ragged else (q.shape[0], p.num_heads_q, q.shape[1])
    out_dtype = getattr(torch, p.out_dtype)
    if any(map(must_copy, (o.q, o.k, o.v))):
        return Plan(None, False, None, out_shape, lse_shape, out_dtype)
    config, chosen, bounds = tuning.forward_config(p), tuning.schedule(p), affine(p.mask)
    if bounds is None:
        raise ValueError(f"the gluon backend takes masks of one moving interval; got mask={p.mask!r}")
    block_q = 64 * config.consumers
    tiles = p.seqlen_q // block_q + p.batch + 1 if ragged else -(-p.seqlen_q // block_q)
    units = p.num_heads_q * (1 if ragged else p.batch)
    cap = next((s.cap for s in p.scores if isinstance(s, Softcap)), 0.0)
    # With a softcap the kernel scales tanh(slope s) by the cap; a scale of 0 must leave the -inf of hidden keys alone.
    scale_log2, slope_log2 = (cap or p.scale or TINY_SCALE) * LOG2E, 2.0 * p.scale / cap * LOG2E if cap else 0.0
    kind = sum(bit << i for i, bit in enumerate(bounds.kind))
    together = min(heuristics.heads_together(p, chosen.megabytes << 20), units)
    grid = min(_processors(q.get_device()), tiles * units) if chosen.persistent else tiles * units
    order, turns = None, -(-tiles * units // grid)
    if chosen.persistent and not ragged and tiles * units <= MAX_ORDERED:
        blocks = schedule.key_blocks(bounds, block_q, config.block_kv, p.seqlen_q, p.seqlen_kv)
        order = schedule.on_device(q.device, blocks, (p.num_heads_q, p.num_heads_kv), p.batch, together, grid)
        turns = turns if order is None else len(order) - 1
    numbers = (
        p.batch, p.num_heads_q, p.group, p.seqlen_q, p.seqlen_kv, p.head_dim_v, bounds.left, bounds.right,
        bounds.right_top_left, tiles, together, turns, scale_log2, slope_log2,
    )  # fmt: skip
    constants = (
        config.consumers, config.stages, config.d[1], config.v[1], ragged, p.padded_q + 2 * p.padded_kv, kind,
        order is not None, p.scale < 0 and not cap, bool(cap), p.has_sink, config.staging, config.registers[0],
        config.q_stages, config.turns,
    )  # fmt: skip
    out = torch.empty(out_shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(lse_shape, device=q.device)
    tensors = (o.q, o.k, o.v, out, lse, lse if order is None else order, *_optional(o))
    rows, of_out = (64, config.block_kv, config.block_kv, 64), ((0, 0), config.v, config.v, (heuristics.PIECE, 0))
    widths = (config.d, config.d, config.v, of_out[config.staging])
    boxes = [Of(n, rows_box(tensors[n], rows[n], width)) if width else None for n in range(4) for width in widths[n]]
    given = iter(range(6, len(tensors)))
    optional = [Of(4 if getattr(o, name) is None else next(given)) for name in OPTIONAL]
    step = Step(
        KERNEL, grid, (*boxes, Of(3), Of(4), *optional, Of(5), *numbers), constants,
        maxnreg=config.registers[1], tensors=tensors,
    )  # fmt: skip
    return Plan(Steps([step]), len(tensors) > 6, order, out_shape, lse_shape, out_dtype)


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
