"""The check before the clock: float64 on all rows of a short cell, on sampled rows and keys of a long one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kilat.bench.cells import Cell
from kilat.bench.contenders import Inputs
from kilat.bench.oracle import Expected, add, forward_rows, head_gradients, sample_rows
from kilat.numerics import max_error

Take = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Verdict:
    """Largest error of a result against float64, and the largest that is allowed."""

    result: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the error is within what is allowed; NaN is not."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Part:
    """What is right for a part of a result, the largest error allowed, and how to take that part from the whole."""

    result: str
    take: Take
    exact: Tensor
    allowed: float


@dataclass(frozen=True)
class _Effort:
    """How much is checked: all positions if the pairs of a head are at most so many, else samples; heads by count."""

    full_pairs: int
    samples: int
    heads: int | None


# float64 is cheap on a GPU that has it, and what the check costs there is the time of a rented machine.
_EFFORT = {"cpu": _Effort(1 << 18, 64, None), "cuda": _Effort(1 << 24, 256, 4)}


def expect(cell: Cell, inputs: Inputs) -> list[Part]:
    """Compute what is right for a cell.

    On CPUs every head forward, the first and the last kv head in a backward; on GPUs four heads spread over the batch
    forward, two in a backward. A kv head of a backward is checked with all its query heads.
    """
    if inputs.do is None:
        return _forward_parts(cell, inputs)
    parts: list[Part] = []
    for b, head_kv in _spread(cell.batch, cell.num_heads_kv, 2):
        parts += _backward_parts(cell, inputs, b, head_kv)
    return parts


def verify(results: dict[str, Tensor], truth: list[Part]) -> list[Verdict]:
    """Compare a contender's results (out, or dq, dk, dv in kilat's layout) with what is right; one verdict a result.

    Everything that was not compared must at least be finite.
    """
    worst: dict[str, Verdict] = {}
    for part in truth:
        found = Verdict(part.result, max_error(part.take(results[part.result]), part.exact), part.allowed)
        if part.result not in worst or _closeness(found) > _closeness(worst[part.result]):
            worst[part.result] = found
    for name, verdict in worst.items():
        if not torch.isfinite(results[name]).all():
            worst[name] = replace(verdict, error=torch.inf)
    return list(worst.values())


def _part(cell: Cell, result: str, take: Take, expected: Expected) -> Part:
    """The exact values, on the CPU where they are compared, and the budget, both once for all contenders."""
    return Part(result, take, expected.exact.cpu(), expected.allowed(cell.dtype))


def _spread(batch: int, heads: int, count: int | None) -> list[tuple[int, int]]:
    """(batch entry, head) pairs: all, or `count` of them from the first to the last."""
    return [divmod(int(n), heads) for n in sample_rows(batch * heads, batch * heads if count is None else count)]


def _positions(cell: Cell, seqlen_q: int, seqlen_kv: int) -> tuple[Tensor, Tensor]:
    """Query rows and keys of a sequence at which results are compared."""
    effort = _EFFORT[cell.device]
    everything = seqlen_q * seqlen_kv <= effort.full_pairs
    rows = sample_rows(seqlen_q, seqlen_q if everything else effort.samples)
    keys = sample_rows(seqlen_kv, seqlen_kv if everything else effort.samples)
    return rows.to(cell.device), keys.to(cell.device)


def _sequence(cell: Cell, x: Tensor, b: int) -> Tensor:
    """`[seqlen, heads, dim]` of one batch entry."""
    if not cell.lengths:
        return x[b]
    start = sum(cell.lengths[:b])
    return x[start : start + cell.lengths[b]]


def _forward_parts(cell: Cell, inputs: Inputs) -> list[Part]:
    q, k, v = inputs.q, inputs.k, inputs.v
    heads = _EFFORT[cell.device].heads
    if heads is None and not cell.lengths:  # all at once: one budget for the whole result
        rows, _ = _positions(cell, cell.seqlen_q, cell.seqlen_kv)
        expected = forward_rows(q, k, v, rows, causal=cell.causal, window=cell.window)
        return [_part(cell, "out", lambda out: out[:, rows], expected)]
    parts: list[Part] = []
    for b, h in _spread(cell.batch, cell.num_heads_q, heads):
        rows, _ = _positions(cell, *cell.sequences[b])
        head_kv = h * cell.num_heads_kv // cell.num_heads_q
        one_q, one_k, one_v = (
            _sequence(cell, x, b)[None, :, at : at + 1] for x, at in ((q, h), (k, head_kv), (v, head_kv))
        )
        expected = forward_rows(one_q, one_k, one_v, rows, causal=cell.causal, window=cell.window)
        parts.append(_part(cell, "out", _take(cell, b, h, rows, (1, -1, 1, cell.dim_v)), expected))
    return parts


def _backward_parts(cell: Cell, inputs: Inputs, b: int, head_kv: int) -> list[Part]:
    """dq of every query head of a kv head, and its dk and dv, which are sums over them."""
    if inputs.do is None:
        raise ValueError("inputs must have do for a backward; got None")
    q, k, v, do = (_sequence(cell, x, b) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    rows, keys = _positions(cell, *cell.sequences[b])
    group = cell.num_heads_q // cell.num_heads_kv
    parts: list[Part] = []
    sums: dict[str, Expected] = {}
    for h in range(head_kv * group, (head_kv + 1) * group):
        one = (q[:, h], k[:, head_kv], v[:, head_kv], do[:, h])
        right = head_gradients(*one, rows, keys, causal=cell.causal, window=cell.window)
        parts.append(_part(cell, "dq", _take(cell, b, h, rows), right["dq"]))
        for name in ("dk", "dv"):
            sums[name] = add(sums[name], right[name]) if name in sums else right[name]
    return parts + [_part(cell, name, _take(cell, b, head_kv, keys), total) for name, total in sums.items()]


def _take(cell: Cell, b: int, head: int, positions: Tensor, shape: tuple[int, ...] | None = None) -> Take:
    """What takes some positions of one head of one sequence from a whole result."""

    def take(x: Tensor) -> Tensor:
        found = _sequence(cell, x, b)[positions, head]
        return found if shape is None else found.reshape(shape)

    return take


def _closeness(verdict: Verdict) -> float:
    """Error as a share of what is allowed; NaN counts as infinitely wrong."""
    share = verdict.error / verdict.allowed if verdict.allowed else 0.0
    return share if share == share else torch.inf
