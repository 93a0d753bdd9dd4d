"""What `reference.py` is made of: where a sequence lies, what a mask shows, each score modifier, dropout, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilat.masks import Causal, Chunked, Dense, Documents, KeyRange, Predicate, Prefix, Window
from kilat.masks.core import IntervalMask, Mask, leaves
from kilat.problem import Grads, Operands, Problem
from kilat.scores import Alibi, Bias, Score, ScoreModifier, Softcap
from kilat.symbolic import evaluate

LOW = 0xFFFFFFFF  # the low 32 bits


class Place(NamedTuple):
    """Where sequence b lies: `x[place.q]` is [q_len, heads, dim], `x[place.kv]` [kv_len, heads, dim]."""

    b: int
    q_len: int
    kv_len: int
    q: tuple[Any, ...]
    kv: tuple[Any, ...]


@dataclass
class Tile:
    """The scores of one query head h of sequence b: rows `i` against all its keys, float64 [rows, kv_len]."""

    at: Place
    h: int
    i: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    stages: list[Tensor]  # s before each score modifier, and after the last
    visible: Tensor
    p: Tensor  # exp(s - lse); 0 where hidden
    factor: Tensor | float  # dropout: keep / (1 - p)
    lse: Tensor  # [rows]
    out: Tensor  # [rows, head_dim_v]


def places(problem: Problem, op: Operands) -> Iterator[Place]:
    """The sequences of a call, in every layout."""
    for b in range(problem.batch):
        q, q_len = _span(b, op.cu_seqlens_q, op.seqlens_q, problem.seqlen_q)
        kv, kv_len = _span(b, op.cu_seqlens_kv, op.seqlens_kv, problem.seqlen_kv)
        if op.page_table is not None:
            j = torch.arange(kv_len, device=op.q.device)
            kv = (op.page_table[b].long()[j // problem.page_size], j % problem.page_size)
        if problem.ring_first is not None:
            kv = (b, ring_slot(torch.arange(kv_len, device=op.q.device), problem.ring_first, op.k.shape[1]))
        yield Place(b, q_len, kv_len, q, kv)


def ring_slot(t: Tensor, first: int, slots: int) -> Tensor:
    """Where a ring cache has token t: the first ones stay, the others go round behind them."""
    return torch.where(t < first, t, first + (t - first) % (slots - first))


def _span(b: int, offsets: Tensor | None, lengths: Tensor | None, full: int) -> tuple[tuple[Any, ...], int]:
    """The index of sequence b on one side, and its length."""
    if offsets is not None:
        start, stop = int(offsets[b]), int(offsets[b + 1])
        return (slice(start, stop),), stop - start
    length = full if lengths is None else int(lengths[b])
    return (b, slice(0, length)), length


def keys_values(op: Operands, at: Place, kv_head: int) -> tuple[Tensor, Tensor]:
    """k and v of one head, float64 [kv_len, dim]; of quantised ones stored * scale, the product exact."""
    k, v = (x[at.kv][:, kv_head].double() for x in (op.k, op.v))
    scales = [s if s is None or s.dim() == 1 else s[at.kv] for s in (op.k_scale, op.v_scale)]
    k, v = (x if s is None else x * s[..., kv_head, None].double() for x, s in zip((k, v), scales, strict=True))
    return k, v


def pick(x: Tensor, b: int, h: int, i: Tensor, kv_len: int) -> Tensor:
    """x[b, h, i, :kv_len] of a tensor broadcastable to [batch, heads, seqlen_q, seqlen_kv]: a broadcastable matrix."""
    x = four_axes(x)
    matrix = x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]
    matrix = matrix[i] if matrix.shape[0] > 1 else matrix
    return matrix[:, :kv_len] if matrix.shape[1] > 1 else matrix


def four_axes(x: Tensor) -> Tensor:
    """Leading axes of size 1 added until there are four."""
    return x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))


def product(weight: Tensor, visible: Tensor, x: Tensor) -> Tensor:
    """weight @ x, where a hidden pair adds nothing even if its row of x is NaN or infinite."""
    sick = ~torch.isfinite(x).all(1)
    y = weight @ x.masked_fill(sick[:, None], 0.0)
    for j in sick.nonzero()[:, 0].tolist():
        y = y + torch.where(visible[:, j, None], weight[:, j, None] * x[j], 0.0)
    return y


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, each entry half a spacing of `dtype` larger or smaller by a fixed coin: the most that rounding can do."""
    info = torch.finfo(dtype)
    coins = torch.rand(x.shape, generator=torch.Generator().manual_seed(x.numel()), dtype=torch.float32)
    half = torch.copysign(0.5 * (x.abs() * info.eps).clamp(min=info.smallest_normal * info.eps), x)
    return torch.where(x == 0, x, torch.where(coins.to(x.device) < 0.5, x + half, x - half))


def positions(at: Place, i: Tensor) -> tuple[Tensor, Tensor]:
    """q_pos [rows, 1] and j [1, kv_len]: the last query is aligned with the last key."""
    return (i + at.kv_len - at.q_len)[:, None], torch.arange(at.kv_len, device=i.device)[None]


def dropout(problem: Problem, op: Operands, at: Place, h: int, i: Tensor) -> Tensor | float:
    """keep / (1 - p), float64 [rows, kv_len]; 1 without dropout and 0 everywhere for p = 1."""
    if not problem.dropout:
        return 1.0
    if problem.dropout_p == 1.0:
        return 0.0
    if op.keep is not None:
        keep = pick(op.keep, at.b, h, i, at.kv_len)
    else:
        words = philox(int(op.seed), int(op.offset), at.b * problem.num_heads_q + h, i.cpu().numpy(), at.kv_len)
        keep = torch.from_numpy(words >= problem.dropout_p * 2.0**32).to(i.device)
    return keep.double() / (1.0 - problem.dropout_p)


def philox(seed: int, offset: int, head: int, i: NDArray[Any], kv_len: int) -> NDArray[np.uint64]:
    """The random words of rows i, uint64 [rows, kv_len] below 2^32.

    Entry (i, j) is word j % 4 for counter (j // 4, i, head, offset_lo) and key (seed_lo, seed_hi xor offset_hi); head
    counts b * num_heads_q + h.
    """
    fours = np.arange((kv_len + 3) // 4, dtype=np.uint64)[None]
    ones = np.ones((len(i), fours.shape[1]), np.uint64)
    counter = [ones * np.uint64(offset & LOW) for _ in range(4)]
    counter[:3] = [fours * ones, i.astype(np.uint64)[:, None] * ones, np.uint64(head) * ones]
    words = philox4x32(counter, [seed & LOW, (seed >> 32 & LOW) ^ (offset >> 32 & LOW)])
    return np.stack(words, -1).reshape(len(i), -1)[:, :kv_len]


def philox4x32(counter: list[NDArray[np.uint64]], key: list[int]) -> list[NDArray[np.uint64]]:
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011) on four words of counter and two of key, each below 2^32."""
    c, low, half = counter, np.uint64(LOW), np.uint64(32)
    for n in range(10):
        k0, k1 = (np.uint64((word + n * step) & LOW) for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> half) ^ c[1] ^ k0, b & low, (a >> half) ^ c[3] ^ k1, a & low]
    return c


def visible(problem: Problem, op: Operands, at: Place, h: int, i: Tensor) -> Tensor:
    """What the mask shows of sequence b to head h, bool [rows, kv_len]; storage is no part of it."""
    shown = torch.ones((len(i), at.kv_len), dtype=torch.bool, device=i.device)
    if problem.mask is not None:
        for mask in leaves(problem.mask.with_tensors(op.mask_tensors)):
            shown &= _shown(mask, at, h, i)
    return shown


def _shown(mask: Mask, at: Place, h: int, i: Tensor) -> Tensor:
    """One mask as the semantics page writes it, and not by the interval functions that kernels use."""
    (q_pos, j), b = positions(at, i), at.b
    if isinstance(mask, Causal):
        return j <= (i[:, None] if mask.align == "top_left" else q_pos)
    if isinstance(mask, Window):
        left = torch.ones_like(j <= q_pos) if mask.left is None else j >= q_pos - mask.left
        right = torch.ones_like(left) if mask.right is None else j <= q_pos + mask.right
        return (left & right) | (j < mask.first)
    if isinstance(mask, Prefix):
        return (j <= q_pos) | (j < mask.lengths[b])
    if isinstance(mask, Chunked):
        return torch.floor_divide(j, mask.size) == torch.floor_divide(q_pos, mask.size)
    if isinstance(mask, KeyRange):
        return (j >= mask.start[b]) & (j < mask.stop[b])
    if isinstance(mask, Documents):
        ids = mask.ids if mask.ids.ndim == 1 else mask.ids[b if mask.ids.shape[0] > 1 else 0]
        mine = torch.where(q_pos >= 0, ids[q_pos.clamp(min=0)], -1) if at.kv_len else q_pos
        return (mine == ids[j]) & (mine >= 0)
    if isinstance(mask, Dense):
        return pick(mask.mask, b, h, i, at.kv_len)
    if isinstance(mask, Predicate):
        env = {"b": b, "h": h, "q_pos": q_pos, "j": j}
        return evaluate(mask.expr, env, mask.tensors(), torch, torch.float64)
    return _intervals(mask, at, i)


def _intervals(mask: Mask, at: Place, i: Tensor) -> Tensor:
    """A user's IntervalMask, by its own functions: the union of start <= j < stop."""
    if not isinstance(mask, IntervalMask):
        raise TypeError(f"mask must be an IntervalMask, Dense, Predicate or `&` of them; got {mask!r}")
    q_pos, j = positions(at, i)
    p, shown = mask.parameters(at.b, at.q_len, at.kv_len), torch.zeros_like(j <= q_pos)
    for start, stop in mask.intervals():
        ends = (torch.as_tensor(f(q_pos.cpu().numpy(), i[:, None].cpu().numpy(), p)) for f in (start, stop))
        first, last = (x.to(i.device) for x in ends)
        shown |= (j >= first) & (j < last)
    return shown


def modify(problem: Problem, op: Operands, n: int, s: Tensor, at: Place, h: int, i: Tensor) -> Tensor:
    """Score modifier n applied to s [rows, kv_len]."""
    score, tensors = problem.scores[n], op.score_tensors[n]
    q_pos, j = positions(at, i)
    if isinstance(score, Softcap):
        return score.cap * torch.tanh(s / score.cap)
    if isinstance(score, Alibi):
        slopes = tensors[0].double()
        slopes = slopes if slopes.ndim == 1 else slopes[at.b if slopes.shape[0] > 1 else 0]
        return s - slopes[h] * (q_pos - j).abs()
    if isinstance(score, Bias):
        return s + pick(tensors[0].double(), at.b, h, i, at.kv_len)
    return _user(_user_score(score).expr, tensors, s, at, h, i)


def slope(problem: Problem, op: Operands, n: int, t: Tile, magnitude: bool) -> Tensor:
    """The derivative of score modifier n with respect to its incoming s, where the tile met it.

    magnitude: of the terms that it is the difference of, since 1 - tanh^2 near 0 is as inexact as 1.
    """
    score, s = problem.scores[n], t.stages[n]
    if isinstance(score, Softcap):
        square = torch.tanh(s / score.cap) ** 2
        return 1.0 + square if magnitude else 1.0 - square
    if isinstance(score, Alibi | Bias):
        return torch.ones_like(s)
    derivative = _user(_user_score(score).d_expr, op.score_tensors[n], s, t.at, t.h, t.i)
    return 1.0 + derivative.abs() if magnitude else derivative


def _user_score(score: ScoreModifier) -> Score:
    """A user's score; TypeError for a modifier that this file does not know."""
    if not isinstance(score, Score):
        raise TypeError(f"scores must be Softcap, Alibi, Bias or Score objects; got {score!r}")
    return score


def _user(expr: Any, tensors: tuple[Tensor, ...], s: Tensor, at: Place, h: int, i: Tensor) -> Tensor:
    """A traced expression at every pair of a tile, float64 [rows, kv_len]."""
    q_pos, j = positions(at, i)
    env = {"s": s, "b": at.b, "h": h, "q_pos": q_pos, "j": j}
    value = evaluate(expr, env, [x.double() if x.is_floating_point() else x for x in tensors], torch)
    return torch.as_tensor(value, dtype=torch.float64, device=s.device).expand_as(s)


class Buffers:
    """Gradients under construction, float64, each of its input's shape."""

    def __init__(self, problem: Problem, op: Operands) -> None:
        self.problem, self.op = problem, op
        self.q, self.k, self.v = (torch.zeros_like(x, dtype=torch.float64) for x in (op.q, op.k, op.v))
        self.sink = torch.zeros(problem.num_heads_q, dtype=torch.float64, device=op.q.device)
        self.scores = [[torch.zeros_like(x, dtype=torch.float64) for x in group] for group in op.score_tensors]

    def add_score(self, n: int, t: Tile, ds: Tensor, magnitude: bool) -> None:
        """Add the gradient of modifier n's tensors, given ds of its result: a bias sums over its broadcast axes."""
        score = self.problem.scores[n]
        if isinstance(score, Bias):
            entry = four_axes(self.scores[n][0])
            entry = entry[t.at.b if entry.shape[0] > 1 else 0, t.h if entry.shape[1] > 1 else 0]
            rows = t.i if entry.shape[0] > 1 else torch.zeros_like(t.i)
            keys = torch.arange(t.at.kv_len, device=ds.device) if entry.shape[1] > 1 else torch.zeros_like(ds[0])
            entry.index_put_((rows[:, None], keys.long()[None]), ds, accumulate=True)
        elif isinstance(score, Score):
            for load, part in score.partials():
                value = _user(part, self.op.score_tensors[n], t.stages[n], t.at, t.h, t.i)
                change = ds * (value.abs() if magnitude else value)
                change = change.masked_fill(~t.visible, 0.0)
                target = self.scores[n][load.tensor]
                index = [_user(x, self.op.score_tensors[n], t.stages[n], t.at, t.h, t.i).long() for x in load.indices]
                index = [x.clamp(0, size - 1) for x, size in zip(index, target.shape, strict=True)]
                if index:
                    target.index_put_(tuple(index), change, accumulate=True)
                else:
                    target += change.sum()

    def result(self, exact: bool) -> Grads:
        """Each gradient in its input's dtype, None if `grad_of` does not name it; all of them in float64 if exact."""
        op, wanted = self.op, self.problem.grad_of

        def give(name: str, grad: Tensor, like: Tensor | None) -> Tensor | None:
            if like is None or not (exact or name in wanted):
                return None
            return grad if exact else grad.to(like.dtype)

        grads = Grads(give("q", self.q, op.q), give("k", self.k, op.k), give("v", self.v, op.v))
        grads.sink = give("sink", self.sink, op.sink)
        for score, made, given in zip(self.problem.scores, self.scores, op.score_tensors, strict=True):
            name = "bias" if isinstance(score, Bias) else "score_tensors"
            differentiable = isinstance(score, Bias | Score)
            grads.score_tensors.append(
                [give(name, x, like) if differentiable else None for x, like in zip(made, given, strict=True)]
            )
        return grads


def refusals(problem: Problem) -> list[str]:
    """Why the core cannot do a problem."""
    reasons: list[str] = []
    if problem.layout == "cached" and problem.needs_grad:
        reasons.append("caches are forward only: no input may require grad")
    return reasons
