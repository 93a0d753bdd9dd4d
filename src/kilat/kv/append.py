"""Appending to a cache with index operations: the CPU's way, and every cache's until a backend brings its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kilat.kv.quantise import write
from kilat.numpy_door import as_tensor, int32_tensor
from kilat.problem import DTYPES, QUANTISED
from kilat.validate_basic import check_device, check_int32, check_rank, check_tensor, fail
from kilat.validate_tensors import dtype_name
from kilat.validate_values import check_pages

if TYPE_CHECKING:
    from kilat.kv.cache import Cache
    from kilat.kv.rotary import Rotary


class Append(NamedTuple):
    """New tokens, checked and turned, and where they go; `write` is all that is left."""

    cache: Cache
    where: tuple[Tensor, ...]
    k: Tensor
    v: Tensor | None
    some: Tensor | None  # False if no token is to be written; None where that is not asked
    batch_index: Tensor | None
    counts: Tensor

    def write(self) -> None:
        """Write the tokens and count them."""
        cache = self.cache
        with torch.no_grad():
            write(cache.k, cache.k_scale, self.where, self.k, self.some)
            if self.v is not None:
                write(cache.v, cache.v_scale, self.where, self.v, self.some)
            _count(cache, self.batch_index, self.counts)


def prepared(
    cache: Cache, k_new: Any, v_new: Any, cu_seqlens_new: Any, batch_index: Any, rotary: Rotary | None
) -> Append:
    """The work of `Cache.append` short of writing: check, place each token, turn the keys."""
    k_new, v_new = _new("k_new", k_new, cache), None if v_new is None else _new("v_new", v_new, cache)
    if isinstance(cu_seqlens_new, np.ndarray):
        cu_seqlens_new = int32_tensor("cu_seqlens_new", cu_seqlens_new)
    _check_tensors(cache, k_new, v_new, cu_seqlens_new is not None)
    if rotary is not None:
        check_rotary(rotary, cache)
    index = _batch_index(batch_index, cache)
    entries = cache.batch if index is None else index.shape[0]
    if cu_seqlens_new is not None:
        check_int32("cu_seqlens_new", cu_seqlens_new, (entries + 1,), "n + 1", cache.k.device)
    elif k_new.shape[0] != entries:
        fail(ValueError, "k_new must have an entry for each sequence appended to", k_new=k_new.shape, sequences=entries)
    checked = not _unread(cache)
    if checked:
        _check_values(cache, k_new, cu_seqlens_new, index)
    entry, t, counts = _tokens(k_new, cu_seqlens_new, entries, cache.k.device, checked)
    sequence = entry if index is None else index[entry]
    position = cache.lengths.long()[sequence] + t
    k_flat = k_new.flatten(0, 1) if cu_seqlens_new is None else k_new[: entry.shape[0]]
    v_flat = v_new if v_new is None else v_new.flatten(0, 1) if cu_seqlens_new is None else v_new[: entry.shape[0]]
    if rotary is not None:
        k_flat = rotary.turn(k_flat, position)
    last = cache.lengths.long() if index is None else cache.lengths.long()[index]
    chosen, some = cache.lasting(position, (last + counts)[entry], k_new.shape[-3]), None
    if not checked:
        chosen, some = _stand_ins(cache, chosen, t < counts[entry], position)
    if chosen is not None:
        sequence, position, k_flat = sequence[chosen], position[chosen], k_flat[chosen]
        v_flat = None if v_flat is None else v_flat[chosen]
    return Append(cache, _places(cache, sequence, position), k_flat, v_flat, some, index, counts)


def _unread(cache: Cache) -> bool:
    """Whether what lengths and offsets hold is not read here: to read it would stall a GPU, and a tracer cannot."""
    return _elsewhere(cache) or torch.compiler.is_compiling()


def _elsewhere(cache: Cache) -> bool:
    return cache.k.device.type != "cpu"


def _stand_ins(cache: Cache, lasting: Tensor | None, owned: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens to write, int64 [tokens], and whether there is any; sizes do not depend on values.

    One that has no owner, no room, or does not last is replaced by the first that is to be written: the same number
    goes to the same place twice. If there is none, what lies there is written again (`quantise.write`).
    """
    if lasting is not None:
        owned = owned & lasting
    if _elsewhere(cache):
        room = position < cache.capacity
        cache.overflow.logical_or_((owned & ~room).any())
        owned = owned & room & (position >= 0)
    count = position.shape[0]
    first = torch.cat((owned, owned.new_ones(1))).int().argmax().clamp(max=max(count - 1, 0))
    return torch.where(owned, torch.arange(count, device=position.device), first), owned.any()


def _places(cache: Cache, sequence: Tensor, position: Tensor) -> tuple[Tensor, ...]:
    """Where tokens go; on a GPU nothing that a length or a page table holds leads outside the cache."""
    if not _elsewhere(cache):
        return cache.locate(sequence, position)
    where = cache.locate(sequence, position.clamp(0, max(cache.capacity - 1, 0)))
    return tuple(i.clamp(0, max(n - 1, 0)) for i, n in zip(where, cache.k.shape, strict=False))


def _new(name: str, value: Any, cache: Cache) -> Tensor:
    if isinstance(value, np.ndarray) is not cache.holds_numpy:
        fail(
            TypeError,
            f"{name} and the cache must be both torch tensors or both NumPy arrays",
            type=type(value).__name__,
        )
    tensor = as_tensor(name, value) if isinstance(value, np.ndarray) else check_tensor(name, value)
    if tensor.requires_grad and torch.is_grad_enabled():
        fail(ValueError, f"caches are forward only: {name} must not require grad", requires_grad=True)
    if not cache.writable:
        raise ValueError("an append needs writable arrays; got a cache over read-only ones")
    return tensor


def _check_tensors(cache: Cache, k_new: Tensor, v_new: Tensor | None, ragged: bool) -> None:
    if (v_new is None) is not cache.shares_values:
        wanted = "None, the values being a part of the keys" if cache.shares_values else "given"
        fail(ValueError, f"v_new must be {wanted}", v_new=None if v_new is None else v_new.shape)
    axes = ("total",) if ragged else ("n", "seqlen")
    pairs = [("k_new", k_new, cache.k)] + ([] if v_new is None else [("v_new", v_new, cache.v)])
    for name, new, old in pairs:
        check_rank(name, new, (*axes, "num_heads_kv", "head_dim"))
        check_device(name, new, old.device)
        quantised = dtype_name(old) in QUANTISED
        if new.dtype != old.dtype and not quantised:
            fail(TypeError, f"{name} must have the cache's dtype {old.dtype}", dtype=new.dtype)
        if quantised and dtype_name(new) not in DTYPES:
            fail(TypeError, f"{name} must be {', '.join(DTYPES)}: the append quantises it", dtype=new.dtype)
        if new.shape[-2:] != old.shape[-2:]:
            fail(ValueError, f"{name} must end in {list(old.shape[-2:])}", shape=new.shape)
        _check_places(f"{name[0]} of the cache", old)
        if new.shape[: len(axes)] != k_new.shape[: len(axes)]:
            fail(ValueError, "k_new and v_new must have the same tokens", k_new=k_new.shape, v_new=new.shape)
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if scale is not None and scale.dim() > 1:
            _check_places(name, scale)


def _check_places(name: str, x: Tensor) -> None:
    if any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
        fail(ValueError, f"{name} must not be expanded: each number needs a place", strides=list(x.stride()))


def check_rotary(rotary: Any, cache: Cache) -> None:
    """TypeError or ValueError unless `rotary` can turn the keys of the cache."""
    if not (hasattr(rotary, "turn") and hasattr(rotary, "rotary_dim")):
        fail(TypeError, "rotary must be a Rotary or None", type=type(rotary).__name__)
    check_device("rotary", rotary.cos, cache.k.device)
    if rotary.rotary_dim > cache.k.shape[-1]:
        got = {"rotary_dim": rotary.rotary_dim, "head_dim": cache.k.shape[-1]}
        fail(ValueError, "rotary_dim must not exceed head_dim", **got)


def _batch_index(batch_index: Any, cache: Cache) -> Tensor | None:
    if batch_index is None:
        return None
    if isinstance(batch_index, list | tuple) and not batch_index:
        return torch.zeros(0, dtype=torch.int64, device=cache.k.device)
    if not isinstance(batch_index, Tensor | np.ndarray | list | tuple):
        fail(TypeError, "batch_index must be integers [n]", type=type(batch_index).__name__)
    index = torch.as_tensor(batch_index, device=cache.k.device)
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        fail(TypeError, "batch_index must be integers [n]", shape=index.shape, dtype=index.dtype)
    return index.long()


def _check_values(cache: Cache, k_new: Tensor, cu_seqlens_new: Tensor | None, index: Tensor | None) -> None:
    """ValueError unless offsets are offsets, sequences exist and differ, and every token has room (and a page)."""
    rows = np.arange(cache.batch) if index is None else index.numpy()
    if index is not None:
        if rows.size and (rows.min() < 0 or rows.max() >= cache.batch):
            fail(
                ValueError, "batch_index must name sequences of the cache", batch=cache.batch, batch_index=rows.tolist()
            )
        if np.unique(rows).size != rows.size:
            fail(ValueError, "batch_index must not name a sequence twice", batch_index=rows.tolist())
    if cu_seqlens_new is None:
        counts = np.full(rows.size, k_new.shape[1], np.int64)
    else:
        offsets = cu_seqlens_new.numpy().astype(np.int64)
        counts = np.diff(offsets)
        if offsets[0] != 0 or (counts < 0).any() or offsets[-1] > k_new.shape[0]:
            wanted = f"cu_seqlens_new must start at 0, never decrease and end at {k_new.shape[0]} or before"
            fail(ValueError, wanted, cu_seqlens_new=offsets.tolist())
    lengths = cache.lengths.numpy()[rows].astype(np.int64)
    after = lengths + counts
    if after.size and (after.max() > cache.capacity or lengths.min() < 0):
        b = int(after.argmax() if after.max() > cache.capacity else lengths.argmin())
        got = {f"lengths[{rows[b]}]": int(lengths[b]), "new": int(counts[b]), "capacity": cache.capacity}
        fail(ValueError, "an append must stay within the capacity", **got)
    table = getattr(cache, "page_table", None)
    if table is not None:
        check_pages(table[torch.from_numpy(rows)], torch.from_numpy(after), cache.k.shape[1], cache.k.shape[0])


def _tokens(
    k_new: Tensor, cu_seqlens_new: Tensor | None, entries: int, device: torch.device, checked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(entry, place in its entry) of each token, int64 [tokens], and the tokens of each entry, int32 [entries]."""
    if cu_seqlens_new is None:
        seqlen = k_new.shape[1]
        entry = torch.arange(entries, device=device).repeat_interleave(seqlen)
        t = torch.arange(seqlen, device=device).repeat(entries)
        return entry, t, torch.full((entries,), seqlen, dtype=torch.int32, device=device)
    counts = cu_seqlens_new.diff()
    # Tokens past the last offset belong to no sequence; where offsets are not read, they end at the last token.
    total = int(cu_seqlens_new[-1]) if checked else k_new.shape[0] if entries else 0
    token = torch.arange(total, device=device)
    entry = torch.searchsorted(cu_seqlens_new[1:].long(), token, right=True)
    if not checked:
        entry = entry.clamp(max=max(entries - 1, 0))
    return entry, token - cu_seqlens_new.long()[entry], counts


def _count(cache: Cache, index: Tensor | None, counts: Tensor) -> None:
    if index is None:
        cache.lengths.add_(counts)
    else:
        cache.lengths.index_add_(0, index, counts.to(cache.lengths.dtype))
    if _elsewhere(cache):
        cache.lengths.clamp_(max=cache.capacity)
