"""Checks of the tensors beside q, k and v: sink, scores, masks, dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kilat.masks import KeyRange, Prefix
from kilat.masks.core import leaves
from kilat.masks.window import ring_room
from kilat.problem import QUANTISED
from kilat.validate_basic import check_device, check_int32, check_tensor, fail, plain

if TYPE_CHECKING:
    from kilat.problem import Operands, Options


def check_sink(sink: Tensor, q: Tensor) -> None:
    """A sink is float32 or q's dtype, [num_heads_q], on q's device."""
    check_tensor("sink", sink)
    if sink.dtype not in (torch.float32, q.dtype):
        fail(TypeError, f"sink must be float32 or q's dtype {q.dtype}", dtype=sink.dtype)
    if sink.dim() != 1 or sink.shape[0] != q.shape[-2]:
        fail(ValueError, "sink must be [num_heads_q]", num_heads_q=q.shape[-2], shape=sink.shape)
    check_device("sink", sink, q.device)


def _lengths(layout: str, operands: Operands) -> tuple[int | None, int | None]:
    """(S_q, S_kv) that a score or mask tensor is broadcast to; None where the longest sequence decides (values)."""
    if layout == "dense":
        return operands.q.shape[1], operands.k.shape[1]
    if layout == "ragged":
        return None, None
    return (None if operands.cu_seqlens_q is not None else operands.q.shape[1]), None


def check_pairs(name: str, value: Tensor, layout: str, operands: Operands, batch: int) -> None:
    """ValueError unless `value` broadcasts to [batch, num_heads_q, S_q, S_kv]; ragged axes are checked with values."""
    seqlen_q, seqlen_kv = _lengths(layout, operands)
    full = (batch, operands.q.shape[-2], seqlen_q, seqlen_kv)
    shape = (1,) * (4 - value.dim()) + tuple(value.shape)
    titles = "[batch or 1, num_heads_q or 1, seqlen_q or 1, seqlen_kv or 1]"
    if len(shape) != 4 or any(n is not None and size != 1 and size != n for size, n in zip(shape, full, strict=True)):
        wanted = [plain(n) if n is not None else "S" for n in full]
        fail(ValueError, f"{name} must broadcast to {titles} = {wanted}", shape=value.shape)
    check_device(name, value, operands.q.device)


def check_scores(options: Options, operands: Operands, batch: int) -> None:
    """Devices, dtypes and shapes of the tensors of scores."""
    q = operands.q
    for n, score in enumerate(options.scores):
        tensors = operands.score_tensors[n]
        kind = type(score).__name__
        for tensor in tensors:
            check_tensor(f"a tensor of {kind}", tensor)
            check_device(f"a tensor of {kind}", tensor, q.device)
        if kind == "Alibi":
            _check_slopes(tensors[0], q, batch)
        elif kind == "Bias":
            if tensors[0].dtype not in (torch.float32, q.dtype):
                fail(TypeError, f"bias must be float32 or q's dtype {q.dtype}", dtype=tensors[0].dtype)
            check_pairs("bias", tensors[0], options.layout, operands, batch)
        sizes = _sizes(options.layout, operands)
        score.with_tensors(tensors).check(batch, q.shape[-2], *sizes, exact=options.layout == "dense")


def _sizes(layout: str, operands: Operands) -> tuple[Any, Any]:
    """Lengths that tensors of pairs must have at least; 0 where only values say them: all sequences may be empty."""
    return tuple(0 if n is None else n for n in _lengths(layout, operands))  # type: ignore[return-value]


def _check_slopes(slopes: Tensor, q: Tensor, batch: int) -> None:
    heads = q.shape[-2]
    if slopes.dtype not in (torch.float32, q.dtype):
        fail(TypeError, f"slopes must be float32 or q's dtype {q.dtype}", dtype=slopes.dtype)
    right = slopes.dim() in (1, 2) and slopes.shape[-1] == heads
    if not right or (slopes.dim() == 2 and slopes.shape[0] != batch):
        fail(
            ValueError,
            "slopes must be [num_heads_q] or [batch, num_heads_q]",
            num_heads_q=heads,
            batch=plain(batch),
            shape=slopes.shape,
        )
    if slopes.requires_grad and torch.is_grad_enabled():
        fail(
            ValueError,
            "slopes are constants and must not require grad (use a Score for learned slopes)",
            requires_grad=True,
        )


def check_masks(options: Options, operands: Operands, batch: int) -> None:
    """Devices, dtypes and shapes of the tensors of masks."""
    if options.mask is None or not operands.mask_tensors:
        return
    for tensor in operands.mask_tensors:
        check_tensor(f"a tensor of {options.mask.name}", tensor)
        check_device(f"a tensor of {options.mask.name}", tensor, operands.q.device)
    mask = options.mask.with_tensors(operands.mask_tensors)
    for leaf in leaves(mask):
        if isinstance(leaf, Prefix | KeyRange):
            for name, tensor in zip(leaf.tensor_fields, leaf.tensors(), strict=True):
                check_int32(f"{type(leaf).__name__}.{name}", tensor, (batch,), "batch", operands.q.device)
    sizes = _sizes(options.layout, operands)
    mask.check(batch, operands.q.shape[-2], *sizes, exact=options.layout == "dense")


def check_dropout(options: Options, operands: Operands, batch: int) -> None:
    """keep is bool and broadcasts over pairs; a tensor seed or offset is int64 []."""
    keep = operands.keep
    if keep is not None:
        check_tensor("keep", keep)
        if keep.dtype != torch.bool:
            fail(TypeError, "keep must be bool", dtype=keep.dtype)
        check_pairs("keep", keep, options.layout, operands, batch)
    for name in ("seed", "offset"):
        value = getattr(operands, name)
        if isinstance(value, Tensor) and (value.dim() != 0 or value.dtype != torch.int64):
            fail(
                TypeError, f"dropout {name} must be an int or a 0-d int64 tensor", shape=value.shape, dtype=value.dtype
            )


def check_ring(options: Options, operands: Operands) -> None:
    """ValueError unless the mask hides what a ring cache no longer holds; lengths of ragged queries are values."""
    first, slots = options.ring_first, operands.k.shape[1]
    if first is None:
        return
    room = ring_room(options.mask, first, slots)
    seqlen_q = _lengths("cached", operands)[0] or 0
    if room < 1 or seqlen_q > room:
        wanted = f"a ring needs a Window with first <= {first} and left + seqlen_q <= {slots - first} in its mask"
        got = "None" if options.mask is None else options.mask.name
        fail(ValueError, wanted, mask=got, seqlen_q=plain(seqlen_q))


def dtype_name(x: Tensor) -> str:
    """float32, int8, ..."""
    return str(x.dtype).removeprefix("torch.")


def check_scales(k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Scales are there exactly where k and v are quantised: float32, both one a head, or both one a token and head."""
    for name, x, scale in (("k", k, k_scale), ("v", v, v_scale)):
        if dtype_name(x) not in QUANTISED:
            if scale is not None:
                fail(TypeError, f"{name}_scale must be None where {name} is not quantised", dtype=x.dtype)
            continue
        if scale is None:
            fail(ValueError, f"{name}_scale must be given where {name} is {x.dtype}", **{f"{name}_scale": None})
        check_tensor(f"{name}_scale", scale)
        if scale.dtype != torch.float32:
            fail(TypeError, f"{name}_scale must be float32", dtype=scale.dtype)
        heads, tokens = x.shape[-2:-1], x.shape[:-1]
        if scale.shape not in (heads, tokens):
            wanted = f"[num_heads_kv] = {_plain(heads)} or [the tokens' axes, num_heads_kv] = {_plain(tokens)}"
            fail(ValueError, f"{name}_scale must be {wanted}", shape=scale.shape)
        check_device(f"{name}_scale", scale, k.device)
    if k_scale is not None and v_scale is not None and k_scale.dim() != v_scale.dim():
        wanted = "k_scale and v_scale must be both one a head or both one a token and head"
        fail(ValueError, wanted, k_scale=k_scale.shape, v_scale=v_scale.shape)


def _plain(shape: torch.Size) -> list[Any]:
    return [plain(n) for n in shape]
