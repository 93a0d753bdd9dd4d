"""Checks of the tensors beside q, k and v: sink, scores, masks, dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kilat.masks import KeyRange, Prefix
from kilat.masks.core import leaves
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
