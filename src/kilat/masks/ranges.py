"""What loops need to know about a mask: ranges of blocks, transposed ranges, classes of blocks, single entries.

docs/masks.md explains how a kernel uses each of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kilat.masks.core import Int32, Mask, bounds, decompose
from kilat.structure import as_numpy, four_axes
from kilat.symbolic import evaluate

EMPTY, PARTIAL, FULL = 0, 1, 2
"""Classes of a block: no pair visible, some, all."""


class BlockRanges(NamedTuple):
    """Ranges of key blocks for each interval and block of queries, int32 [intervals, q blocks] each.

    Blocks from `visit_start` to `visit_stop` have all visible keys; those from `full_start` to `full_stop` inside them
    are visible as a whole to every query of the block, so a loop over them needs no mask.
    """

    visit_start: Int32
    full_start: Int32
    full_stop: Int32
    visit_stop: Int32


def block_ranges(ends: Int32, kv_len: int, block_q: int, block_kv: int) -> BlockRanges:
    """The ranges of key blocks of `ends` = `bounds(...)`, int32 [intervals, 2, q_len].

    Since both ends never decrease, the first and the last query of a block decide.
    """
    q_len = ends.shape[2]
    first = np.arange(0, q_len, block_q)
    last = np.minimum(first + block_q, q_len) - 1
    start, stop = ends[:, 0], ends[:, 1]
    visit_start = start[:, first] // block_kv
    visit_stop = np.maximum(-(-stop[:, last] // block_kv), visit_start)
    full_start = -(-start[:, last] // block_kv)
    # the last block of keys may be short: it is full if the queries see all that there is of it
    full_stop = np.where(stop[:, first] == kv_len, -(-kv_len // block_kv), stop[:, first] // block_kv)
    full_start = np.clip(full_start, visit_start, visit_stop)
    full_stop = np.clip(full_stop, full_start, visit_stop)
    return BlockRanges(*(x.astype(np.int32) for x in (visit_start, full_start, full_stop, visit_stop)))


def transposed(ends: Int32, kv_len: int) -> Int32:
    """First query and end of queries that see each key, int32 [intervals, 2, kv_len], from `ends` = `bounds(...)`.

    Query i sees key j iff start[i] <= j < stop[i]; both ends never decrease, so the queries are an interval too, found
    by bisection: from the number of queries with stop <= j to the number with start <= j. Neither decreases with j.
    """
    keys = np.arange(kv_len)
    result = np.empty((ends.shape[0], 2, kv_len), np.int32)
    for out, (start, stop) in zip(result, ends, strict=True):
        out[0] = np.searchsorted(stop, keys, side="right")
        out[1] = np.searchsorted(start, keys, side="right")
    return result


def visible(mask: Mask | None, b: int, h: int, q_len: int, kv_len: int) -> NDArray[np.bool_]:
    """Which keys each query of a batch entry and head sees, bool [q_len, kv_len]."""
    return _rows(mask, b, h, q_len, kv_len, range(q_len))


def dense_mask(mask: Mask | None, batch: int, num_heads_q: int, q_len: int, kv_len: int) -> NDArray[np.bool_]:
    """The mask as bool [batch or 1, heads or 1, q_len, kv_len] (1 where nothing depends on it)."""
    batch, heads = _extents(mask, batch, num_heads_q)
    result = np.empty((batch, heads, q_len, kv_len), np.bool_)
    for b in range(batch):
        for h in range(heads):
            result[b, h] = visible(mask, b, h, q_len, kv_len)
    return result


def block_classes(
    mask: Mask | None, batch: int, num_heads_q: int, q_len: int, kv_len: int, block_q: int, block_kv: int
) -> NDArray[np.int8]:
    """EMPTY, PARTIAL or FULL for each block of queries and keys, int8 [batch or 1, heads or 1, q blocks, kv blocks].

    An axis is 1 where nothing depends on it. The last blocks may be short and are judged by what they have.
    Interval masks are counted from their bounds; others entry by entry, one block of queries at a time.
    """
    batch, heads = _extents(mask, batch, num_heads_q)
    result = np.empty((batch, heads, -(-q_len // block_q), -(-kv_len // block_kv)), np.int8)
    parts = decompose(mask)
    for b in range(batch):
        for h in range(heads):
            if parts.dense or parts.predicates:
                result[b, h] = _classes_by_entry(mask, b, h, q_len, kv_len, (block_q, block_kv))
            else:
                result[b, h] = _classes_by_bounds(bounds(mask, b, q_len, kv_len), kv_len, block_q, block_kv)
    return result


def _extents(mask: Mask | None, batch: int, num_heads_q: int) -> tuple[int, int]:
    if mask is None:
        return 1, 1
    return batch if mask.depends_on_batch() else 1, num_heads_q if mask.depends_on_head() else 1


def _classes_by_bounds(ends: Int32, kv_len: int, block_q: int, block_kv: int) -> NDArray[np.int8]:
    """Classes from the number of visible keys of each query in each block of keys."""
    q_len = ends.shape[2]
    low = np.arange(0, kv_len, block_kv)
    high = np.minimum(low + block_kv, kv_len)
    blocks_q = np.arange(0, q_len, block_q)
    if not len(low) or not len(blocks_q):
        return np.zeros((len(blocks_q), len(low)), np.int8)

    def overlap(start: Any, stop: Any) -> NDArray[np.int64]:
        return np.maximum(np.minimum(stop[:, None], high) - np.maximum(start[:, None], low), 0)

    seen = sum(overlap(start, stop) for start, stop in ends)
    if len(ends) == 2:  # keys of both intervals count once
        seen = seen - overlap(np.maximum(ends[0, 0], ends[1, 0]), np.minimum(ends[0, 1], ends[1, 1]))
    fewest = np.minimum.reduceat(seen, blocks_q, axis=0)
    most = np.maximum.reduceat(seen, blocks_q, axis=0)
    return np.where(fewest == high - low, FULL, np.where(most > 0, PARTIAL, EMPTY)).astype(np.int8)


def _classes_by_entry(
    mask: Mask | None, b: int, h: int, q_len: int, kv_len: int, block: tuple[int, int]
) -> NDArray[np.int8]:
    """Classes from the entries themselves: O(q_len * kv_len) time, O(block_q * kv_len) memory."""
    block_q, block_kv = block
    columns = np.arange(0, kv_len, block_kv)
    rows = range(0, q_len, block_q)
    result = np.zeros((len(rows), len(columns)), np.int8)
    if len(columns):
        for out, i0 in zip(result, rows, strict=True):
            entries = _rows(mask, b, h, q_len, kv_len, range(i0, min(i0 + block_q, q_len)))
            every = np.logical_and.reduceat(entries.all(axis=0), columns)
            some = np.logical_or.reduceat(entries.any(axis=0), columns)
            out[:] = np.where(every, FULL, np.where(some, PARTIAL, EMPTY))
    return result


def _rows(mask: Mask | None, b: int, h: int, q_len: int, kv_len: int, rows: range) -> NDArray[np.bool_]:
    """Some rows of the mask, bool [len(rows), kv_len]."""
    i0, i1 = rows.start, rows.stop
    parts = decompose(mask)
    i, j = np.arange(i0, i1)[:, None], np.arange(kv_len)[None, :]
    shown = np.zeros((i1 - i0, kv_len), np.bool_)
    for start, stop in bounds(parts.interval, b, q_len, kv_len)[:, :, i0:i1]:
        shown |= (start[:, None] <= j) & (j < stop[:, None])
    tensors = () if mask is None else mask.tensors()
    for place in parts.dense:
        entries = as_numpy(four_axes(tensors[place], "mask"))
        entries = entries[0 if entries.shape[0] == 1 else b, 0 if entries.shape[1] == 1 else h]
        shown &= entries[i0:i1][:, :kv_len] if entries.shape[0] != 1 else entries[:, :kv_len]
    env = {"b": b, "h": h, "q_pos": i + (kv_len - q_len), "j": j}
    for expr, places in parts.predicates:
        shown &= evaluate(expr, env, [as_numpy(tensors[n]) for n in places])
    return shown


__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "BlockRanges",
    "block_classes",
    "block_ranges",
    "dense_mask",
    "transposed",
    "visible",
]
