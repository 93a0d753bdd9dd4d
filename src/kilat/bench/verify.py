"""The check before the clock: float64 on all rows of a short cell, on sampled rows and keys of a long one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kilat.bench.cells import Cell
from kilat.bench.contenders import Inputs
from kilat.bench.oracle import Expected, forward_rows, head_gradients, sample_rows
from kilat.numerics import max_error

FULL_CHECK_PAIRS = 1 << 18
SAMPLES = 64


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
class Truth:
    """What is right for a cell: results by name at sampled rows and keys; gradients of some (batch, head) pairs."""

    rows: Tensor
    keys: Tensor
    out: Expected | None
    gradients: dict[tuple[int, int], dict[str, Expected]]


def expect(cell: Cell, inputs: Inputs) -> Truth:
    """Compute what is right for a cell: every head forward, the first and the last in a backward.

    Raises ValueError for a backward with grouped heads, which this oracle does not sum.
    """
    everything = cell.seqlen_q * cell.seqlen_kv <= FULL_CHECK_PAIRS
    rows = sample_rows(cell.seqlen_q, cell.seqlen_q if everything else SAMPLES)
    keys = sample_rows(cell.seqlen_kv, cell.seqlen_kv if everything else SAMPLES)
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    if do is None:
        return Truth(rows, keys, forward_rows(q, k, v, rows, causal=cell.causal), {})
    if cell.num_heads_q != cell.num_heads_kv:
        raise ValueError(
            "num_heads_kv must equal num_heads_q where a backward is checked; "
            f"got num_heads_q={cell.num_heads_q}, num_heads_kv={cell.num_heads_kv}"
        )
    chosen = sorted({(0, 0), (cell.batch - 1, cell.num_heads_q - 1)})
    gradients = {
        (b, h): head_gradients(q[b, :, h], k[b, :, h], v[b, :, h], do[b, :, h], rows, keys, causal=cell.causal)
        for b, h in chosen
    }
    return Truth(rows, keys, None, gradients)


def verify(cell: Cell, results: dict[str, Tensor], truth: Truth) -> list[Verdict]:
    """Compare a contender's results (out, or dq, dk, dv in kilat's layout) with what is right; one verdict a result."""
    if truth.out is not None:
        error = max_error(results["out"][:, truth.rows], truth.out.exact)
        return [Verdict("out", error, truth.out.allowed(cell.dtype))]
    verdicts: list[Verdict] = []
    for name in ("dq", "dk", "dv"):
        positions = truth.rows if name == "dq" else truth.keys
        found = [
            Verdict(name, max_error(results[name][b, positions, h], right[name].exact), right[name].allowed(cell.dtype))
            for (b, h), right in truth.gradients.items()
        ]
        verdicts.append(max(found, key=_closeness))
    return verdicts


def _closeness(verdict: Verdict) -> float:
    """Error as a share of what is allowed; NaN counts as infinitely wrong."""
    share = verdict.error / verdict.allowed if verdict.allowed else 0.0
    return share if share == share else torch.inf
