"""Launching the backward kernels: delta, buffers, and the gradients that come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kilat import config
from kilat.backends.triton import backward as kernels
from kilat.backends.triton import launch, tuning
from kilat.backends.triton.adapt import LARGEST_BLOCK, adapt, query_tiles, rows
from kilat.backends.triton.backward_scores_launch import score_gradients
from kilat.backends.triton.heuristics import INTERPRETED
from kilat.problem import Grads

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kilat.backends.triton.heuristics import Config
    from kilat.problem import Operands, Problem

DELTA_BLOCK = 64


def run_backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Gradients of what `problem.grad_of` names; see `Backend.backward`."""
    with launch.on_device(operands.q):
        call = Backward(problem, operands, out, lse, dout, dlse)
        grads, wanted = call.buffers(), problem.grad_of
        if "k" in wanted or "v" in wanted:
            call.keys(grads)
        if "q" in wanted:
            call.queries(grads)
        if "sink" in wanted and operands.sink is not None:
            grads.sink = call.sink_gradient(operands.sink)
        if problem.scores:
            grads.score_tensors = score_gradients(call)
    return grads


class Backward:
    """One call: what all its kernels read, with delta computed."""

    def __init__(
        self, problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> None:
        self.problem, self.operands, self.args = problem, operands, adapt(problem, operands)
        self.shared = self.args[:5]  # all but sink and spec
        self.capability, self.itemsize = launch.capability(operands.q), operands.q.element_size()
        self.do, self.lse = _readable(dout), lse.contiguous()
        self.delta = torch.empty_like(self.lse)
        grid = query_tiles(problem, operands, DELTA_BLOCK)
        if grid:
            dlse = None if dlse is None else dlse.float().contiguous()
            given = (rows(out), rows(self.do), dlse, self.delta, self.args.seqs, self.args.spec, DELTA_BLOCK)
            launch.start(kernels.delta_kernel, grid, given, {"num_warps": 4})

    def chosen(self, heuristic: Callable[..., Config]) -> Config:
        """A kernel's configuration."""
        if config.triton_interprets():
            return INTERPRETED
        return heuristic(self.args, self.itemsize, self.capability)

    def buffers(self) -> Grads:
        """Unwritten gradients of q, k and v: kernels write every row, owned by a sequence or not."""
        o, wanted = self.operands, self.problem.grad_of
        q, k, v = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if name in wanted else None
            for name, x in (("q", o.q), ("k", o.k), ("v", o.v))
        )
        return Grads(q, k, v)

    def keys(self, grads: Grads) -> None:
        """Fill the gradients of k and v."""
        o, p = self.operands, self.problem
        chosen = tuning.chosen("keys", p, self.args, o.q, self.capability)
        grid = key_tiles(p, o, chosen.block_kv)
        if grid:
            dk, dv = (None if x is None else rows(x) for x in (grads.k, grads.v))
            tensors = (rows(o.q), rows(o.k), rows(o.v), rows(self.do), dk, dv, self.lse, self.delta)
            launch.run(kernels.keys_kernel, grid, (*tensors, *self.shared, self.args.spec), chosen)

    def queries(self, grads: Grads) -> None:
        """Fill the gradient of q."""
        o, p = self.operands, self.problem
        chosen = tuning.chosen("queries", p, self.args, o.q, self.capability)
        grid = query_tiles(p, o, chosen.block_q)
        if grid and grads.q is not None:
            tensors = (rows(o.q), rows(o.k), rows(o.v), rows(self.do), rows(grads.q), self.lse, self.delta)
            launch.run(kernels.queries_kernel, grid, (*tensors, *self.shared, self.args.spec), chosen)

    def sink_gradient(self, sink: Tensor) -> Tensor:
        """dsink [heads] = sum exp(sink - lse) (dlse - rowsum(do * o)) over rows that a sequence owns."""
        share = torch.exp(sink.detach().float()[:, None] - self.lse)
        terms = torch.where(self.lse > -torch.inf, share * self.delta, 0.0)
        total = terms.sum(-1) if terms.dim() == 2 else terms.sum((0, 2))
        return (-total).to(sink.dtype)


def key_tiles(problem: Problem, operands: Operands, block: int) -> int:
    """Programs that `tiles_backward.key_tile` hands the keys to."""
    if operands.cu_seqlens_kv is not None:
        return (problem.seqlen_kv // block + problem.batch + 1) * problem.num_heads_kv if problem.seqlen_kv else 0
    return -(-problem.seqlen_kv // block) * problem.num_heads_kv * problem.batch


def _readable(x: Tensor) -> Tensor:
    """x, or a copy where its last axis is not contiguous or a tile of its rows spans 2^31 elements."""
    last = x.stride(-1) == 1 or x.shape[-1] == 1
    return x.detach() if last and x.stride(-3) * LARGEST_BLOCK < 2**31 else x.detach().contiguous()
