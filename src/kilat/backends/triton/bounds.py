"""Bounds of interval masks that are not affine: int32 tables, computed on the tensors' device without a look at them.

The same as `kilat.masks.core.bounds`, for all sequences at once, from lengths that stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kilat.masks import Documents, Window
from kilat.masks.core import FAR, IntervalMask, Mask, leaves
from kilat.masks.ops import rebind

if TYPE_CHECKING:
    from kilat.problem import Operands, Problem


@dataclass(frozen=True)
class Places:
    """Every row of q: its sequence b, its index i there, and that sequence's lengths; int64, of shapes that broadcast.

    dense: [batch or 1, seqlen_q]. ragged: [1, total_q].
    """

    b: Tensor
    i: Tensor
    q_len: Tensor
    kv_len: Tensor
    len_kv: Tensor  # [batch]: kv_len by sequence
    capacity: int  # keys a sequence can have


def why_not(mask: Mask | None) -> list[str]:
    """Reasons why the bounds of a mask cannot be computed here."""
    found: list[str] = []
    for leaf in leaves(mask):
        own = isinstance(leaf, IntervalMask) and type(leaf).parameters is not IntervalMask.parameters
        if own and not type(leaf).__module__.startswith("kilat.masks."):
            found.append(f"mask {leaf.name}: a class with its own parameters() works on the CPU only")
    return found


def places(problem: Problem, operands: Operands, shared: bool) -> Places:
    """Where the rows of q lie; of one batch entry if they are `shared` by all."""
    device, batch, capacity = operands.q.device, 1 if shared else problem.batch, problem.seqlen_kv
    len_q = _lengths(operands.cu_seqlens_q, operands.seqlens_q, batch, problem.seqlen_q, device)
    len_kv = _lengths(operands.cu_seqlens_kv, operands.seqlens_kv, batch, capacity, device)
    if operands.cu_seqlens_q is not None:
        token = torch.arange(operands.q.shape[0], device=device)
        b = torch.searchsorted(operands.cu_seqlens_q[1:].long(), token, right=True).clamp_(max=max(batch - 1, 0))
        i = token - operands.cu_seqlens_q[b] if batch else token
        pick = b if batch else b[:0]
        return Places(b[None], i[None], len_q[pick][None], len_kv[pick][None], len_kv, capacity)
    b = torch.arange(batch, device=device)[:, None]
    i = torch.arange(operands.q.shape[1], device=device)[None]
    return Places(b, i, len_q[:, None], len_kv[:, None], len_kv, capacity)


def _lengths(offsets: Tensor | None, used: Tensor | None, batch: int, full: int, device: torch.device) -> Tensor:
    """The length of every sequence, int64 [batch]."""
    if used is not None:
        return used.long().clamp(0, full)
    if offsets is not None:
        return (offsets[1:] - offsets[:-1]).long().clamp(0, full)
    return torch.full((batch,), full, dtype=torch.int64, device=device)


def table(mask: Mask, at: Places, longest: int) -> Tensor:
    """int32 [batch or 1, intervals, 2, rows]: first key and end of keys of every row of q, in [0, kv_len].

    mask: interval masks only, with their tensors. Rows past a used length hold no particular bounds.
    """
    if not at.len_kv.numel():  # no sequence: tokens past the last offset see nothing
        intervals = max(len(leaf.intervals()) for leaf in leaves(mask) if isinstance(leaf, IntervalMask))
        return torch.zeros((1, intervals, 2, at.i.shape[-1]), dtype=torch.int32, device=at.i.device)
    q_pos = at.i + (at.kv_len - at.q_len)
    pairs: list[tuple[Tensor, Tensor]] = []
    for leaf in leaves(mask):
        if not isinstance(leaf, IntervalMask):
            raise TypeError(f"mask must be made of intervals; got {leaf.name}")
        p = _parameters(leaf, at, longest)
        names = {"maximum": _maximum, "minimum": _minimum, "fdiv": _fdiv, "lookup": _lookup(at.b)}
        new = [tuple(rebind(_plain(end), names)(q_pos, at.i, p) for end in ends) for ends in leaf.intervals()]
        pairs = [(_maximum(s, start), _minimum(e, stop)) for s, e in pairs for start, stop in new] or new
    # clamped twice: int64 so far, since bounds may lie far outside
    ends = [(torch.minimum(_maximum(s, 0), at.kv_len), torch.minimum(_maximum(e, 0), at.kv_len)) for s, e in pairs]
    shape = torch.broadcast_shapes(q_pos.shape, *(x.shape for end in ends for x in end))
    stacked = [torch.stack((s.expand(shape), torch.maximum(s, e).expand(shape)), 1) for s, e in ends]
    return torch.stack(stacked, 1).to(torch.int32).contiguous()


def _plain(end: Any) -> Any:
    return getattr(end, "__func__", end)


def _maximum(a: Any, b: Any) -> Any:
    return _pick(a, b, torch.maximum, "min", max)


def _minimum(a: Any, b: Any) -> Any:
    return _pick(a, b, torch.minimum, "max", min)


def _pick(a: Any, b: Any, both: Any, keyword: str, plain: Any) -> Any:
    """max or min of tensors and ints; an int never becomes a tensor, which would have to be copied to the device."""
    if isinstance(a, Tensor):
        return both(a, b) if isinstance(b, Tensor) else a.clamp(**{keyword: b})
    return b.clamp(**{keyword: a}) if isinstance(b, Tensor) else plain(a, b)


def _fdiv(a: Any, b: Any) -> Any:
    return a // b


def _lookup(b: Tensor) -> Any:
    """table[index] with the index clamped; tables are [batch or 1, n]."""

    def lookup(values: Tensor, index: Any) -> Tensor:
        row = b.clamp(max=values.shape[0] - 1)
        return values[row, index.clamp(0, values.shape[1] - 1)]

    return lookup


def _parameters(mask: IntervalMask, at: Places, longest: int) -> Any:
    """The p that kv_start and kv_stop read: ints, a tensor a row of q for numbers, [batch, n] for tables."""
    if isinstance(mask, Window):
        return mask.clamped(longest)
    if isinstance(mask, Documents):
        start, stop = document_tables(mask.ids, at.len_kv, at.capacity)
        return SimpleNamespace(start=start, stop=stop)
    p = SimpleNamespace()
    for f in fields(mask):
        value = getattr(mask, f.name)
        if f.name in mask.tensor_fields:
            value = value.long()
            value = value[at.b.clamp(max=value.shape[0] - 1)] if value.ndim == 1 else value
        elif isinstance(value, int):
            value = max(-FAR, min(value, FAR))
        setattr(p, f.name, value)
    return p


def document_tables(ids: Tensor, kv_len: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """First key and end of the document of each position, int64 [batch, capacity + 1]; entry n is position n - 1.

    As `kilat.masks.documents.document_tables`, for lengths kv_len [batch] on the device.
    """
    ids = (ids if ids.ndim == 2 else ids[None])[:, :capacity].expand(len(kv_len), -1)
    n = ids.shape[1]
    position = torch.arange(n, device=ids.device)[None]
    changes = torch.ones_like(ids, dtype=torch.bool)
    changes[:, 1:] = ids[:, 1:] != ids[:, :-1]
    start = torch.where(changes, position, 0).cummax(1).values if n else position.expand(len(kv_len), 0)
    last = torch.ones_like(changes)
    last[:, :-1] = changes[:, 1:]
    last |= position + 1 >= kv_len[:, None]
    ends = torch.where(last, position + 1, capacity)
    stop = ends.flip(1).cummin(1).values.flip(1) if n else start
    stop = torch.where(ids >= 0, stop, start)
    none = torch.zeros((len(kv_len), 1), dtype=torch.int64, device=ids.device)
    return torch.cat((none, start), 1), torch.cat((none, stop), 1)
