"""Streaming float64 attention on sampled rows and keys: an independent answer for lengths too long for scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kilat.numerics import accumulation_dtype, budget

CHUNK = 512


@dataclass(frozen=True)
class Expected:
    """Three float64 versions of a result, as `numerics.budget` wants them, and the largest visible |score|."""

    exact: Tensor
    rounded: Tensor
    magnitude: Tensor
    max_score: float

    def allowed(self, dtype: str) -> float:
        """Return the largest error that the budget allows a result computed and stored in `dtype`."""
        sums = accumulation_dtype(dtype)
        limits = budget(
            self.exact, self.rounded, self.magnitude, dtype=dtype, accumulate=sums, max_score=self.max_score
        )
        return limits.limit


@dataclass(frozen=True)
class _Head:
    """One query head of one sequence in float64, and the rounding to its dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    store: Callable[[Tensor], Tensor]

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> _Head:
        """Take one head's `[seqlen, dim]` tensors."""
        dtype = q.dtype
        return _Head(q.double(), k.double(), v.double(), causal, lambda x: x.to(dtype).double())

    def scores(self, rows: Tensor) -> Tensor:
        """s = q k^T / sqrt(head_dim) of some rows, -inf where causality (aligned bottom-right) hides a key."""
        s = self.q[rows] @ self.k.T * self.q.shape[-1] ** -0.5
        if not self.causal:
            return s
        seqlen_q, seqlen_kv = self.q.shape[0], self.k.shape[0]
        hidden = torch.arange(seqlen_kv) > rows[:, None] + (seqlen_kv - seqlen_q)
        return s.masked_fill(hidden, float("-inf"))

    def attend(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """Return p, out, out with stored P rounded, out's magnitude, and the largest |s| of some rows."""
        s = self.scores(rows)
        peak = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights = torch.exp(s - peak)  # what a kernel stores before it divides by the sum
        total = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        p = weights / total
        max_score = float(s.abs().nan_to_num(posinf=0.0).max()) if s.numel() else 0.0
        return p, p @ self.v, self.store(weights) @ self.v / total, p @ self.v.abs(), max_score


def sample_rows(seqlen: int, count: int) -> Tensor:
    """Choose at most `count` distinct positions, the first and the last among them: int64, ascending."""
    if count >= seqlen:
        return torch.arange(seqlen)
    return torch.linspace(0, seqlen - 1, count).round().long().unique()


def forward_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *, causal: bool) -> Expected:
    """Float64 attention of sampled query rows.

    q is `[batch, seqlen_q, num_heads_q, head_dim]`, k and v `[batch, seqlen_kv, num_heads_kv, dim]`, rows int64
    `[rows]`; results are `[batch, rows, num_heads_q, head_dim_v]`. Memory is O(512 * seqlen_kv), a head at a time.
    """
    batch, _, num_heads, _ = q.shape
    group = num_heads // k.shape[2]
    shape = (batch, len(rows), num_heads, v.shape[-1])
    exact, rounded, magnitude = (torch.empty(shape, dtype=torch.float64) for _ in range(3))
    max_score = 0.0
    for b in range(batch):
        for h in range(num_heads):
            head = _Head.of(q[b, :, h], k[b, :, h // group], v[b, :, h // group], causal)
            for at in torch.arange(len(rows)).split(CHUNK):
                found = head.attend(rows[at])
                exact[b, at, h], rounded[b, at, h], magnitude[b, at, h] = found[1:4]
                max_score = max(max_score, found[4])
    return Expected(exact, rounded, magnitude, max_score)


class _Sums:
    """dq at all rows, dk and dv at sampled keys, summed over blocks of query rows."""

    def __init__(self, head: _Head, keys: Tensor) -> None:
        self.keys = keys
        self.dq = torch.empty_like(head.q)
        self.dk = torch.zeros_like(head.k[keys])
        self.dv = torch.zeros_like(head.v[keys])

    def add(self, block: Tensor, p: Tensor, ds: Tensor, q: Tensor, k: Tensor, do: Tensor) -> None:
        """dq = scale ds k, dk += scale ds^T q, dv += p^T do, for one block of rows."""
        scale = q.shape[-1] ** -0.5
        self.dq[block] = scale * ds @ k
        self.dk += scale * ds[:, self.keys].T @ q
        self.dv += p[:, self.keys].T @ do


def head_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, rows: Tensor, keys: Tensor, *, causal: bool
) -> dict[str, Expected]:
    """Float64 dq at sampled rows, dk and dv at sampled keys, of one head, by a pass over blocks of query rows.

    With p the probabilities, dp = do v^T and delta = sum(do * out): ds = p * (dp - delta), dv = p^T do,
    dq = scale ds k and dk = scale ds^T q. q, k, v and do are one head's `[seqlen, dim]`; 512 rows of scores are held at
    a time. Rounded: P, out and dS in the dtype of q, as kernels store them; magnitude: all terms positive.
    """
    head = _Head.of(q, k, v, causal)
    plain, rounded, magnitude = (_Sums(head, keys) for _ in range(3))
    max_score = 0.0
    for block in torch.arange(q.shape[0]).split(CHUNK):
        p, out, out_rounded, out_magnitude, largest = head.attend(block)
        max_score = max(max_score, largest)
        do64, q64 = do[block].double(), head.q[block]
        dp = do64 @ head.v.T
        ds = p * (dp - (do64 * out).sum(-1, keepdim=True))
        plain.add(block, p, ds, q64, head.k, do64)
        ds = head.store(p * (dp - (do64 * head.store(out_rounded)).sum(-1, keepdim=True)))
        rounded.add(block, head.store(p), ds, q64, head.k, do64)
        ds = p * (do64.abs() @ head.v.abs().T + (do64.abs() * out_magnitude).sum(-1, keepdim=True))
        magnitude.add(block, p, ds, q64.abs(), head.k.abs(), do64.abs())
    return {
        "dq": Expected(plain.dq[rows], rounded.dq[rows], magnitude.dq[rows], max_score),
        "dk": Expected(plain.dk, rounded.dk, magnitude.dk, max_score),
        "dv": Expected(plain.dv, rounded.dv, magnitude.dv, max_score),
    }
