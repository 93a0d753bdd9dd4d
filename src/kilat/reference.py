"""The oracle: attention in float64, plain torch, dense scores, one head of one sequence at a time. Read it first.

It is slow, says what every option means, and is what all other backends are tested against. Queries are taken in blocks
of 512, so memory is O(seqlen) and long sequences can be checked on chosen `rows` and `heads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kilat import reference_parts as parts
from kilat.problem import Grads, Operands, Problem

BLOCK = 512
INF = float("inf")
# plain: nothing rounded; rounded: P, out, dS rounded as badly as q's dtype can; opposed: so too, but dS the other way;
# magnitude: every term of every sum made positive
Mode = Literal["plain", "rounded", "opposed", "magnitude"]


def attend(problem: Problem, op: Operands, at: parts.Place, h: int, i: Tensor, mode: Mode) -> parts.Tile:
    """One tile of the forward: s = scale q k^T, modifiers, mask, lse = log sum exp s, out = exp(s - lse) v."""
    q = op.q[at.q][i, h].double()
    k, v = parts.keys_values(op, at, h // problem.group)
    stages = [problem.scale * q @ k.T]
    for n in range(len(problem.scores)):
        stages.append(parts.modify(problem, op, n, stages[-1], at, h, i))
    s = stages[-1]
    visible = parts.visible(problem, op, at, h, i) & (s != -INF)  # only -inf hides a key
    s = torch.where(visible, s, -INF)
    # exp(s - max) / sum, and not exp(s - lse): next to scores of 1e300 the log of a sum is lost in lse
    peak = s.amax(1) if at.kv_len else s.new_full((len(i),), -INF)
    sink = s.new_tensor(-INF) if op.sink is None else op.sink[h].double()
    peak = torch.maximum(peak, sink)
    e = torch.where(visible, torch.exp(s - peak[:, None]), 0.0)
    total = torch.where(peak == -INF, 1.0, e.sum(1) + torch.exp(sink - peak))
    lse, p = peak + torch.log(total), torch.where(visible, e / total[:, None], 0.0)
    factor = parts.dropout(problem, op, at, h, i)
    if mode in ("rounded", "opposed"):  # kernels store exp(s - max) and divide by the sum at the end
        out = parts.product(parts.rounded(e * factor, op.q.dtype), visible, v) / total[:, None]
    else:
        out = parts.product(p * factor, visible, v.abs() if mode == "magnitude" else v)
    return parts.Tile(at, h, i, q, k, v, stages, visible, p, factor, lse, out)


def tiles(
    problem: Problem, op: Operands, mode: Mode, rows: Tensor | None, heads: Sequence[int] | None
) -> Iterator[parts.Tile]:
    """All tiles: sequences, then query heads, then blocks of (chosen) rows."""
    for at in parts.places(problem, op):
        chosen = torch.arange(at.q_len, device=op.q.device) if rows is None else rows[rows < at.q_len]
        for h in range(problem.num_heads_q) if heads is None else heads:
            for i in chosen.split(BLOCK) if len(chosen) else ():
                yield attend(problem, op, at, h, i, mode)


def forward(
    problem: Problem,
    operands: Operands,
    *,
    exact: bool = False,
    mode: Mode = "plain",
    rows: Tensor | None = None,
    heads: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as every backend returns them; exact=True keeps float64.

    rows (int64, inside each sequence) and heads restrict the work: other entries stay at out = 0, lse = -inf, which is
    also what rows past a used length and tokens past the last offset hold.
    """
    op = operands
    out = op.q.new_zeros((*op.q.shape[:-1], problem.head_dim_v), dtype=torch.float64)
    lse = op.q.new_full(op.q.shape[:-1], -INF, dtype=torch.float64)
    for t in tiles(problem, op, mode, rows, heads):
        out[t.at.q][t.i, t.h], lse[t.at.q][t.i, t.h] = t.out, t.lse
    lse = lse.transpose(-1, -2).contiguous()
    if exact:
        return out, lse
    out = out.to(getattr(torch, problem.out_dtype))
    out = out if op.out is None else op.out.copy_(out)
    return out, lse if problem.dtype == "float64" else lse.float()


def backward(
    problem: Problem,
    operands: Operands,
    out: Tensor | None,
    lse: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
    *,
    exact: bool = False,
    mode: Mode = "plain",
    rows: Tensor | None = None,
    heads: Sequence[int] | None = None,
) -> Grads:
    """Gradients of sum(dout * out) + sum(dlse * lse); out and lse are computed anew, exactly.

    delta = sum(dout * out), dV = (D P)^T dout, dP = D (dout V^T), dS = P (dP - delta + dlse), then the chain rule of
    the score modifiers in reverse, dQ = scale dS K, dK = scale dS^T Q, dsink = sum exp(sink - lse) (dlse - delta).
    """
    op, grads = operands, parts.Buffers(problem, operands)
    sign, absolute = (1.0, torch.abs) if mode == "magnitude" else (-1.0, lambda x: x)
    for t in tiles(problem, op, mode, rows, heads):
        noisy = mode in ("rounded", "opposed")
        at, h, i, hidden = t.at, t.h, t.i, ~t.visible
        do = absolute(dout[at.q][i, h].double())
        dl = torch.zeros_like(t.lse) if dlse is None else absolute(dlse.transpose(-1, -2)[at.q][i, h].double())
        q, k, v, scale = absolute(t.q), absolute(t.k), absolute(t.v), abs(problem.scale) if sign > 0 else problem.scale
        o = parts.rounded(t.out, getattr(torch, problem.out_dtype)) if noisy else t.out
        sees = t.lse > -INF  # a row that sees nothing ignores its do and dlse
        delta = torch.where(t.visible.any(1), (do * o).sum(1), 0.0)
        ds = t.p * (t.factor * (do @ v.T) + (dl + sign * delta)[:, None])
        ds = ds.masked_fill(hidden, 0.0)
        for n in reversed(range(len(problem.scores))):
            grads.add_score(n, t, ds, magnitude=sign > 0)
            ds = (ds * parts.slope(problem, op, n, t, magnitude=sign > 0)).masked_fill(hidden, 0.0)
        if noisy:
            ds = parts.rounded(ds, op.q.dtype) if mode == "rounded" else 2.0 * ds - parts.rounded(ds, op.q.dtype)
        pz = parts.rounded(t.p * t.factor, op.q.dtype) if noisy else t.p * t.factor
        grads.q[at.q][i, h] += scale * parts.product(ds, t.visible, k)
        grads.k[at.kv][:, h // problem.group] += scale * parts.product(ds.T, t.visible.T, q)
        grads.v[at.kv][:, h // problem.group] += parts.product(pz.T, t.visible.T, do)
        if op.sink is not None:
            share = torch.where(sees, torch.exp(op.sink[h].double() - t.lse), 0.0)
            grads.sink[h] += torch.where(sees, share * (dl + sign * delta), 0.0).sum()
    return grads.result(exact)


class Reference:
    """The oracle as a backend: anything but gradients through caches; never chosen by itself."""

    name = "reference"
    reads_rings = True
    forward = staticmethod(forward)
    backward = staticmethod(backward)

    def unsupported(self, problem: Problem) -> list[str]:
        """The same refusals as the core's."""
        return parts.refusals(problem)


BACKEND: Any = Reference()
