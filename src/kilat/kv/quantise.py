"""Quantised storage: value = stored * scale, with stored in float8_e4m3fn or int8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kilat.problem import QUANTISED
from kilat.validate_tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence


def write(to: Tensor, scale: Tensor | None, where: Sequence[Tensor], x: Tensor, some: Tensor | None = None) -> None:
    """to[where] = x [tokens, heads, dim]; into a quantised tensor stored, and a token's scale beside it.

    some: a bool tensor [] that says, if it is False, that what lies there stays.
    """
    if scale is None:
        _put(to, tuple(where), x, some)
        return
    largest = QUANTISED[dtype_name(to)]
    x = x.float()
    if scale.dim() == 1:
        step = scale[:, None]
    else:
        step = x.abs().amax(-1, keepdim=True) / largest  # NaN and inf reach it, and through it the whole token
        _put(scale, tuple(where), step[..., 0], some)
    # As bytes: torch need not know how to place numbers of 8 bits.
    _put(to.view(torch.uint8), tuple(where), stored(x, step, to.dtype).view(torch.uint8), some)


def _put(to: Tensor, where: tuple[Tensor, ...], x: Tensor, some: Tensor | None) -> None:
    to.index_put_(where, x if some is None else torch.where(some, x, to[where]))


def stored(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in float32, rounded to the nearest number of `dtype` (ties to even), at its ends where it lies beyond.

    0 where the scale is 0; a NaN stays one in float8_e4m3fn and becomes 0 in int8.
    """
    x = x / torch.where(scale == 0, 1.0, scale)
    if dtype == torch.int8:
        return x.nan_to_num(0.0, torch.inf, -torch.inf).round().clamp(-128.0, 127.0).to(dtype)
    return x.clamp(-448.0, 448.0).to(dtype)
