"""The public calls: attention over dense and ragged sequences; `cached.py` has that over caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kilat.autograd import again, run
from kilat.gather import autocast, find_equal, modifiers
from kilat.numpy_door import as_int32, as_numpy, as_tensors, is_numpy, torch_dtype
from kilat.planning import PLAIN, names_of
from kilat.problem import Operands, Options
from kilat.shortcut import distinct, find
from kilat.validate_basic import check_flag, check_host_int

if TYPE_CHECKING:
    from kilat.dropout import Dropout
    from kilat.masks import Mask
    from kilat.scores import ScoreModifier

_any_autocast = torch._C._is_any_autocast_enabled
_is_compiling = torch.compiler.is_compiling


def _may_be_known(scale: Any, deterministic: Any, return_lse: Any, backend: Any) -> bool:
    """Whether these can stand in a key (True equals 1 there), and no tracer looks on."""
    flags = type(deterministic) is bool and type(return_lse) is bool
    return flags and (scale is None or type(scale) is float) and type(backend) is str and not _is_compiling()


def _is_hint(x: Any) -> bool:
    return x is None or (type(x) is int and x >= 0)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Mask | None = None,
    scores: Sequence[ScoreModifier] = (),
    sink: Any = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    seqlens_q: Any = None,
    seqlens_kv: Any = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Any:
    """Exact attention: softmax(modified scale q k^T, over the keys that the mask shows) v.

    s = scale q_i . k_j, changed by `scores`; lse_i = log(sum_j exp(s_ij) + exp(sink));
    out_i = sum_j exp(s_ij - lse_i) v_j.

    - q [batch, seqlen_q, num_heads_q, head_dim], k [batch, seqlen_kv, num_heads_kv, head_dim], v [..., head_dim_v]: all
      float16, bfloat16, float32 or float64, all torch tensors or all NumPy arrays, any strides. Query head h reads
      key/value head h // (num_heads_q / num_heads_kv).
    - mask: which keys a query sees, None for all; scores: Softcap, Alibi, Bias, Score; sink [num_heads_q].
    - scale: None is head_dim**-0.5. dropout: a Dropout. seqlens_q, seqlens_kv: int32 [batch], the lengths in use.
    - out_dtype: None for q's, or float32. deterministic: gradients repeat bit for bit.

    Returns out [batch, seqlen_q, num_heads_q, head_dim_v], and with return_lse also lse [batch, num_heads_q, seqlen_q].
    Raises TypeError or ValueError naming the argument, UnsupportedError if no backend that `backend` allows can do it.
    """
    site = None
    alone = scores == () and sink is None and dropout is None and out_dtype is None
    if alone and seqlens_q is None and seqlens_kv is None and _may_be_known(scale, deterministic, return_lse, backend):
        rest = "dense", scale, deterministic, backend
        plan = find(mask, rest, q, k, v)
        if plan is None:
            plan, site = find_equal(mask, rest, q, k, v)
        if plan is not None:
            return again(plan, None, return_lse, (q, k, v))
    arrays = type(q) is not Tensor and is_numpy(q, k, v)
    if arrays:
        site = None
        q, k, v, sink = as_tensors({"q": q, "k": k, "v": v, "sink": sink})
        seqlens_q, seqlens_kv = as_int32({"seqlens_q": seqlens_q, "seqlens_kv": seqlens_kv})
        out_dtype = torch_dtype(out_dtype)
    check_flag("return_lse", return_lse)
    check_flag("deterministic", deterministic)
    operands = Operands(q, k, v)
    parts = modifiers(mask, scores, sink, dropout, operands)
    operands.seqlens_q, operands.seqlens_kv = seqlens_q, seqlens_kv
    if _any_autocast():
        autocast(operands, cached=False)
        site = None
    structure, ordered, kind, p = parts
    options = Options("dense", structure, ordered, scale, kind, p, out_dtype, deterministic, False, None, backend)
    plain = sink is None and dropout is None and seqlens_q is None and seqlens_kv is None and ordered == ()
    names = PLAIN if plain and operands.mask_tensors == () else names_of(operands)
    result = run(options, operands, names, return_lse, site)
    return as_numpy(result) if arrays else result


def ragged_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    mask: Mask | None = None,
    scores: Sequence[ScoreModifier] = (),
    sink: Any = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Any:
    """Exact attention over sequences that lie one behind the other without padding.

    - q [total_q, num_heads_q, head_dim], k [total_kv, num_heads_kv, head_dim], v [total_kv, num_heads_kv, head_dim_v].
    - cu_seqlens_q, cu_seqlens_kv: int32 [batch + 1], sequence b is tokens cu_seqlens[b] to cu_seqlens[b + 1]; they
      start at 0, never decrease, and tokens past the last offset belong to no sequence (out 0, lse -inf).
    - max_seqlen_q, max_seqlen_kv: hints that never change a result. batch_invariant: a sequence's bits do not depend on
      its companions. Everything else is as in `attention`, with positions counted inside each sequence.

    Returns out [total_q, num_heads_q, head_dim_v], and with return_lse also lse [num_heads_q, total_q].
    """
    site = None
    alone = scores == () and sink is None and dropout is None and out_dtype is None and type(batch_invariant) is bool
    hinted = _is_hint(max_seqlen_q) and _is_hint(max_seqlen_kv)
    if alone and hinted and _may_be_known(scale, deterministic, return_lse, backend):
        offsets = distinct(cu_seqlens_q, cu_seqlens_kv)
        rest = "ragged", scale, deterministic, backend, batch_invariant, len(offsets)
        plan = find(mask, rest, q, k, v, *offsets)
        if plan is None:
            plan, site = find_equal(mask, rest, q, k, v, *offsets)
        if plan is not None:
            operands = Operands(q, k, v, cu_seqlens_q, cu_seqlens_kv)
            operands.max_seqlen_q, operands.max_seqlen_kv = max_seqlen_q, max_seqlen_kv
            return again(plan, operands, return_lse, (q, k, v, cu_seqlens_q, cu_seqlens_kv))
    arrays = type(q) is not Tensor and is_numpy(q, k, v)
    if arrays:
        site = None
        q, k, v, sink = as_tensors({"q": q, "k": k, "v": v, "sink": sink})
        cu_seqlens_q, cu_seqlens_kv = as_int32({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv})
        out_dtype = torch_dtype(out_dtype)
    check_flag("return_lse", return_lse)
    check_flag("deterministic", deterministic)
    check_flag("batch_invariant", batch_invariant)
    for name, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
        if hint is not None:
            check_host_int(name, hint, 0)
    operands = Operands(q, k, v, cu_seqlens_q, cu_seqlens_kv)
    structure, ordered, kind, p = modifiers(mask, scores, sink, dropout, operands)
    operands.max_seqlen_q, operands.max_seqlen_kv = max_seqlen_q, max_seqlen_kv
    if _any_autocast():
        autocast(operands, cached=False)
        site = None
    options = Options(
        "ragged", structure, ordered, scale, kind, p, out_dtype, deterministic, batch_invariant, None, backend
    )
    result = run(options, operands, names_of(operands), return_lse, site)
    return as_numpy(result) if arrays else result
