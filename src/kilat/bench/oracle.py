"""Streaming float64 attention on sampled rows and keys: an independent answer for lengths too long for scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 512


@dataclass(frozen=True)
class HeadGradients:
    """Float64 results of one head: rows of out and dq `[rows, dim]`, keys of dk and dv `[keys, dim]`."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _visible(rows: Tensor, seqlen_q: int, seqlen_kv: int, causal: bool) -> Tensor | None:
    """Bottom-right causal visibility of some rows, bool `[rows, seqlen_kv]`; None if everything is visible."""
    if not causal:
        return None
    return torch.arange(seqlen_kv) <= rows[:, None] + (seqlen_kv - seqlen_q)


def _probabilities(q_rows: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) of some rows in float64, zero for rows that see nothing: `[rows, seqlen_kv]`."""
    s = q_rows.double() @ k.double().T * q_rows.shape[-1] ** -0.5
    if visible is not None:
        s = s.masked_fill(~visible, float("-inf"))
    return torch.nan_to_num(torch.softmax(s, -1), nan=0.0)


def sample_rows(seqlen: int, count: int) -> Tensor:
    """Choose at most `count` distinct positions, the first and the last among them: int64, ascending."""
    if count >= seqlen:
        return torch.arange(seqlen)
    return torch.linspace(0, seqlen - 1, count).round().long().unique()


def forward_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, *, causal: bool) -> Tensor:
    """Float64 attention of sampled query rows.

    q is `[batch, seqlen_q, num_heads_q, head_dim]`, k and v `[batch, seqlen_kv, num_heads_kv, dim]`, rows int64
    `[rows]`; the result is `[batch, rows, num_heads_q, head_dim_v]`. Memory is O(rows * seqlen_kv) for one head at a
    time.
    """
    batch, seqlen_q, num_heads, _ = q.shape
    seqlen_kv, group = k.shape[1], num_heads // k.shape[2]
    visible = _visible(rows, seqlen_q, seqlen_kv, causal)
    out = torch.empty(batch, len(rows), num_heads, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(num_heads):
            p = _probabilities(q[b, rows, h], k[b, :, h // group], visible)
            out[b, :, h] = p @ v[b, :, h // group].double()
    return out


def head_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, rows: Tensor, keys: Tensor, *, causal: bool
) -> HeadGradients:
    """Float64 out, dq, dk and dv of one head, at sampled rows and keys, by a pass over blocks of query rows.

    With p the probabilities, dp = do v^T and delta = sum(do * out): dv = p^T do, ds = p * (dp - delta), dq = scale ds
    k and dk = scale ds^T q. q, k, v and do are one head's `[seqlen, dim]`; the pass holds 512 rows of scores at a
    time.
    """
    seqlen_q, scale = q.shape[0], q.shape[-1] ** -0.5
    k64, v64 = k.double(), v.double()
    out = torch.empty(seqlen_q, v.shape[-1], dtype=torch.float64)
    dq = torch.empty(seqlen_q, q.shape[-1], dtype=torch.float64)
    dk = torch.zeros(len(keys), k.shape[-1], dtype=torch.float64)
    dv = torch.zeros(len(keys), v.shape[-1], dtype=torch.float64)
    for start in range(0, seqlen_q, CHUNK):
        block = torch.arange(start, min(seqlen_q, start + CHUNK))
        visible = _visible(block, seqlen_q, k.shape[0], causal)
        p = _probabilities(q[block], k64, visible)  # [block, seqlen_kv]
        do64 = do[block].double()
        out[block] = p @ v64
        delta = (do64 * out[block]).sum(-1, keepdim=True)
        ds = p * (do64 @ v64.T - delta)
        dq[block] = scale * ds @ k64
        dk += scale * ds[:, keys].T @ q[block].double()
        dv += p[:, keys].T @ do64
    return HeadGradients(out[rows], dq[rows], dk, dv)


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, in float64; inf if anything is not finite where it should be."""
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max())
