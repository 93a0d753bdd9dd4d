"""The peers on a GPU: cuDNN and flash through torch's SDPA, FlexAttention, and flash-attn-4 where it is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kilat import config
from kilat.bench.cells import Cell
from kilat.bench.contenders import Contender, Inputs, backward_of, kilat_contender, leaf, swap
from kilat.bench.run import OURS, Makers

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class AbsentError(RuntimeError):
    """A peer that is not installed here, or has no call for such a cell."""


def not_asked_for(cell: Cell, inputs: Inputs) -> Contender:
    """Stands for a contender that the caller left out, so that every row says so."""
    del cell, inputs
    raise AbsentError("not asked for: --contender named others")


def _contender(cell: Cell, inputs: Inputs, attention: Attention, transpose: bool) -> Contender:
    """A forward call, or the backward of a graph that is kept, of an attention in kilat's layout or torch's."""

    def placed(x: Tensor) -> Tensor:
        return swap(x) if transpose else x

    q, k, v = placed(inputs.q), placed(inputs.k), placed(inputs.v)
    if inputs.do is not None:
        leaves = (leaf(q), leaf(k), leaf(v))
        return backward_of(attention(*leaves), leaves, placed(inputs.do), transpose)

    def results() -> dict[str, Tensor]:
        out = attention(q, k, v)
        return {"out": out.transpose(1, 2) if transpose else out}

    return Contender(lambda: attention(q, k, v), results)


def sdpa_backend(cell: Cell, inputs: Inputs, backend: SDPBackend) -> Contender:
    """One backend of torch's scaled_dot_product_attention; raises AbsentError for what its arguments cannot say."""
    if cell.window is not None:
        raise AbsentError("torch's SDPA has no window that this backend takes")
    if cell.lengths:
        raise AbsentError("torch's SDPA takes no ragged batch of plain tensors")
    grouped = cell.num_heads_q != cell.num_heads_kv

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=grouped)

    def context() -> Any:
        return sdpa_kernel(backend)

    with context():
        made = _contender(cell, inputs, attention, transpose=True)
    return Contender(made.call, made.results, context)


def flash(cell: Cell, inputs: Inputs) -> Contender:
    """torch's flash backend; for a ragged batch through torch.nn.attention.varlen."""
    offsets = inputs.offsets
    if offsets is None or cell.window is not None:
        return sdpa_backend(cell, inputs, SDPBackend.FLASH_ATTENTION)
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if cell.causal:  # the option's name changed between releases of torch
        named = "is_causal" in inspect.signature(varlen_attn).parameters
        options = {"is_causal": True} if named else {"window_size": (-1, 0)}
    longest = cell.seqlen_q

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
        return out if isinstance(out, Tensor) else out[0]

    return _contender(cell, inputs, attention, transpose=False)


@cache
def _compiled_flex() -> Any:
    """FlexAttention as one compiled function."""
    from torch import _dynamo
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import flex_attention

    # A kept graph runs its backward again and again; and past the limit torch falls back to an unfused path.
    functorch_config.donated_buffer = False
    _dynamo.config.recompile_limit = 512
    _dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(flex_attention, dynamic=False)


def flex(cell: Cell, inputs: Inputs) -> Contender:
    """FlexAttention, compiled, with a block mask where there is a mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    if cell.lengths:
        raise AbsentError("FlexAttention takes no ragged batch of plain tensors")
    window = cell.seqlen_kv if cell.window is None else cell.window
    shift = cell.seqlen_kv - cell.seqlen_q

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i + shift) & (i + shift - j <= window)

    sizes = (None, None, cell.seqlen_q, cell.seqlen_kv)
    mask = create_block_mask(visible, *sizes, device=cell.device) if cell.causal else None
    grouped, compiled = cell.num_heads_q != cell.num_heads_kv, _compiled_flex()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=mask, enable_gqa=grouped)

    return _contender(cell, inputs, attention, transpose=True)


@cache
def _fa4() -> Any:
    """flash-attn-4, which keeps its kernels on disk; raises AbsentError where it cannot be imported."""
    config.keep_flash_attn_4_kernels()
    try:
        from flash_attn import cute  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
    except Exception as error:  # its compiler's libraries raise what they like
        raise AbsentError(f"flash-attn-4 cannot be imported here: {type(error).__name__}: {error}") from error
    return cute


def load_fa4() -> None:
    """Import flash-attn-4, if it is there: about ten seconds, which nobody should wait for in a cell."""
    with suppress(AbsentError):
        _fa4()


def fa4(cell: Cell, inputs: Inputs) -> Contender:
    """flash-attn-4 (CuTe DSL), in the same layout as kilat."""
    cute, offsets = _fa4(), inputs.offsets
    options: dict[str, Any] = {"causal": cell.causal and cell.window is None}
    if cell.window is not None:
        options["window_size"] = (cell.window, 0)
    if offsets is not None:
        ends = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options |= ends | {"max_seqlen_q": cell.seqlen_q, "max_seqlen_k": cell.seqlen_kv}
    function = cute.flash_attn_func if offsets is None else cute.flash_attn_varlen_func

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, **options)[0]

    return _contender(cell, inputs, attention, transpose=False)


def makers(backend: str = "auto") -> Makers:
    """Everyone who is measured on a GPU, kilat first, on `backend`."""
    return {
        OURS: partial(kilat_contender, backend=backend),
        f"{OURS}-deterministic": partial(kilat_contender, backend=backend, deterministic=True),
        "cudnn": partial(sdpa_backend, backend=SDPBackend.CUDNN_ATTENTION),
        "flash": flash,
        "flex": flex,
        "fa4": fa4,
    }
