"""The check before the clock: float64 on all rows of a short cell, on sampled rows and keys of a long one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kilat.bench.cells import Cell
from kilat.bench.contenders import Inputs
from kilat.bench.oracle import forward_rows, head_gradients, max_error, sample_rows

FULL_CHECK_PAIRS = 1 << 22
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


def allowed_error(dtype: str, expected: Tensor, score: float) -> float:
    """4 eps(dtype) max|x| for the rounding of operands and result, and 2^-21 (1 + max|s|) max|x| for float32 scores.

    `score` is the largest |s|; float64 results are held to 2^-48 (1 + max|s|) max|x|.
    """
    size = float(expected.abs().max()) if expected.numel() else 0.0
    if dtype == "float64":
        return 2.0**-48 * (1 + score) * size
    return (4 * torch.finfo(getattr(torch, dtype)).eps + 2.0**-21 * (1 + score)) * size


@dataclass(frozen=True)
class Expected:
    """Float64 results of a cell at sampled rows and keys of some heads, and the largest |score| there."""

    values: dict[str, Tensor]
    rows: Tensor
    keys: Tensor
    heads: list[tuple[int, int]]
    score: float


def expect(cell: Cell, inputs: Inputs) -> Expected:
    """Compute what is right for a cell: every head forward, the first and the last in a backward."""
    everything = cell.seqlen_q * cell.seqlen_kv <= FULL_CHECK_PAIRS
    rows = sample_rows(cell.seqlen_q, cell.seqlen_q if everything else SAMPLES)
    keys = sample_rows(cell.seqlen_kv, cell.seqlen_kv if everything else SAMPLES)
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    norms = q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    score = float(norms) * cell.head_dim**-0.5
    if do is None:
        values = {"out": forward_rows(q, k, v, rows, causal=cell.causal)}
        return Expected(values, rows, keys, [], score)
    heads = sorted({(0, 0), (cell.batch - 1, cell.num_heads_q - 1)})
    found = [
        head_gradients(q[b, :, h], k[b, :, h], v[b, :, h], do[b, :, h], rows, keys, causal=cell.causal)
        for b, h in heads
    ]
    values = {name: torch.stack([getattr(head, name) for head in found]) for name in ("dq", "dk", "dv")}
    return Expected(values, rows, keys, heads, score)


def verify(cell: Cell, results: dict[str, Tensor], expected: Expected) -> list[Verdict]:
    """Compare a contender's results with what is right."""
    verdicts: list[Verdict] = []
    for name, right in expected.values.items():
        positions = expected.rows if name in ("out", "dq") else expected.keys
        if name == "out":
            mine = results[name][:, positions]
        else:
            mine = torch.stack([results[name][b, positions, h] for b, h in expected.heads])
        verdicts.append(Verdict(name, max_error(mine, right), allowed_error(cell.dtype, right, expected.score)))
    return verdicts
