"""The host side of the backward on sm_90: what it takes, buffers, descriptors, launches.

Three kernels: `prepare` (delta, lse in log2 units; clears dQ's accumulator, and of the gradients what no sequence
owns), the main one, `finish` (dQ out of the accumulator). With deterministic=True the main kernel leaves dQ to
`backward_dq_kernel`, and there is no accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kilat.backends.gluon import schedule
from kilat.backends.gluon.heuristics import DQ_BLOCK_Q, BackwardConfig, backward_config, has_foreign_rows
from kilat.backends.gluon.launching import Of, Step, Steps, aligned_copy, empty, matrix_box, must_copy, rows_box
from kilat.masks.affine import affine
from kilat.numerics import LOG2E
from kilat.problem import Grads
from kilat.scores import Softcap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kilat.problem import Operands, Problem


PREPARE, MAIN, BROAD, DQ_ALONE, FINISH = KERNELS = (
    "kilat.backends.gluon.backward_rows:prepare_kernel",
    "kilat.backends.gluon.backward:backward_kernel",
    "kilat.backends.gluon.backward_broad:backward_broad_kernel",
    "kilat.backends.gluon.backward_dq:backward_dq_kernel",
    "kilat.backends.gluon.backward_rows:finish_kernel",
)

# Tensors of a call, by number; behind them stand those of `OPTIONAL` that are given.
Q, K, V, DO, OUT, LSE, WORK, DQ, DK, DV = range(10)
OPTIONAL = ("dlse", "cu_seqlens_q", "cu_seqlens_kv", "seqlens_q", "seqlens_kv")

TILE = 4096  # elements that a program of `backward_rows` moves at a time


@dataclass
class Plan:
    """What follows from the Problem alone, and the kernels compiled for it."""

    config: BackwardConfig
    width: int  # of dQ's accumulator
    block_q: int
    tiles: int  # of 64 rows, from one query head to the next
    all_tiles: int
    pieces: int  # of dQ's accumulator
    programs: int
    ragged: bool
    sums_dq: bool  # by the main kernel, into an accumulator
    foreign: bool  # behind a sequence may lie what is not its own
    numbers: tuple[Any, ...]  # of the main kernel, in the order of its parameters
    constants: tuple[Any, ...]
    dq_programs: int
    dq_numbers: tuple[Any, ...]
    dq_constants: tuple[Any, ...]
    launches: dict[Any, Steps] = field(default_factory=dict[Any, "Steps"])  # by strides and alignment


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
    config, ragged = backward_config(p), p.layout == "ragged"
    block_q, block_kv, dq_block_kv = config.block_q, config.block_kv, config.dq_block_kv

    def count(seqlen: int, block: int) -> int:
        return seqlen // block + p.batch if ragged else -(-seqlen // block)

    tiles, tiles_kv = count(p.seqlen_q, block_q) * (block_q // 64), count(p.seqlen_kv, block_kv)
    blocks, sequences = count(p.seqlen_q, DQ_BLOCK_Q), 1 if ragged else p.batch
    cap = next((s.cap for s in p.scores if isinstance(s, Softcap)), 0.0)
    foreign = has_foreign_rows(p)
    masked = p.mask is not None or foreign or p.seqlen_kv % block_kv > 0
    sums_dq = "q" in p.grad_of and not p.deterministic
    width = sum(config.d)
    if config.broad:
        constants = (*config.d, *config.v, p.group, foreign, bool(cap), config.down, sums_dq, masked)
    else:
        stages = 2 if width == 64 else 3
        constants = (block_q, width, 3, stages, p.group, foreign, bool(cap), config.down, sums_dq, masked)
    factors = (p.scale, (2.0 * p.scale / cap if cap else p.scale) * LOG2E, cap * LOG2E)
    lengths = (p.batch, p.seqlen_q, p.seqlen_kv)
    order: list[schedule.Order] = [schedule.ONE_AFTER_ANOTHER] * 2
    if not ragged:  # lengths of sequences are not known here
        of_keys = schedule.query_blocks(bounds, block_q, block_kv, p.seqlen_q, p.seqlen_kv) * p.group
        of_queries = schedule.key_blocks(bounds, DQ_BLOCK_Q, dq_block_kv, p.seqlen_q, p.seqlen_kv)[::-1]
        order[0] = schedule.order_of_heads(of_keys, p.num_heads_kv * p.batch, p.group)
        if p.deterministic:
            order[1] = schedule.order_of_heads(of_queries, p.num_heads_q * p.batch)
    return Plan(
        config=config,
        width=width,
        block_q=block_q,
        tiles=tiles,
        all_tiles=tiles * p.num_heads_q * sequences,
        pieces=tiles * p.num_heads_q * sequences * (width // 64) * 32 if sums_dq else 32,
        programs=tiles_kv * p.num_heads_kv * sequences,
        ragged=ragged,
        sums_dq=sums_dq,
        foreign=foreign,
        numbers=(*lengths, p.num_heads_kv, *bounds, tiles_kv, *order[0], tiles, p.head_dim, p.head_dim_v, *factors),
        constants=constants,
        dq_programs=blocks * p.num_heads_q * sequences,
        dq_numbers=(*lengths, p.num_heads_q, *bounds, blocks, *order[1], tiles, p.head_dim, *factors),
        dq_constants=(block_q, dq_block_kv, *config.d, *config.v, p.group, bool(cap), foreign),
    )


def backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Gradients of what `problem.grad_of` names; see `Backend.backward`."""
    device = operands.q.get_device()
    if device >= 0 and torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return _backward(problem, operands, out, lse, dout, dlse)
    return _backward(problem, operands, out, lse, dout, dlse)


def _backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    plan, o, wanted = plan_of(problem), operands, problem.grad_of
    device = o.q.get_device()
    dq, dk, dv = [empty(tuple(x.shape), x.dtype, device) for x in (o.q, o.k, o.v)]
    sink = None if o.sink is None else torch.zeros_like(o.sink)
    if not (problem.batch and o.q.numel() and o.k.numel()):  # else the kernels write every row
        for x in (dq, dk, dv):
            x.zero_()
    if problem.batch and o.q.numel():
        dout = dout if dout.dtype == o.q.dtype else dout.to(o.q.dtype)
        dlse = dlse if dlse is None or dlse.dtype == torch.float32 else dlse.float()
        size = plan.all_tiles * 128 + plan.pieces * 128
        work = empty((size,), torch.float32, device)
        _launch(problem, o, [o.q, o.k, o.v, dout, out, lse.contiguous(), work, dq, dk, dv], dlse)
        if o.sink is not None and "sink" in wanted:
            sink = _sink_gradient(problem, o.sink, work)
    return Grads(
        dq if "q" in wanted else None,
        dk if "k" in wanted else None,
        dv if "v" in wanted else None,
        sink if "sink" in wanted else None,
        [[] for _ in problem.scores],
    )


def _launch(problem: Problem, o: Operands, tensors: list[Tensor], dlse: Tensor | None) -> None:
    """Launch what the call needs; adds the optional tensors to `tensors`."""
    plan = plan_of(problem)
    optional = (dlse, o.cu_seqlens_q, o.cu_seqlens_kv, o.seqlens_q, o.seqlens_kv)
    tensors += [x for x in optional if x is not None]
    addresses, bits = tuple([x.data_ptr() for x in tensors]), 0
    for address in addresses:
        bits |= address
    aligned = None if not bits & 15 else tuple([address & 15 for address in addresses])
    strides = tuple([x.stride() for x in tensors[:5]])
    key = (strides, None if dlse is None else dlse.stride(), aligned, o.q.get_device())
    steps = plan.launches.get(key)
    if steps is None:
        copies = [n for n in (Q, K, V, DO) if must_copy(tensors[n]) or addresses[n] & 15]
        if copies:
            ready = [aligned_copy(x) if n in copies else x for n, x in enumerate(tensors[:10])]
            _launch(problem, o, ready, dlse)
            return
        steps = plan.launches[key] = _steps(problem, tensors, [x is not None for x in optional])
    steps(tensors, addresses)


def _steps(p: Problem, tensors: list[Tensor], given: list[bool]) -> Steps:
    """The kernels of a call, compiled."""
    plan, behind = plan_of(p), iter(range(10, len(tensors)))
    optional = {name: Of(next(behind)) if there else None for name, there in zip(OPTIONAL, given, strict=True)}
    steps = [_prepare(p, tensors, optional)]
    if tensors[K].numel() and not p.grad_of.isdisjoint("qkv"):
        lengths = [optional[name] for name in OPTIONAL[1:]]
        steps.append(_main(plan, tensors, lengths))
        if plan.sums_dq:
            steps.append(_finish(p, tensors, optional))
        elif "q" in p.grad_of:
            steps.append(_dq(plan, tensors, lengths))
    return Steps(steps)


def _rows(plan: Plan, which: int, box: bool) -> Of:
    """lse (0) or delta (1) in the workspace."""
    return Of(WORK, matrix_box(plan.all_tiles, 64, 1) if box else None, which * plan.all_tiles * 64)


def _pieces(plan: Plan, box: bool) -> Of:
    """dQ's accumulator in the workspace."""
    return Of(WORK, matrix_box(plan.pieces, 128, 32) if box else None, plan.all_tiles * 128)


def _strides(x: Tensor, ragged: bool) -> tuple[int, ...]:
    """Strides (batch, token, head)."""
    return (0, *x.stride()[:2]) if ragged else tuple(x.stride()[:3])


def _prepare(p: Problem, tensors: list[Tensor], optional: dict[str, Of | None]) -> Step:
    plan, dlse, of_dlse = plan_of(p), optional["dlse"], (0, 0, 0)
    columns = 1 << (sum(plan.config.v) - 1).bit_length()
    rows, strides = min(plan.block_q, TILE // columns), [_strides(tensors[n], plan.ragged) for n in (OUT, DO)]
    piece = 1 if any(n % 8 for n in (p.head_dim_v, *strides[0], *strides[1])) else 8
    if dlse is not None:
        x = tensors[dlse.n]
        of_dlse = (0 if plan.ragged else x.stride(0), x.stride(-1), x.stride(-2))
    elements = (p.num_heads_q * p.head_dim, p.num_heads_kv * p.head_dim, p.num_heads_kv * p.head_dim_v)  # of a token
    unit = 1 if any(n % 8 for n in elements) else 8
    padded = (("q", DQ, p.padded_q), ("k", DK, p.padded_kv), ("v", DV, p.padded_kv))
    gaps = [Of(n) if name in p.grad_of and (plan.ragged or used) else None for name, n, used in padded]
    arguments = (
        Of(OUT), Of(DO), Of(LSE), dlse, _rows(plan, 0, False), _rows(plan, 1, False), _pieces(plan, False),
        optional["cu_seqlens_q"], optional["seqlens_q"], *gaps, optional["cu_seqlens_kv"], optional["seqlens_kv"],
        p.seqlen_kv, *(n // unit for n in elements), p.batch, p.seqlen_q, p.num_heads_q, plan.tiles,
        *(n // piece for n in (p.head_dim_v, *strides[0], *strides[1])), *of_dlse,
    )  # fmt: skip
    constants = (plan.block_q, rows, plan.width, columns, plan.sums_dq, unit, piece)
    return Step(PREPARE, plan.all_tiles * 64 // rows, arguments, constants, tensors=tensors)


def _boxes(plan: Plan, tensors: list[Tensor], cut: Sequence[tuple[int, int]]) -> list[Of | None]:
    """The two boxes (the second may be None) of each (tensor, rows)."""
    found: list[Of | None] = []
    for n, rows in cut:
        widths = plan.config.v if n in (V, DO, DV) else plan.config.d
        found += [Of(n, rows_box(tensors[n], rows, width)) if width else None for width in widths]
    return found


def _main(plan: Plan, tensors: list[Tensor], lengths: list[Of | None]) -> Step:
    inputs = _boxes(plan, tensors, [(Q, plan.block_q), (K, 64), (V, 64), (DO, plan.block_q)])
    # gradients are stored through a descriptor only where TMA can
    stored = _boxes(plan, tensors, [(K, 64), (V, 64)] if plan.foreign else [(DK, 64), (DV, 64)])
    rows, kernel = (_rows(plan, 0, True), _rows(plan, 1, True)), MAIN
    boxes = [*inputs[::2], *rows, _pieces(plan, True), *stored[::2]]
    if plan.config.broad:
        kernel, boxes = BROAD, [*inputs, *rows, *stored, _pieces(plan, False)]
    arguments = (*boxes, Of(DK), Of(DV), *lengths, *plan.numbers)
    return Step(kernel, plan.programs, arguments, plan.constants, maxnreg=168, tensors=tensors)


def _finish(p: Problem, tensors: list[Tensor], optional: dict[str, Of | None]) -> Step:
    plan = plan_of(p)
    columns = plan.width & -plan.width
    rows, piece = min(plan.block_q, TILE // columns), 1 if p.head_dim % 8 else 8
    arguments = (
        _pieces(plan, False), Of(DQ), optional["cu_seqlens_q"], optional["seqlens_q"],
        p.batch, p.seqlen_q, p.num_heads_q, plan.tiles, p.head_dim // piece, p.scale,
    )  # fmt: skip
    constants = (plan.block_q, rows, plan.width, columns, piece)
    return Step(FINISH, plan.all_tiles * 64 // rows, arguments, constants, tensors=tensors)


def _dq(plan: Plan, tensors: list[Tensor], lengths: list[Of | None]) -> Step:
    block_kv, stored = plan.config.dq_block_kv, Q if plan.foreign else DQ
    boxes = _boxes(plan, tensors, [(Q, 64), (K, block_kv), (V, block_kv), (DO, 64), (stored, 64)])
    arguments = (*boxes, Of(DQ), _rows(plan, 0, False), _rows(plan, 1, False), *lengths, *plan.dq_numbers)
    return Step(DQ_ALONE, plan.dq_programs, arguments, plan.dq_constants, maxnreg=168, tensors=tensors)


def _sink_gradient(problem: Problem, sink: Tensor, work: Tensor) -> Tensor:
    """dsink = - sum over rows of exp(sink - lse) * (delta - dlse)."""
    plan = plan_of(problem)
    lse, delta = work[: plan.all_tiles * 128].view(2, -1, problem.num_heads_q, plan.tiles * 64)
    share = torch.exp2(sink.float()[:, None] * LOG2E - lse)
    return -(share * delta).sum((0, 2)).to(sink.dtype)
