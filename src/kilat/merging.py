"""Attention over disjoint sets of keys, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilat.numpy_door import as_tensor
from kilat.validate_basic import check_device, check_tensor, fail


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Attention over the union of disjoint key sets, from the results over each: as if computed at once.

    lse = log(sum_n exp(lse_n)), out = sum_n exp(lse_n - lse) out_n, in float32 (float64 for float64), in list order. A
    part with lse_n = -inf changes nothing; where all are -inf the result is (0, -inf). Differentiable.

    - outs: [batch, seqlen_q, num_heads_q, head_dim_v] each, or ragged [total_q, num_heads_q, head_dim_v]; lses:
      [batch, num_heads_q, seqlen_q] each, or ragged [num_heads_q, total_q]. A sink may belong to one part only.

    Returns (out in outs' dtype, lse). Raises ValueError for empty lists and for shapes that do not fit.
    """
    if not isinstance(outs, list | tuple) or not isinstance(lses, list | tuple):
        fail(TypeError, "outs and lses must be lists", outs=type(outs).__name__, lses=type(lses).__name__)
    if len(outs) != len(lses) or not outs:
        fail(ValueError, "outs and lses must be lists of the same length, at least 1", outs=len(outs), lses=len(lses))
    if any(isinstance(x, np.ndarray) for x in (*outs, *lses)):
        with torch.no_grad():
            parts = [as_tensor("outs", x) for x in outs], [as_tensor("lses", x) for x in lses]
            out, lse = merge(*parts)
        return out.numpy(), lse.numpy()
    _check(outs, lses)
    work = torch.float64 if lses[0].dtype == torch.float64 or outs[0].dtype == torch.float64 else torch.float32
    scaled = [x.to(work) for x in lses]
    with torch.no_grad():
        peak = torch.stack(scaled).amax(0)
        peak = torch.where(torch.isinf(peak), 0.0, peak)
    weights = [torch.exp(x - peak) for x in scaled]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    none = total == 0
    safe = torch.where(none, 1.0, total)
    lse = torch.where(none, -torch.inf, peak + torch.log(safe))
    result = None
    for out, weight in zip(outs, weights, strict=True):
        share = (weight / safe).transpose(-1, -2)[..., None]
        # A part that saw nothing is left out whatever its values are, in the gradient too.
        term = share * torch.where(share == 0, 0.0, out.to(work))
        result = term if result is None else result + term
    if result is None:
        raise ValueError("outs must hold at least one part; got none")
    return result.to(outs[0].dtype), lse


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for out, lse in zip(outs, lses, strict=True):
        check_tensor("outs", out)
        check_tensor("lses", lse)
        check_device("lses", lse, outs[0].device)
        if out.dtype != outs[0].dtype:
            fail(TypeError, "outs must share a dtype", first=outs[0].dtype, other=out.dtype)
        if out.dim() not in (3, 4) or out.shape != outs[0].shape:
            wanted = "outs must have one shape, [batch, seqlen_q, num_heads_q, head_dim_v] or ragged without the batch"
            fail(ValueError, wanted, first=outs[0].shape, other=out.shape)
        expected = (*out.shape[:-3], out.shape[-2], out.shape[-3])
        if tuple(lse.shape) != expected:
            fail(ValueError, f"lses must be {list(expected)} for outs of {list(out.shape)}", shape=lse.shape)
