"""The public call over caches: attention of new queries, with their own keys and values appended first if given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kilat.autograd import run
from kilat.gather import autocast, modifiers
from kilat.kv import Cache
from kilat.kv.append import check_rotary, prepared
from kilat.masks import Causal, Mask
from kilat.numpy_door import as_int32, as_numpy, as_tensors, is_numpy, torch_dtype
from kilat.planning import lookup, names_of
from kilat.problem import Options
from kilat.validate import check_out, problem_of
from kilat.validate_basic import check_flag, fail

if TYPE_CHECKING:
    from kilat.kv import Rotary
    from kilat.planning import Plan
    from kilat.problem import Operands
    from kilat.scores import ScoreModifier

_any_autocast = torch._C._is_any_autocast_enabled


def cached_attention(
    q: Any,
    cache: Cache,
    *,
    k_new: Any = None,
    v_new: Any = None,
    rotary: Rotary | None = None,
    cu_seqlens_q: Any = None,
    mask: Mask | None = Causal(),
    scores: Sequence[ScoreModifier] = (),
    sink: Any = None,
    scale: float | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    plan: CachePlan | None = None,
    return_lse: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    backend: str = "auto",
) -> Any:
    """Exact attention of new queries to everything in a cache; forward only.

    - q [batch, seqlen_q, num_heads_q, head_dim], or [total_q, num_heads_q, head_dim] with cu_seqlens_q
      int32 [batch + 1]; q_pos = i + lengths[b] - seqlen_q, lengths being those after the append.
    - k_new, v_new: keys and values of the queries' own tokens, like q with num_heads_kv heads, which `cache.append`
      writes first; None where that was done before. v_new is None where the values are a part of the keys.
    - rotary: turns q, and k_new if given, to their positions.
    - num_splits: parts that each sequence's keys are cut into, None to let the backend choose.
    - plan: from `kilat.plan`, which then has mask, scores, scale, num_splits, batch_invariant, out_dtype and backend.
    - out: a buffer for the result.

    Returns out like q with head_dim_v channels, and with return_lse also lse [batch, num_heads_q, seqlen_q] (ragged:
    [num_heads_q, total_q]). Raises ValueError if an input requires grad while autograd records; wrong arguments raise
    before anything is written.
    """
    arrays = _is_numpy(q, cache)
    if arrays:
        q, sink, out = as_tensors({"q": q, "sink": sink, "out": out})
        (cu_seqlens_q,) = as_int32({"cu_seqlens_q": cu_seqlens_q})
    check_flag("return_lse", return_lse)
    operands = cache.operands(q)
    operands.cu_seqlens_q, operands.out = cu_seqlens_q, out
    if plan is None:
        rest = (scale, num_splits, batch_invariant, out_dtype, backend)
        options = _options(cache, operands, mask, scores, sink, rest)
    else:
        given = {"mask": mask, "scores": scores, "scale": scale, "num_splits": num_splits}
        given |= {"batch_invariant": batch_invariant, "out_dtype": out_dtype, "backend": backend}
        _check_plan(plan, given)
        options = plan.fill(cache, operands, sink)
    names = names_of(operands)
    known = None if plan is None else plan.match(operands, names)
    if k_new is not None or v_new is not None or rotary is not None:
        known = _extend(cache, (options, operands, known), k_new, v_new, rotary)
    result = run(options, operands, names, return_lse, plan=known)
    return as_numpy(result) if arrays else result


class CachePlan:
    """What `cached_attention` calls with such tensors have in common, checked and chosen; `kilat.plan` makes it."""

    def __init__(self, options: Options, operands: Operands) -> None:
        self.options = options
        self._names = names_of(operands)
        self._plan = lookup(options, operands, self._names, torch.is_grad_enabled())
        self._kinds = _kinds(operands, self._names)
        self._tensors = operands.mask_tensors, operands.score_tensors, operands.sink

    def __repr__(self) -> str:
        return f"CachePlan({self._plan.problem.short_id()}, backend={self._plan.backend.name!r})"

    def fill(self, cache: Cache, operands: Operands, sink: Any) -> Options:
        """Put the tensors of masks and scores, and the sink if the call has none, into `operands`."""
        if cache.ring_first != self.options.ring_first:
            wanted = "cache must be a ring with the first tokens of that which the plan was made for, or none"
            fail(ValueError, wanted, first=cache.ring_first, plan=self.options.ring_first)
        operands.mask_tensors, operands.score_tensors, operands.sink = self._tensors
        if sink is not None:
            operands.sink = sink
        if _any_autocast():
            autocast(operands, cached=True)
        return self.options

    def match(self, operands: Operands, names: tuple[str, ...]) -> Plan | None:
        """The plan, if these operands are such as it was made for; else ValueError. None where a tracer looks on."""
        if torch.compiler.is_compiling():
            return None
        if names != self._names:
            fail(
                ValueError,
                f"a call by this plan must have the tensors {', '.join(self._names)}",
                tensors=", ".join(names),
            )
        kinds = _kinds(operands, names)
        if kinds != self._kinds:
            name, got, wanted = next(x for x in zip(names, kinds, self._kinds, strict=True) if x[1] != x[2])
            fail(ValueError, f"{name} must be such as the plan was made for, {_said(wanted)}", **{name: _said(got)})
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands.flatten(names)):
            problem_of(self.options, operands)  # raises
        check_out(self.options.out_dtype, operands)
        return self._plan


def _kinds(operands: Operands, names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return [(x.dtype, x.shape, x.stride(), x.device) for x in operands.flatten(names)]


def _said(kind: tuple[Any, ...]) -> str:
    dtype, shape, stride, device = kind
    return f"{dtype} {list(shape)} with strides {list(stride)} on {device}"


def plan(
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
    out_dtype: Any = None,
    backend: str = "auto",
) -> CachePlan:
    """The checks and choices of `cached_attention`, made once for all layers, and all steps, of a loop.

    q, cache, cu_seqlens_q and sink stand for those of the calls with shapes, strides and types alone; all else is as in
    `cached_attention`, and every call by the plan has it. What tensors hold (lengths, offsets, page tables) belongs to
    the calls, and is checked there. Raises what the call would raise.
    """
    if _is_numpy(q, cache):
        q, sink = as_tensors({"q": q, "sink": sink})
        (cu_seqlens_q,) = as_int32({"cu_seqlens_q": cu_seqlens_q})
    operands = cache.operands(q)
    operands.cu_seqlens_q = cu_seqlens_q
    rest = (scale, num_splits, batch_invariant, out_dtype, backend)
    return CachePlan(_options(cache, operands, mask, scores, sink, rest), operands)


def _options(
    cache: Cache, operands: Operands, mask: Any, scores: Any, sink: Any, rest: tuple[Any, Any, Any, Any, Any]
) -> Options:
    """Options of a call; tensors go into `operands`. rest: scale, num_splits, batch_invariant, out_dtype, backend."""
    scale, num_splits, batch_invariant, out_dtype, backend = rest
    check_flag("batch_invariant", batch_invariant)
    out_dtype = torch_dtype(out_dtype) if cache.holds_numpy else out_dtype
    structure, ordered, kind, p = modifiers(mask, scores, sink, None, operands)
    if _any_autocast():
        autocast(operands, cached=True)
    modified = ("cached", structure, ordered, scale, kind, p, out_dtype)
    return Options(*modified, False, batch_invariant, num_splits, backend, cache.ring_first)


def _check_plan(plan: Any, given: dict[str, Any]) -> None:
    """TypeError unless the plan is one and nothing that it holds is given beside it."""
    if not isinstance(plan, CachePlan):
        fail(TypeError, "plan must be what kilat.plan returns, or None", type=type(plan).__name__)
    defaults = cached_attention.__kwdefaults__ or {}
    beside = {
        name: x for name, x in given.items() if x is not defaults[name] and (name == "mask" or x != defaults[name])
    }
    if beside:
        fail(TypeError, f"{', '.join(given)} are the plan's and must not be given beside it", **beside)


def _is_numpy(q: Any, cache: Any) -> bool:
    """Whether q and the cache are arrays; TypeError if only one of them is, or the cache is none."""
    if not isinstance(cache, Cache):
        fail(TypeError, "cache must be a ContiguousCache, a PagedCache or another Cache", type=type(cache).__name__)
    arrays = type(q) is not Tensor and is_numpy(q)
    if arrays is not cache.holds_numpy:
        got = "an array and a cache of tensors" if arrays else "a tensor and a cache of arrays"
        raise TypeError(f"q and the cache must be both torch tensors or both NumPy arrays; got {got}")
    return arrays


def _extend(
    cache: Cache, call: tuple[Options, Operands, Plan | None], k_new: Any, v_new: Any, rotary: Any
) -> Plan | None:
    """Append the queries' own keys and values, turn q and k_new; every check of the call comes before the first write.

    Without k_new the cache stays as it is, and q alone is turned. Returns the plan of the call, None for a tracer.
    """
    options, operands, found = call
    if found is None and not torch.compiler.is_compiling():
        found = lookup(options, operands, names_of(operands), torch.is_grad_enabled())
    offsets, new = operands.cu_seqlens_q, None
    if rotary is not None:
        check_rotary(rotary, cache)
    if k_new is not None:
        _check_tokens(operands, k_new)
        new = prepared(cache, k_new, v_new, offsets, None, rotary)
        operands.seqlens_kv = cache.lengths + new.counts
    elif v_new is not None:
        fail(ValueError, "v_new must be None where k_new is", v_new=getattr(v_new, "shape", type(v_new).__name__))
    if found is not None:
        found.check(operands)
    if rotary is not None:
        operands.q = rotary.turn(operands.q, _positions(operands))
    if new is not None:
        new.write()
        operands.seqlens_kv = cache.lengths
    return found


def _check_tokens(operands: Operands, k_new: Any) -> None:
    """ValueError unless k_new has the queries' tokens."""
    q = operands.q
    shape = getattr(k_new, "shape", None)
    if shape is not None and tuple(shape[:-2]) != tuple(q.shape[:-2]):
        fail(ValueError, "k_new must have q's tokens", k_new=torch.Size(shape), q=q.shape)


def _positions(operands: Operands) -> Tensor:
    """q_pos of every query, int64 like q without heads and channels; 0 for tokens that no sequence owns."""
    q, offsets, lengths = operands.q, operands.cu_seqlens_q, operands.seqlens_kv
    if lengths is None:
        raise ValueError("a cache must give its lengths; got seqlens_kv=None")
    i = torch.arange(q.shape[-3], device=q.device)
    if offsets is None:
        return (lengths.long() - q.shape[1])[:, None] + i
    if not lengths.shape[0]:
        return torch.zeros_like(i)
    stop = offsets[1:].long()
    b = torch.searchsorted(stop, i, right=True).clamp(max=lengths.shape[0] - 1)
    return torch.where(i < stop[-1], i + lengths.long()[b] - stop[b], 0)
