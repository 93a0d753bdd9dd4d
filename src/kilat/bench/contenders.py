"""Who is measured: the same cell prepared for kilat and for torch, each in the layout that it likes best."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

import kilat
from kilat.bench.cells import Cell
from kilat.masks import Mask


@dataclass(frozen=True)
class Inputs:
    """Tensors of a cell in kilat's layout; do only for a backward, offsets (int32 `[batch + 1]`) only if ragged.

    Dense tensors are `[batch, seqlen, heads, head_dim]`, ragged ones `[total, heads, head_dim]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None
    offsets: Tensor | None = None


@dataclass(frozen=True)
class Contender:
    """A prepared call, its results by name (out; or dq, dk, dv) in kilat's layout, and what to enter around calls.

    `context` is entered outside the clock: it chooses among torch's backends. `backend` names kilat's own.
    """

    call: Callable[[], object]
    results: Callable[[], dict[str, Tensor]]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    backend: str = ""


def make_inputs(cell: Cell, seed: int = 0) -> Inputs:
    """Draw standard normal inputs, the same for a cell in every run."""
    generator = torch.Generator(cell.device).manual_seed(seed)
    dtype: torch.dtype = getattr(torch, cell.dtype)

    def normal(seqlen: int, heads: int, dim: int) -> Tensor:
        shape = (sum(cell.lengths), heads, dim) if cell.lengths else (cell.batch, seqlen, heads, dim)
        return torch.randn(shape, generator=generator, device=cell.device).to(dtype)

    q = normal(cell.seqlen_q, cell.num_heads_q, cell.head_dim)
    k = normal(cell.seqlen_kv, cell.num_heads_kv, cell.head_dim)
    v = normal(cell.seqlen_kv, cell.num_heads_kv, cell.dim_v)
    do = normal(cell.seqlen_q, cell.num_heads_q, cell.dim_v) if cell.direction == "backward" else None
    offsets = None
    if cell.lengths:
        offsets = torch.tensor(list(accumulate(cell.lengths, initial=0)), dtype=torch.int32, device=cell.device)
    return Inputs(q, k, v, do, offsets)


def backward_of(out: Tensor, inputs: tuple[Tensor, Tensor, Tensor], do: Tensor, transpose: bool) -> Contender:
    """The backward of a graph that is kept, so that every call does the same work and none of the forward's."""

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, do, retain_graph=True)

    def results() -> dict[str, Tensor]:
        grads = [grad.transpose(1, 2) if transpose else grad for grad in call()]
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return Contender(call, results)


def leaf(x: Tensor) -> Tensor:
    """Copy a tensor as one that wants a gradient."""
    return x.detach().clone().requires_grad_()


def swap(x: Tensor) -> Tensor:
    """Copy `[batch, seqlen, heads, dim]` to torch's own order `[batch, heads, seqlen, dim]`."""
    return x.transpose(1, 2).contiguous()


def mask_of(cell: Cell) -> Mask | None:
    """The cell's mask in kilat's words."""
    if cell.window is not None:
        return kilat.Window(cell.window, 0)
    return kilat.Causal() if cell.causal else None


def kilat_contender(cell: Cell, inputs: Inputs, backend: str = "auto", deterministic: bool = False) -> Contender:
    """kilat's call for a cell, on contiguous tensors in its own layout."""
    if cell.direction == "decode":
        return _kilat_decode(cell, inputs, backend)
    mask, offsets = mask_of(cell), inputs.offsets

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if offsets is None:
            return kilat.attention(q, k, v, mask=mask, backend=backend, deterministic=deterministic)
        return kilat.ragged_attention(
            q,
            k,
            v,
            offsets,
            offsets,
            max_seqlen_q=cell.seqlen_q,
            max_seqlen_kv=cell.seqlen_kv,
            mask=mask,
            backend=backend,
            deterministic=deterministic,
        )

    def chosen(q: Tensor, k: Tensor, v: Tensor) -> str:
        report = kilat.explain(q, k, v, offsets, offsets, mask=mask, backend=backend, deterministic=deterministic)
        return report.chosen or ""

    if inputs.do is not None:
        q, k, v = leaf(inputs.q), leaf(inputs.k), leaf(inputs.v)
        prepared = backward_of(attention(q, k, v), (q, k, v), inputs.do, transpose=False)
        return replace(prepared, backend=chosen(q, k, v))

    def forward() -> Tensor:
        return attention(inputs.q, inputs.k, inputs.v)

    return Contender(forward, lambda: {"out": forward()}, backend=chosen(inputs.q, inputs.k, inputs.v))


def _kilat_decode(cell: Cell, inputs: Inputs, backend: str) -> Contender:
    lengths = torch.full((cell.batch,), cell.seqlen_kv, dtype=torch.int32, device=cell.device)
    cache = kilat.ContiguousCache(inputs.k, inputs.v, lengths)

    def decode() -> Tensor:
        return kilat.cached_attention(inputs.q, cache, backend=backend)

    return Contender(decode, lambda: {"out": decode()})


def sdpa_contender(cell: Cell, inputs: Inputs) -> Contender:
    """torch's scaled_dot_product_attention on contiguous `[batch, heads, seqlen, head_dim]`.

    A decode step folds the query heads of a group into rows of one head: on CPUs that is torch's fastest form, as
    enable_gqa copies K and V.
    """
    q, k, v = swap(inputs.q), swap(inputs.k), swap(inputs.v)
    if cell.direction == "decode":
        folded = q.reshape(cell.batch, cell.num_heads_kv, -1, cell.head_dim)  # [batch, kv heads, group, head_dim]

        def decode() -> Tensor:
            return F.scaled_dot_product_attention(folded, k, v)

        return Contender(decode, lambda: {"out": decode().reshape(cell.batch, 1, cell.num_heads_q, cell.head_dim)})
    if inputs.do is not None:
        q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)
        return backward_of(out, (q, k, v), swap(inputs.do), transpose=True)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)

    return Contender(forward, lambda: {"out": forward().transpose(1, 2)})


MAKERS: dict[str, Callable[[Cell, Inputs], Contender]] = {"kilat": kilat_contender, "sdpa": sdpa_contender}
