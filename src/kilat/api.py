"""The public calls: attention over dense, ragged and cached sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kilat.autograd import run
from kilat.gather import autocast, modifiers
from kilat.kv import Cache
from kilat.masks import Causal, Mask
from kilat.numpy_door import is_numpy, numpy_call, torch_dtype
from kilat.plan import PLAIN
from kilat.problem import Operands, Options
from kilat.validate_basic import check_flag, fail

if TYPE_CHECKING:
    from kilat.dropout import Dropout
    from kilat.scores import ScoreModifier

_any_autocast = torch._C._is_any_autocast_enabled


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
    if type(q) is not Tensor and is_numpy(q, k, v):
        rest = _options_of(mask, scores, scale, dropout, return_lse, out_dtype, deterministic, backend)
        tensors = {"q": q, "k": k, "v": v, "sink": sink}
        return numpy_call(attention, tensors, {"seqlens_q": seqlens_q, "seqlens_kv": seqlens_kv}, rest)
    check_flag("return_lse", return_lse)
    operands = Operands(q, k, v)
    parts = modifiers(mask, scores, sink, dropout, operands)
    operands.seqlens_q, operands.seqlens_kv = seqlens_q, seqlens_kv
    if _any_autocast():
        autocast(operands, cached=False)
    structure, ordered, kind, p = parts
    options = Options("dense", structure, ordered, scale, kind, p, out_dtype, deterministic, False, None, backend)
    plain = sink is None and dropout is None and seqlens_q is None and seqlens_kv is None and ordered == ()
    names = PLAIN if plain and operands.mask_tensors == () else operands.present()
    return run(options, operands, names, return_lse)


def _options_of(
    mask: Mask | None,
    scores: Sequence[ScoreModifier],
    scale: float | None,
    dropout: Dropout | None,
    return_lse: bool,
    out_dtype: Any,
    deterministic: bool,
    backend: str,
) -> dict[str, Any]:
    """The arguments that dense and ragged calls share and that hold no array of the caller's."""
    return {
        "mask": mask,
        "scores": scores,
        "scale": scale,
        "dropout": dropout,
        "return_lse": return_lse,
        "out_dtype": torch_dtype(out_dtype),
        "deterministic": deterministic,
        "backend": backend,
    }


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
    if type(q) is not Tensor and is_numpy(q, k, v):
        rest = _options_of(mask, scores, scale, dropout, return_lse, out_dtype, deterministic, backend)
        rest |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv, "batch_invariant": batch_invariant}
        offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
        return numpy_call(ragged_attention, {"q": q, "k": k, "v": v, "sink": sink}, offsets, rest)
    check_flag("return_lse", return_lse)
    operands = Operands(q, k, v, cu_seqlens_q, cu_seqlens_kv)
    structure, ordered, kind, p = modifiers(mask, scores, sink, dropout, operands)
    operands.max_seqlen_q, operands.max_seqlen_kv = max_seqlen_q, max_seqlen_kv
    if _any_autocast():
        autocast(operands, cached=False)
    options = Options(
        "ragged", structure, ordered, scale, kind, p, out_dtype, deterministic, batch_invariant, None, backend
    )
    return run(options, operands, operands.present(), return_lse)


def cached_attention(
    q: Any,
    cache: Cache,
    *,
    cu_seqlens_q: Any = None,
    mask: Mask | None = Causal(),
    scores: Sequence[ScoreModifier] = (),
    sink: Any = None,
    scale: float | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    plan: Any = None,
    return_lse: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    backend: str = "auto",
) -> Any:
    """Exact attention of new queries to everything in a cache; forward only.

    - q [batch, seqlen_q, num_heads_q, head_dim], or [total_q, num_heads_q, head_dim] with cu_seqlens_q
      int32 [batch + 1].
    - cache: what `cache.append` has filled; append first: q_pos = i + lengths[b] - seqlen_q.
    - num_splits: parts that each sequence's keys are cut into, None to let the backend choose.
    - out: a buffer for the result. plan: None (no planner exists yet).

    Returns out like q with head_dim_v channels, and with return_lse also lse [batch, num_heads_q, seqlen_q] (ragged:
    [num_heads_q, total_q]). Raises ValueError if an input requires grad while autograd records.
    """
    if not isinstance(cache, Cache):
        fail(TypeError, "cache must be a ContiguousCache, a PagedCache or another Cache", type=type(cache).__name__)
    if plan is not None:
        fail(TypeError, "plan must be None: planning ahead is not available yet", type=type(plan).__name__)
    if type(q) is not Tensor and is_numpy(q):
        if not cache.holds_numpy:
            raise TypeError("q and the cache must be both torch tensors or both NumPy arrays; got an array and tensors")
        rest: dict[str, Any] = {"cache": cache, "mask": mask, "scores": scores, "scale": scale, "backend": backend}
        rest |= {"num_splits": num_splits, "batch_invariant": batch_invariant, "return_lse": return_lse}
        rest |= {"out_dtype": torch_dtype(out_dtype), "allow_numpy_cache": True}
        return numpy_call(_cached, {"q": q, "sink": sink, "out": out}, {"cu_seqlens_q": cu_seqlens_q}, rest)
    return _cached(
        q,
        cache,
        cu_seqlens_q,
        mask,
        scores,
        sink,
        scale,
        num_splits,
        batch_invariant,
        return_lse,
        out,
        out_dtype,
        backend,
    )


def _cached(
    q: Any,
    cache: Cache,
    cu_seqlens_q: Any,
    mask: Mask | None,
    scores: Sequence[ScoreModifier],
    sink: Any,
    scale: float | None,
    num_splits: int | None,
    batch_invariant: bool,
    return_lse: bool,
    out: Any,
    out_dtype: Any,
    backend: str,
    allow_numpy_cache: bool = False,
) -> Any:
    if cache.holds_numpy and not allow_numpy_cache:
        raise TypeError("q and the cache must be both torch tensors or both NumPy arrays; got a tensor and arrays")
    check_flag("return_lse", return_lse)
    operands = cache.operands(q)
    operands.cu_seqlens_q, operands.out = cu_seqlens_q, out
    structure, ordered, kind, p = modifiers(mask, scores, sink, None, operands)
    if _any_autocast():
        autocast(operands, cached=True)
    options = Options(
        "cached", structure, ordered, scale, kind, p, out_dtype, False, batch_invariant, num_splits, backend
    )
    return run(options, operands, operands.present(), return_lse)
