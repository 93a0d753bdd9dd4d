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
    window: int | None
    store: Callable[[Tensor], Tensor]

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> _Head:
        """Take one head's `[seqlen, dim]` tensors."""
        dtype = q.dtype
        return _Head(q.double(), k.double(), v.double(), causal, window, lambda x: x.to(dtype).double())

    def scores(self, rows: Tensor) -> Tensor:
        """s = q k^T / sqrt(head_dim) of some rows, -inf where the mask (aligned bottom-right) hides a key."""
        s = self.q[rows] @ self.k.T * self.q.shape[-1] ** -0.5
        if not self.causal:
            return s
        seqlen_q, seqlen_kv = self.q.shape[0], self.k.shape[0]
        q_pos = rows[:, None] + (seqlen_kv - seqlen_q)
        j = torch.arange(seqlen_kv, device=s.device)
        hidden = j > q_pos
        if self.window is not None:
            hidden |= j < q_pos - self.window
        return s.masked_fill(hidden, float("-inf"))

    def attend(self, rows: Tensor) -> _Rows:
        """Softmax and output of some rows."""
        s = self.scores(rows)
        peak = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights = torch.exp(s - peak)  # what a kernel stores before it divides by the sum
        total = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        p = weights / total
        max_score = float(s.abs().nan_to_num(posinf=0.0).max()) if s.numel() else 0.0
        return _Rows(p, p @ self.v, self.store(weights) @ self.v / total, p @ self.v.abs(), max_score)


@dataclass(frozen=True)
class _Rows:
    """p, out, out with stored P rounded, out's magnitude, and the largest |s| of some query rows."""

    p: Tensor
    out: Tensor
    rounded: Tensor
    magnitude: Tensor
    max_score: float

    def probabilities(self, head: _Head, do: Tensor, keys: Tensor | slice) -> tuple[_Terms, _Terms, _Terms]:
        """P and dS of these rows at some keys: exact, rounded where a kernel stores them, and without cancellation.

        dp = do v^T, delta = sum(do * out), ds = p * (dp - delta).
        """
        p, v = self.p[:, keys], head.v[keys]
        dp = do @ v.T
        exact = p * (dp - (do * self.out).sum(-1, keepdim=True))
        rounded = head.store(p * (dp - (do * head.store(self.rounded)).sum(-1, keepdim=True)))
        magnitude = p * (do.abs() @ v.abs().T + (do.abs() * self.magnitude).sum(-1, keepdim=True))
        return _Terms(p, exact), _Terms(head.store(p), rounded), _Terms(p, magnitude)


@dataclass(frozen=True)
class _Terms:
    """P and dS, `[rows, keys]`."""

    p: Tensor
    ds: Tensor


def sample_rows(seqlen: int, count: int) -> Tensor:
    """Choose at most `count` distinct positions, the first and the last among them: int64, ascending."""
    if count >= seqlen:
        return torch.arange(seqlen)
    return torch.linspace(0, seqlen - 1, count).round().long().unique()


def forward_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *, causal: bool, window: int | None = None) -> Expected:
    """Float64 attention of sampled query rows.

    q is `[batch, seqlen_q, num_heads_q, head_dim]`, k and v `[batch, seqlen_kv, num_heads_kv, dim]`, rows int64
    `[rows]`; results are `[batch, rows, num_heads_q, head_dim_v]`, on the device of q. window is the number of keys
    before its own that a causal query sees. Memory is O(512 * seqlen_kv), a head at a time.
    """
    batch, _, num_heads, _ = q.shape
    group = num_heads // k.shape[2]
    rows = rows.to(q.device)
    shape = (batch, len(rows), num_heads, v.shape[-1])
    exact, rounded, magnitude = (torch.empty(shape, dtype=torch.float64, device=q.device) for _ in range(3))
    max_score = 0.0
    for b in range(batch):
        for h in range(num_heads):
            head = _Head.of(q[b, :, h], k[b, :, h // group], v[b, :, h // group], causal, window)
            for at in torch.arange(len(rows), device=q.device).split(CHUNK):
                found = head.attend(rows[at])
                exact[b, at, h], rounded[b, at, h], magnitude[b, at, h] = found.out, found.rounded, found.magnitude
                max_score = max(max_score, found.max_score)
    return Expected(exact, rounded, magnitude, max_score)


def head_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    rows: Tensor,
    keys: Tensor,
    *,
    causal: bool,
    window: int | None = None,
) -> dict[str, Expected]:
    """Float64 dq at sampled rows, dk and dv at sampled keys, of one head, by a pass over blocks of query rows.

    With p the probabilities, dp = do v^T and delta = sum(do * out): ds = p * (dp - delta), dv = p^T do,
    dq = scale ds k and dk = scale ds^T q. q, k, v and do are one head's `[seqlen, dim]`; 512 rows of scores are held at
    a time. Rounded: P, out and dS in the dtype of q, as kernels store them; magnitude: all terms positive.
    """
    head = _Head.of(q, k, v, causal, window)
    scale, max_score = q.shape[-1] ** -0.5, 0.0
    rows, keys = rows.to(q.device), keys.to(q.device)
    dk = [torch.zeros_like(head.k[keys]) for _ in range(3)]
    dv = [torch.zeros_like(head.v[keys]) for _ in range(3)]
    for block in torch.arange(q.shape[0], device=q.device).split(CHUNK):
        found, do64 = head.attend(block), do[block].double()
        max_score = max(max_score, found.max_score)
        signed, positive = (head.q[block], do64), (head.q[block].abs(), do64.abs())
        for n, terms in enumerate(found.probabilities(head, do64, keys)):
            q64, upstream = positive if n == 2 else signed
            dk[n] += scale * terms.ds.T @ q64
            dv[n] += terms.p.T @ upstream
    dq = [torch.empty_like(head.q[rows]) for _ in range(3)]
    for at in torch.arange(len(rows), device=q.device).split(CHUNK):
        terms = head.attend(rows[at]).probabilities(head, do[rows[at]].double(), slice(None))
        for n, k64 in enumerate((head.k, head.k, head.k.abs())):
            dq[n][at] = scale * terms[n].ds @ k64
    named = (("dq", dq), ("dk", dk), ("dv", dv))
    return {name: Expected(exact, rounded, positive, max_score) for name, (exact, rounded, positive) in named}


def add(one: Expected, other: Expected) -> Expected:
    """The sum of two results, as grouped query heads sum into their kv head."""
    return Expected(
        one.exact + other.exact,
        one.rounded + other.rounded,
        one.magnitude + other.magnitude,
        max(one.max_score, other.max_score),
    )
