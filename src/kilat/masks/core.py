"""Masks: the classes, and what is derived from two integer functions of a query position.

A mask says which keys j a query may see. Most masks are intervals: query i, at position q_pos = i + kv_len - q_len,
sees kv_start <= j < kv_stop, and both ends never decrease with q_pos. Everything else follows from that, once and
for every mask, here and in `ranges.py`.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kilat.structure import Slot, Structured, as_numpy, shape_of
from kilat.symbolic import Expr, Load, SymbolicTensor, Traced, Var
from kilat.symbolic.trace import tensor_kind

if TYPE_CHECKING:
    from kilat.masks.picture import MaskPicture

Bound = Callable[[Any, Any, Any], Any]
"""(q_pos, i, p) -> key index, where p has the mask's parameters as attributes."""

Int32 = NDArray[np.int32]


FAR = 2**30  # no sequence is longer, and q_pos plus or minus it fits 32 bits


class Mask(Structured):
    """Which keys a query may see; combine masks with `&`."""

    def __and__(self, other: object) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return And(self, other)

    def __or__(self, other: object) -> Mask:
        raise TypeError(f"masks combine with `&` only; write `{self.name} | ...` as a Predicate or a Dense mask")

    def __invert__(self) -> Mask:
        raise TypeError(f"a mask has no complement; write `~{self.name}` as a Predicate or a Dense mask")

    def depends_on_batch(self) -> bool:
        """Whether batch entries of equal lengths may see different keys."""
        return bool(self.tensors())

    def depends_on_head(self) -> bool:
        """Whether query heads may see different keys."""
        return False

    def plot(self, seqlen_q: int = 16, seqlen_kv: int | None = None, batch: int = 0, head: int = 0) -> MaskPicture:
        """A picture of one batch entry and head: print it, or `.save("mask.svg")`. seqlen_kv=None means seqlen_q."""
        from kilat.masks.picture import draw

        return draw(self, seqlen_q, seqlen_q if seqlen_kv is None else seqlen_kv, batch, head)


class IntervalMask(Mask):
    """A mask of one interval a query (or two, if `intervals` is overridden).

    A subclass is a frozen dataclass with two static functions of ints, `kv_start` and `kv_stop`, that use only + - *
    and what `kilat.masks.ops` has, and never decrease with q_pos, which may be negative. p has the fields of the mask:
    ints clamped to 2**30 in size; a tensor [batch] named in `tensor_fields` is there as the number of the batch entry,
    a tensor [batch, n] as a table for `lookup`.
    """

    @staticmethod
    def kv_start(q_pos: Any, i: Any, p: Any) -> Any:
        """The first key that query i may see; may lie outside the sequence."""
        return q_pos * 0

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        """One past the last key that query i may see; may lie outside the sequence."""
        raise NotImplementedError("an IntervalMask must define kv_stop")

    def intervals(self) -> Sequence[tuple[Bound, Bound]]:
        """(kv_start, kv_stop) of each interval; a query sees the union."""
        return ((self.kv_start, self.kv_stop),)

    def parameters(self, b: int, q_len: int, kv_len: int) -> Any:
        """The p of batch entry b: fields as numbers, tables as arrays."""
        p = SimpleNamespace()
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in self.tensor_fields:
                value = batch_entry(as_numpy(value), b)
                value = value.item() if value.ndim == 0 else value
            if isinstance(value, int):
                value = max(-FAR, min(value, FAR))
            setattr(p, f.name, value)
        return p

    def symbols(self) -> Any:
        """The p of every batch entry at once: numbers, and symbols for what tensors hold."""
        p = SimpleNamespace()
        number = 0
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in self.tensor_fields:
                value = _symbol(value, number)
                number += 1
            if isinstance(value, int):
                value = max(-FAR, min(value, FAR))
            setattr(p, f.name, value)
        return p

    def predicate(self) -> Expr:
        """The mask as an expression of b, q_pos, j and its tensors; raises ValueError if a bound depends on i."""
        return _interval_predicate(self)


@dataclass(frozen=True)
class And(Mask):
    """Keys that both masks show; made by `&`."""

    left: Mask
    right: Mask

    def tensors(self) -> tuple[Any, ...]:
        return self.left.tensors() + self.right.tensors()

    def with_tensors(self, tensors: Sequence[Any]) -> And:
        split = len(self.left.tensors())
        return And(self.left.with_tensors(tensors[:split]), self.right.with_tensors(tensors[split:]))

    def structure(self) -> And:
        return And(self.left.structure(), self.right.structure())

    def depends_on_batch(self) -> bool:
        return self.left.depends_on_batch() or self.right.depends_on_batch()

    def depends_on_head(self) -> bool:
        return self.left.depends_on_head() or self.right.depends_on_head()

    def check(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool = True) -> None:
        self.left.check(batch, num_heads_q, seqlen_q, seqlen_kv, exact=exact)
        self.right.check(batch, num_heads_q, seqlen_q, seqlen_kv, exact=exact)

    @property
    def name(self) -> str:
        return f"{self.left.name}&{self.right.name}"


class PredicatePart(NamedTuple):
    """A condition on (b, h, q_pos, j); the Load number n of `expr` reads `mask.tensors()[tensors[n]]`."""

    expr: Expr
    tensors: tuple[int, ...]


class Parts(NamedTuple):
    """A mask taken apart: all parts must show a key."""

    interval: Mask | None
    """The intersection of interval masks, at most two intervals in all; `bounds` takes it. It holds its tensors."""
    dense: tuple[int, ...]
    """Places in `mask.tensors()` of bool tensors [batch or 1, heads or 1, seqlen_q or 1, seqlen_kv or 1]."""
    predicates: tuple[PredicatePart, ...]


def decompose(mask: Mask | None) -> Parts:
    """The parts of a mask (or of its structure): intervals, dense tensors, conditions.

    Two-interval masks beyond the first become conditions, so that no more than two intervals are ever left.
    """
    from kilat.masks.dense import Dense
    from kilat.masks.predicate import Predicate

    intervals: list[IntervalMask] = []
    dense: list[int] = []
    predicates: list[PredicatePart] = []
    first_tensor, have_two = 0, False
    for leaf in leaves(mask):
        count = len(leaf.tensors())
        places = tuple(range(first_tensor, first_tensor + count))
        first_tensor += count
        if isinstance(leaf, Dense):
            dense.extend(places)
        elif isinstance(leaf, Predicate):
            predicates.append(PredicatePart(leaf.expr, places))
        elif isinstance(leaf, IntervalMask):
            two = len(leaf.intervals()) > 1
            if two and have_two:
                predicates.append(PredicatePart(leaf.predicate(), places))
            else:
                intervals.append(leaf)
            have_two = have_two or two
        else:
            raise TypeError(f"mask must be an IntervalMask, Dense, Predicate or `&` of them; got {leaf!r}")
    joined: Mask | None = None
    for leaf in intervals:
        joined = leaf if joined is None else And(joined, leaf)
    return Parts(joined, tuple(dense), tuple(predicates))


def leaves(mask: Mask | None) -> list[Mask]:
    """The masks that `&` combined, from left to right; their tensors in this order are `mask.tensors()`."""
    if isinstance(mask, And):
        return leaves(mask.left) + leaves(mask.right)
    return [] if mask is None else [mask]


def depends_on_batch(mask: Mask | None) -> bool:
    """Whether batch entries of equal lengths may see different keys."""
    return mask is not None and mask.depends_on_batch()


def batch_entry(tensor: Any, b: int) -> Any:
    """tensor[b] of a tensor [batch, ...], or tensor[0] of a tensor [1, ...]."""
    return tensor[0 if tensor.shape[0] == 1 else b]


_CACHE_BYTES = 1 << 25
_ENTRY_BYTES = 256  # about what a key and an array cost beside the numbers


class _Known:
    """Bounds by mask and lengths, the oldest dropped where they take more than `_CACHE_BYTES`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bounds: dict[tuple[Any, ...], Int32] = {}
        self.bytes = 0

    def put(self, key: tuple[Any, ...], value: Int32) -> None:
        """Remember `value`; two threads may bring the same."""
        with self.lock:
            self.bytes -= self._cost(self.bounds.pop(key, None))
            self.bounds[key] = value
            self.bytes += self._cost(value)
            while self.bytes > _CACHE_BYTES and len(self.bounds) > 1:
                self.bytes -= self._cost(self.bounds.pop(next(iter(self.bounds))))

    @staticmethod
    def _cost(value: Int32 | None) -> int:
        return 0 if value is None else value.nbytes + _ENTRY_BYTES


_known = _Known()


def bounds(mask: Mask | None, b: int, q_len: int, kv_len: int) -> Int32:
    """First key and end of keys of each interval and query, int32 [intervals, 2, q_len], read-only.

    Query i sees the union over n of bounds[n, 0, i] <= j < bounds[n, 1, i]. All lie in [0, kv_len], stop >= start,
    and neither decreases with i; an empty row has start == stop. The mask is the interval part of `decompose`, with
    its tensors. Raises ValueError if a bound decreases, TypeError for a mask that is not made of intervals.
    """
    key = (mask, q_len, kv_len)
    cached = _known.bounds.get(key)  # masks with tensors, which may change in place, are never put there
    if cached is not None:
        return cached
    result = _bounds(mask, b, q_len, kv_len)
    if mask is None or not mask.tensors():
        _known.put(key, result)
    return result


def _bounds(mask: Mask | None, b: int, q_len: int, kv_len: int) -> Int32:
    i = np.arange(q_len, dtype=np.int32)
    q_pos = i + np.int32(kv_len - q_len)
    pairs: list[tuple[Any, Any]] = []
    for leaf in leaves(mask):
        if not isinstance(leaf, IntervalMask):
            raise TypeError(f"mask must be made of intervals; got {leaf.name}: use decompose(mask).interval")
        p = leaf.parameters(b, q_len, kv_len)
        new = [(start(q_pos, i, p), stop(q_pos, i, p)) for start, stop in leaf.intervals()]
        if not type(leaf).__module__.startswith(_PROVED):
            for end, name in zip(itertools.chain(*new), ("kv_start", "kv_stop") * 2, strict=False):
                _check_end(end, f"{name} of {leaf.name}", q_pos)
        pairs = [(np.maximum(s, start), np.minimum(e, stop)) for s, e in pairs for start, stop in new] or new
    result = np.empty((len(pairs) or 1, 2, q_len), np.int32)
    for out, (start, stop) in zip(result, pairs or [(0, kv_len)], strict=True):
        out[0] = np.clip(start, 0, kv_len)
        out[1] = np.clip(stop, out[0], kv_len)
    result.flags.writeable = False
    return result


_PROVED = "kilat.masks."
"""Masks of these modules never decrease: the tests prove it."""


def _check_end(values: Any, name: str, q_pos: Int32) -> None:
    """Raises ValueError if a bound of a user's mask decreases, TypeError if it is not made of integers."""
    values = np.asarray(values)
    if values.dtype.kind != "i":
        raise TypeError(f"{name} must be made of integers; got dtype {values.dtype}")
    values = np.broadcast_to(values, q_pos.shape)
    falls = values[1:] < values[:-1]
    if falls.any():
        at = int(falls.argmax())
        raise ValueError(
            f"{name} must not decrease; got {values[at]} at q_pos={q_pos[at]} and {values[at + 1]} at "
            f"q_pos={q_pos[at + 1]}"
        )


def _interval_predicate(mask: IntervalMask) -> Expr:
    """start <= j < stop of any interval, as an expression."""
    p = mask.symbols()
    q_pos, i, j = Traced(Var("q_pos")), _QueryIndex(mask), Traced(Var("j"))
    shown = [(j >= start(q_pos, i, p)) & (j < stop(q_pos, i, p)) for start, stop in mask.intervals()]
    return functools.reduce(operator.or_, shown).expr


def _symbol(value: Any, number: int) -> Any:
    """A tensor field of the batch entry, as a symbol (the index of a tensor [1, ...] is clamped to 0)."""
    ndim = 1 if isinstance(value, Slot) else len(shape_of(value))
    kind = "int" if isinstance(value, Slot) else tensor_kind(value)
    b = (Var("b"),)
    return Traced(Load(number, b, kind)) if ndim == 1 else SymbolicTensor(number, ndim - 1, kind, b)


class _QueryIndex(Traced):
    """The query index i, which conditions do not have."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    @property
    def expr(self) -> Any:  # type: ignore[override]
        raise ValueError(f"`&` of two masks of two intervals each must not use the query index i; got {self.mask.name}")
