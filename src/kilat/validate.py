"""Checks of everything a caller can get wrong short of the values inside tensors, and the Problem that results.

Runs once per kind of call (the plan that follows is looked up afterwards), also on fake tensors with symbolic sizes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kilat.masks.core import FAR
from kilat.problem import QUANTISED, Options, Problem
from kilat.validate_basic import check_device, check_flag, check_host_int, check_int32, check_rank, check_tensor, fail
from kilat.validate_tensors import (
    check_dropout,
    check_masks,
    check_ring,
    check_scales,
    check_scores,
    check_sink,
    dtype_name,
)

if TYPE_CHECKING:
    from kilat.problem import Operands

DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
MAX_HEAD_DIM = 512
MAX_HEAD_DIM_SHARED = 576  # keys whose first channels are the values (absorbed MLA decode)


def _names(layout: str, operands: Operands) -> tuple[str, str, str]:
    if layout != "cached":
        return "q", "k", "v"
    return ("q", "cache.k", "cache.v") if operands.page_table is None else ("q", "cache.k_pages", "cache.v_pages")


def _check_qkv_types(names: tuple[str, str, str], q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, value in zip(names, (q, k, v), strict=True):
        check_tensor(name, value)
    quantised = names[1] != "k" and dtype_name(k) in QUANTISED
    if not (q.dtype == k.dtype == v.dtype) and not (quantised and k.dtype == v.dtype):
        fail(
            TypeError,
            f"{names[0]}, {names[1]} and {names[2]} must have the same dtype",
            **{name: value.dtype for name, value in zip(names, (q, k, v), strict=True)},
        )
    if q.dtype not in DTYPE_NAMES:
        fail(TypeError, f"q must be {', '.join(DTYPE_NAMES.values())}", dtype=q.dtype)
    check_device(names[1], k, q.device)
    check_device(names[2], v, q.device)


def _axes(operands: Operands, layout: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the axes before the heads, of q and of k and v."""
    if layout == "ragged":
        return ("total_q",), ("total_kv",)
    q_axes = ("batch", "seqlen_q") if operands.cu_seqlens_q is None else ("total_q",)
    if operands.page_table is not None:
        return q_axes, ("num_pages", "page_size")
    return q_axes, ("batch", "capacity" if layout == "cached" else "seqlen_kv")


def _check_qkv_shapes(layout: str, names: tuple[str, str, str], operands: Operands) -> None:
    q, k, v = operands.q, operands.k, operands.v
    q_axes, kv_axes = _axes(operands, layout)
    check_rank(names[0], q, (*q_axes, "num_heads_q", "head_dim"))
    check_rank(names[1], k, (*kv_axes, "num_heads_kv", "head_dim"))
    check_rank(names[2], v, (*kv_axes, "num_heads_kv", "head_dim_v"))
    for axis, title in enumerate((*kv_axes, "num_heads_kv")):
        if k.shape[axis] != v.shape[axis]:
            fail(ValueError, f"{names[1]} and {names[2]} must have the same {title}", k=k.shape, v=v.shape)
    if q_axes[0] == kv_axes[0] == "batch" and q.shape[0] != k.shape[0]:
        fail(ValueError, f"{names[0]} and {names[1]} must have the same batch", q=q.shape, k=k.shape)
    if q.shape[-1] != k.shape[-1]:
        fail(ValueError, f"{names[0]} and {names[1]} must have the same head_dim", q=q.shape, k=k.shape)
    _check_heads(layout, q, k)
    _check_head_dims(q.shape[-1], v.shape[-1], MAX_HEAD_DIM_SHARED if layout == "cached" else MAX_HEAD_DIM)


def _check_heads(layout: str, q: Tensor, k: Tensor) -> None:
    num_heads_q, num_heads_kv = q.shape[-2], k.shape[-2]
    if num_heads_kv < 1 or num_heads_q < 1:
        fail(
            ValueError,
            "num_heads_q and num_heads_kv must be at least 1",
            num_heads_q=num_heads_q,
            num_heads_kv=num_heads_kv,
        )
    if num_heads_q % num_heads_kv != 0:
        wanted = "num_heads_kv must divide num_heads_q"
        if layout == "dense" and num_heads_q > q.shape[1] and num_heads_kv > k.shape[1] > 1:
            # more heads than tokens: the axes are most likely in SDPA's order
            wanted += " (axes are [batch, seqlen, heads, head_dim]; pass x.transpose(1, 2) if yours are SDPA's)"
        fail(ValueError, wanted, num_heads_q=num_heads_q, num_heads_kv=num_heads_kv)


def _check_head_dims(head_dim: int, head_dim_v: int, limit: int) -> None:
    if not 1 <= head_dim <= limit:
        fail(ValueError, f"head_dim must be from 1 to {limit}", head_dim=head_dim)
    if not 1 <= head_dim_v <= MAX_HEAD_DIM:
        fail(ValueError, f"head_dim_v must be from 1 to {MAX_HEAD_DIM}", head_dim_v=head_dim_v)


def _check_sequences(layout: str, operands: Operands, batch: int) -> None:
    """Dtypes, shapes and devices of offsets, lengths and page tables."""
    device = operands.q.device
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        value = getattr(operands, name)
        if value is not None or layout == "ragged":
            check_int32(name, value, (batch + 1,), "batch + 1", device)
    for name in ("seqlens_q", "seqlens_kv"):
        value = getattr(operands, name)
        if value is not None:
            shown = "cache.lengths" if layout == "cached" else name
            check_int32(shown, value, (batch,), "batch", device)
    table = operands.page_table
    if table is not None:
        check_tensor("cache.page_table", table)
        check_rank("cache.page_table", table, ("batch", "max_pages"))
        check_int32("cache.page_table", table, (batch, table.shape[1]), "batch, max_pages", device)


def batch_of(layout: str, operands: Operands) -> int:
    """The number of sequences of a call."""
    if layout == "dense":
        check_rank("q", operands.q, ("batch", "seqlen_q", "num_heads_q", "head_dim"))
        return operands.q.shape[0]
    offsets = operands.cu_seqlens_q
    lengths = operands.seqlens_kv
    if layout == "cached":
        if lengths is None or lengths.dim() != 1:
            fail(ValueError, "cache.lengths must be int32 [batch]", shape=None if lengths is None else lengths.shape)
        return lengths.shape[0]
    check_tensor("cu_seqlens_q", offsets)
    if offsets is None or offsets.dim() != 1 or offsets.shape[0] < 1:
        fail(ValueError, "cu_seqlens_q must be int32 [batch + 1]", shape=None if offsets is None else offsets.shape)
    return offsets.shape[0] - 1


def _check_options(options: Options, operands: Operands) -> None:
    """Host values: scale, flags, num_splits, out_dtype, the backend's name."""
    if options.scale is not None:
        if isinstance(options.scale, bool) or not isinstance(
            options.scale, int | float | torch.SymFloat | torch.SymInt
        ):
            fail(TypeError, "scale must be a number or None", type=type(options.scale).__name__)
        if isinstance(options.scale, int | float) and not math.isfinite(options.scale):
            fail(ValueError, "scale must be finite", scale=options.scale)
    check_flag("deterministic", options.deterministic)
    check_flag("batch_invariant", options.batch_invariant)
    if options.num_splits is not None:
        check_host_int("num_splits", options.num_splits, 1)
    if not isinstance(options.backend, str):
        fail(TypeError, "backend must be a name or 'auto'", type=type(options.backend).__name__)
    dtype = operands.q.dtype
    allowed = (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    if options.out_dtype is not None and options.out_dtype not in allowed:
        names = " or ".join(dict.fromkeys(str(x) for x in allowed))
        fail(ValueError, f"out_dtype must be None, {names} for q of {dtype}", out_dtype=options.out_dtype)
    check_out(options.out_dtype, operands)


def check_out(out_dtype: torch.dtype | None, operands: Operands) -> None:
    """ValueError unless the caller's buffer, if there is one, can hold the result."""
    out, dtype = operands.out, operands.q.dtype
    if out is not None:
        check_tensor("out", out)
        shape = (*operands.q.shape[:-1], operands.v.shape[-1])
        if out.shape != shape or out.dtype != (out_dtype or dtype) or out.device != operands.q.device:
            fail(
                ValueError,
                f"out must be {list(shape)}, {out_dtype or dtype}, on {operands.q.device}",
                shape=out.shape,
                dtype=out.dtype,
                device=out.device,
            )
        if out.shape[-1] > 1 and out.stride(-1) != 1:
            fail(ValueError, "out must be contiguous in its last axis", strides=list(out.stride()))
        if any(n > 1 and stride == 0 for n, stride in zip(out.shape, out.stride(), strict=True)):
            fail(ValueError, "out must not be expanded: each number needs a place", strides=list(out.stride()))


def _check_no_grad(operands: Operands) -> None:
    """ValueError if a cached call would need gradients: caches are forward only."""
    if not torch.is_grad_enabled():
        return
    names = operands.present()
    named = dict(zip(names, operands.flatten(names), strict=True))
    if operands.out is not None:
        named["out"] = operands.out
    for name, tensor in named.items():
        if tensor.requires_grad:
            fail(
                ValueError,
                f"caches are forward only: {name} must not require grad (detach it or use torch.no_grad())",
                requires_grad=True,
            )


def problem_of(options: Options, operands: Operands, grad_of: frozenset[str] = frozenset()) -> Problem:
    """The Problem of a call, after every check that needs no values inside tensors.

    Raises TypeError for wrong types and dtypes, ValueError for the rest, naming argument, expectation and value.
    """
    layout, q = options.layout, operands.q
    names = _names(layout, operands)
    _check_qkv_types(names, q, operands.k, operands.v)
    batch = batch_of(layout, operands)
    _check_qkv_shapes(layout, names, operands)
    _check_sequences(layout, operands, batch)
    check_scales(operands.k, operands.v, operands.k_scale, operands.v_scale)
    _check_options(options, operands)
    if operands.sink is not None:
        check_sink(operands.sink, q)
    check_scores(options, operands, batch)
    check_masks(options, operands, batch)
    check_ring(options, operands)
    check_dropout(options, operands, batch)
    if layout == "cached":
        _check_no_grad(operands)
    return _assemble(options, operands, batch, grad_of)


def _seqlen_kv(options: Options, operands: Operands) -> int:
    """Keys a sequence can have; ragged: of all sequences together."""
    if options.layout == "ragged":
        return operands.k.shape[0]
    if options.ring_first is not None:
        return FAR
    pages = 1 if operands.page_table is None else operands.page_table.shape[1]
    return pages * operands.k.shape[1]


def _assemble(options: Options, operands: Operands, batch: int, grad_of: frozenset[str]) -> Problem:
    q, k, v = operands.q, operands.k, operands.v
    dense, table = options.layout == "dense", operands.page_table
    page_size = 0 if table is None else k.shape[1]
    head_dim = q.shape[-1]
    return Problem(
        layout=options.layout,
        dtype=DTYPE_NAMES[q.dtype],
        out_dtype=DTYPE_NAMES[options.out_dtype or q.dtype],
        device=q.device.type,
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        num_heads_q=q.shape[-2],
        num_heads_kv=k.shape[-2],
        mask=options.mask,
        scores=options.scores,
        has_sink=operands.sink is not None,
        dropout=options.dropout,
        padded_q=dense and operands.seqlens_q is not None,
        padded_kv=dense and operands.seqlens_kv is not None,
        page_size=page_size,
        ring_first=options.ring_first,
        kv_dtype=dtype_name(k) if k.dtype != q.dtype else "",
        quantised="" if operands.k_scale is None else "head" if operands.k_scale.dim() == 1 else "token",
        needs_grad=bool(grad_of),
        grad_of=grad_of,
        deterministic=options.deterministic,
        batch_invariant=options.batch_invariant,
        batch=batch,
        seqlen_q=q.shape[0] if q.dim() == 3 else q.shape[1],
        seqlen_kv=_seqlen_kv(options, operands),
        scale=head_dim**-0.5 if options.scale is None else 1.0 * options.scale,
        dropout_p=options.dropout_p,
        num_splits=options.num_splits,
    )
