"""Who is measured: the same cell prepared for kilat and for torch, each in the layout that it likes best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import kilat
from kilat.bench.cells import Cell


@dataclass(frozen=True)
class Inputs:
    """Tensors of a cell in kilat's layout `[batch, seqlen, heads, head_dim]`; do only for a backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None


@dataclass(frozen=True)
class Contender:
    """A prepared call, and its results by name (out; or dq, dk, dv) in kilat's layout."""

    call: Callable[[], object]
    results: Callable[[], dict[str, Tensor]]


def make_inputs(cell: Cell, seed: int = 0) -> Inputs:
    """Draw standard normal inputs, the same for a cell in every run."""
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, cell.dtype)

    def normal(seqlen: int, heads: int) -> Tensor:
        return torch.randn(cell.batch, seqlen, heads, cell.head_dim, generator=generator).to(dtype)

    q = normal(cell.seqlen_q, cell.num_heads_q)
    k, v = normal(cell.seqlen_kv, cell.num_heads_kv), normal(cell.seqlen_kv, cell.num_heads_kv)
    return Inputs(q, k, v, normal(cell.seqlen_q, cell.num_heads_q) if cell.direction == "backward" else None)


def _backward(out: Tensor, inputs: tuple[Tensor, Tensor, Tensor], do: Tensor, transpose: bool) -> Contender:
    """The backward of a graph that is kept, so that every call does the same work and none of the forward's."""

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, do, retain_graph=True)

    def results() -> dict[str, Tensor]:
        grads = [grad.transpose(1, 2) if transpose else grad for grad in call()]
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return Contender(call, results)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _swap(x: Tensor) -> Tensor:
    """Copy `[batch, seqlen, heads, dim]` to torch's own order `[batch, heads, seqlen, dim]`."""
    return x.transpose(1, 2).contiguous()


def kilat_contender(cell: Cell, inputs: Inputs, backend: str = "auto") -> Contender:
    """kilat's call for a cell, on contiguous `[batch, seqlen, heads, head_dim]`."""
    mask = kilat.Causal() if cell.causal else None
    if cell.direction == "decode":
        cache = kilat.ContiguousCache(inputs.k, inputs.v, torch.full((cell.batch,), cell.seqlen_kv, dtype=torch.int32))

        def decode() -> Tensor:
            return kilat.cached_attention(inputs.q, cache, backend=backend)

        return Contender(decode, lambda: {"out": decode()})
    if inputs.do is not None:
        q, k, v = _leaf(inputs.q), _leaf(inputs.k), _leaf(inputs.v)
        out = kilat.attention(q, k, v, mask=mask, backend=backend)
        return _backward(out, (q, k, v), inputs.do, transpose=False)

    def forward() -> Tensor:
        return kilat.attention(inputs.q, inputs.k, inputs.v, mask=mask, backend=backend)

    return Contender(forward, lambda: {"out": forward()})


def sdpa_contender(cell: Cell, inputs: Inputs) -> Contender:
    """torch's scaled_dot_product_attention on contiguous `[batch, heads, seqlen, head_dim]`.

    A decode step folds the query heads of a group into rows of one head: on CPUs that is torch's fastest form, as
    enable_gqa copies K and V.
    """
    q, k, v = _swap(inputs.q), _swap(inputs.k), _swap(inputs.v)
    if cell.direction == "decode":
        folded = q.reshape(cell.batch, cell.num_heads_kv, -1, cell.head_dim)  # [batch, kv heads, group, head_dim]

        def decode() -> Tensor:
            return F.scaled_dot_product_attention(folded, k, v)

        return Contender(decode, lambda: {"out": decode().reshape(cell.batch, 1, cell.num_heads_q, cell.head_dim)})
    if inputs.do is not None:
        q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)
        return _backward(out, (q, k, v), _swap(inputs.do), transpose=True)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)

    return Contender(forward, lambda: {"out": forward().transpose(1, 2)})


MAKERS: dict[str, Callable[[Cell, Inputs], Contender]] = {"kilat": kilat_contender, "sdpa": sdpa_contender}
