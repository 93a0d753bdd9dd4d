"""The host side of the backward on sm_90: what it takes, buffers, descriptors, launches.

Three kernels: `prepare` (delta, lse in log2 units, dQ's accumulator cleared), the main one, `finish` (dQ out of the
accumulator). With deterministic=True the main kernel leaves dQ to `backward_dq_kernel`, and there is no accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl

from kilat.backends.gluon import tuning
from kilat.backends.gluon.backward import backward_kernel
from kilat.backends.gluon.backward_dq import BLOCK_Q, backward_dq_kernel
from kilat.backends.gluon.backward_rows import finish_kernel, prepare_kernel
from kilat.backends.gluon.launching import Box, Launcher
from kilat.masks.affine import affine
from kilat.numerics import LOG2E
from kilat.problem import Grads
from kilat.scores import Softcap

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.problem import Operands, Problem

BLOCK_KV = 128
MAX_DIM = 128
ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def unsupported(problem: Problem) -> list[str]:
    """Every reason why this backward cannot do the problem, beyond the forward's own."""
    reasons: list[str] = []
    if max(problem.head_dim, problem.head_dim_v) > MAX_DIM:
        dims = f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}"
        reasons.append(f"the gluon backward takes head dimensions up to {MAX_DIM}; got {dims}")
    if problem.out_dtype != problem.dtype:
        reasons.append(f"the gluon backward needs out in q's dtype {problem.dtype}; got out_dtype={problem.out_dtype}")
    return reasons


@dataclass
class Plan:
    """What follows from the Problem alone, and the kernels compiled for it."""

    width: int  # the head dimension that kernels work in
    block_q: int
    tiles: int  # of 64 rows, from one query head to the next
    all_tiles: int
    programs: int
    ragged: bool
    sums_dq: bool  # by the main kernel, into an accumulator
    foreign: bool  # behind a sequence may lie what is not its own
    numbers: tuple[Any, ...]  # of the main kernel, in the order of its parameters
    constants: tuple[Any, ...]
    dq_programs: int
    dq_numbers: tuple[Any, ...]
    dq_constants: tuple[Any, ...]
    launch: Launcher = field(default_factory=Launcher)


def plan_of(problem: Problem) -> Plan:
    """The plan of a Problem, remembered with it."""
    plan = problem.memo.get("gluon backward")
    if plan is None:
        plan = problem.memo["gluon backward"] = _make_plan(problem)
    return plan


def _make_plan(p: Problem) -> Plan:
    bounds = affine(p.mask)
    if bounds is None:
        raise ValueError(f"the gluon backend takes masks of one moving interval; got mask={p.mask!r}")
    width = 64 if max(p.head_dim, p.head_dim_v) <= 64 else 128
    block_q, block_kv, ragged = (128 if width == 64 else 64), 8192 // width, p.layout == "ragged"

    def count(seqlen: int, block: int) -> int:
        return seqlen // block + p.batch if ragged else -(-seqlen // block)

    tiles, tiles_kv = count(p.seqlen_q, block_q) * (block_q // 64), count(p.seqlen_kv, BLOCK_KV)
    blocks, sequences = count(p.seqlen_q, BLOCK_Q.value), 1 if ragged else p.batch
    cap = next((s.cap for s in p.scores if isinstance(s, Softcap)), 0.0)
    # TMA cannot store rows that are no multiple of 16 bytes
    foreign = ragged or p.padded_q or p.padded_kv or p.head_dim % 8 > 0 or p.head_dim_v % 8 > 0
    masked = p.mask is not None or foreign or p.seqlen_kv % BLOCK_KV > 0
    sums_dq = "q" in p.grad_of and not p.deterministic
    turns = tuning.backward_config(p).turns
    factors = (p.scale, (2.0 * p.scale / cap if cap else p.scale) * LOG2E, cap * LOG2E)
    lengths = (p.batch, p.seqlen_q, p.seqlen_kv)
    return Plan(
        width=width,
        block_q=block_q,
        tiles=tiles,
        all_tiles=tiles * p.num_heads_q * sequences,
        programs=tiles_kv * p.num_heads_kv * sequences,
        ragged=ragged,
        sums_dq=sums_dq,
        foreign=foreign,
        numbers=(*lengths, p.num_heads_kv, *bounds, tiles_kv, tiles, p.head_dim, p.head_dim_v, *factors),
        constants=(block_q, width, 3 if width == 64 else 4, p.group, foreign, bool(cap), turns, sums_dq, masked),
        dq_programs=blocks * p.num_heads_q * sequences,
        dq_numbers=(*lengths, p.num_heads_q, *bounds, blocks, tiles, p.head_dim, *factors),
        dq_constants=(block_q, block_kv, width, p.group, bool(cap), foreign),
    )


def backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Gradients of what `problem.grad_of` names; see `Backend.backward`."""
    device = operands.q.device
    if torch.cuda.is_available() and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return _backward(problem, operands, out, lse, dout, dlse)
    return _backward(problem, operands, out, lse, dout, dlse)


def _backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    plan, o, wanted = plan_of(problem), operands, problem.grad_of
    made = torch.zeros if plan.foreign else torch.empty  # else every row is written
    dq, dk, dv = (made(x.shape, dtype=x.dtype, device=x.device) for x in (o.q, o.k, o.v))
    if not (problem.batch and o.q.numel() and o.k.numel()):
        for x in (dq, dk, dv):
            x.zero_()
    dout = dout if dout.dtype == o.q.dtype else dout.to(o.q.dtype)
    sink = None if o.sink is None else torch.zeros_like(o.sink)
    if problem.batch and o.q.numel():
        rows = torch.empty((2, plan.all_tiles, 64), dtype=torch.float32, device=o.q.device)
        pieces = plan.all_tiles * (plan.width // 64) * 32 if plan.sums_dq else 32
        dq_pieces = torch.empty((pieces, 128), dtype=torch.float32, device=o.q.device)
        _prepare(problem, o, (out, lse, dout, dlse), (rows, dq_pieces))
        if o.k.numel() and not wanted.isdisjoint("qkv"):
            _products(problem, o, dout, (rows, dq_pieces), (dq, dk, dv))
        if o.sink is not None and "sink" in wanted:
            sink = _sink_gradient(problem, o.sink, rows)
    return Grads(
        dq if "q" in wanted else None,
        dk if "k" in wanted else None,
        dv if "v" in wanted else None,
        sink if "sink" in wanted else None,
        [[] for _ in problem.scores],
    )


def _prepare(problem: Problem, o: Operands, given: tuple[Any, ...], made: tuple[Tensor, Tensor]) -> None:
    plan, (out, lse, dout, dlse), (rows, dq_pieces) = plan_of(problem), given, made
    dlse = dlse if dlse is None or dlse.dtype == torch.float32 else dlse.float()
    of_dlse = (0, 0, 0)
    if dlse is not None:
        of_dlse = (0 if plan.ragged else dlse.stride(0), dlse.stride(-1), dlse.stride(-2))
    plan.launch(
        prepare_kernel,
        plan.all_tiles // (plan.block_q // 64),
        (out, dout, lse.contiguous(), dlse, rows[0], rows[1], dq_pieces, o.cu_seqlens_q, o.seqlens_q),
        (
            problem.batch, problem.seqlen_q, problem.num_heads_q, plan.tiles, problem.head_dim_v,
            *_strides(out, plan.ragged), *_strides(dout, plan.ragged), *of_dlse,
        ),
        (plan.block_q, plan.width, plan.sums_dq),
    )  # fmt: skip


def _strides(x: Tensor, ragged: bool) -> tuple[int, ...]:
    """Strides (batch, token, head)."""
    return (0, *x.stride()[:2]) if ragged else tuple(x.stride()[:3])


def _products(
    problem: Problem, o: Operands, dout: Tensor, given: tuple[Tensor, Tensor], made: tuple[Tensor, ...]
) -> None:
    """The kernels between `prepare` and the end."""
    plan, (rows, dq_pieces), (dq, dk, dv) = plan_of(problem), given, made
    q, k, v, do = (readable(x, plan.ragged) for x in (o.q, o.k, o.v, dout))
    lengths = (o.cu_seqlens_q, o.cu_seqlens_kv, o.seqlens_q, o.seqlens_kv)
    # gradients are stored through a descriptor only where TMA can
    dk_box, dv_box = (k, v) if plan.foreign else (readable(dk, plan.ragged), readable(dv, plan.ragged))
    boxes = [(q, plan.block_q), (k, 64), (v, 64), (do, plan.block_q)]
    plan.launch(
        backward_kernel,
        plan.programs,
        (
            *(box(x, n, plan.width) for x, n in boxes), row_box(rows[0], 1, 64), row_box(rows[1], 1, 64),
            row_box(dq_pieces, 32, 128), box(dk_box, 64, plan.width), box(dv_box, 64, plan.width), dk, dv, *lengths,
        ),
        plan.numbers,
        plan.constants,
        maxnreg=168,
    )  # fmt: skip
    if plan.sums_dq:
        numbers = (problem.batch, problem.seqlen_q, problem.num_heads_q, plan.tiles, problem.head_dim, problem.scale)
        plan.launch(
            finish_kernel,
            plan.all_tiles // (plan.block_q // 64),
            (dq_pieces, dq, o.cu_seqlens_q, o.seqlens_q),
            numbers,
            (plan.block_q, plan.width),
        )
    elif "q" in problem.grad_of:
        block_kv, dq_box = plan.dq_constants[1], q if plan.foreign else readable(dq, plan.ragged)
        boxes = [(q, 64), (k, block_kv), (v, block_kv), (do, 64), (dq_box, 64)]
        plan.launch(
            backward_dq_kernel,
            plan.dq_programs,
            (*(box(x, n, plan.width) for x, n in boxes), dq, rows[0], rows[1], *lengths),
            plan.dq_numbers,
            plan.dq_constants,
            maxnreg=168,
        )


def readable(x: Tensor, ragged: bool) -> Tensor:
    """x as [batch, seqlen, heads, dim] that TMA can read: addresses and strides are multiples of 16 bytes, none 0."""
    x = x.detach().unsqueeze(0) if ragged else x.detach()
    unit, shape, strides = 16 // x.element_size(), x.shape, x.stride()
    good = x.data_ptr() % 16 == 0 and strides[3] == 1
    if good and all(n == 1 or (s > 0 and s % unit == 0) for s, n in zip(strides[:3], shape[:3], strict=True)):
        return x
    whole = x.new_empty((*shape[:3], -(-shape[3] // unit) * unit))
    return whole[..., : shape[3]].copy_(x)


def box(x: Tensor, rows: int, width: int) -> Box:
    """Boxes [1, rows, 1, width] of what `readable` returned."""
    unit = 16 // x.element_size()
    strides = [s if n > 1 else unit for s, n in zip(x.stride(), x.shape, strict=True)]
    strides[3] = 1
    shape = [1, rows, 1, width]
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return Box(x, list(x.shape), strides, shape, gl.NVMMASharedLayout.get_default_for(shape, kind))


def row_box(x: Tensor, rows: int, width: int) -> Box:
    """Boxes [rows, width] of a contiguous float32 matrix."""
    return Box(x, list(x.shape), list(x.stride()), [rows, width], ROW_LAYOUT)


def _sink_gradient(problem: Problem, sink: Tensor, rows: Tensor) -> Tensor:
    """dsink = - sum over rows of exp(sink - lse) * (delta - dlse)."""
    lse, delta = rows.view(2, -1, problem.num_heads_q, plan_of(problem).tiles * 64)
    share = torch.exp2(sink.float()[:, None] * LOG2E - lse)
    return -(share * delta).sum((0, 2)).to(sink.dtype)
