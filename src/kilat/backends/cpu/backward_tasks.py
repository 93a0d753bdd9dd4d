"""Task lists of the backward: decided by the Problem and its lengths alone, so that threads never change a bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kilat.backends.cpu.backward import CHUNKS, ROWS
from kilat.backends.cpu.backward_products import BLOCK_Q

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kilat.backends.cpu.gemm import Blocking
    from kilat.backends.cpu.host import Call

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

# The keys of a kv head are split until there are about this many tasks of equal work in all. Each split costs one more
# dQ buffer: long ones of at least so many keys are worth it for balance, shorter ones only if cores would stand idle.
WANTED_TASKS = ((16, 1024), (8, 256))
MAX_SPLITS = 8
# Keys whose K, V, dK and dV a task holds at a time, for head sizes up to 128; fewer beyond, to stay in the L2 cache.
CHUNK_KEYS = 256


class Tasks:
    """A task list and its address."""

    def __init__(self, records: Ints) -> None:
        self.records, self.address, self.count = records, records.ctypes.data, len(records)


def chunk_tiles(block: Blocking, head_dim: int, longest: int) -> int:
    """Key tiles a chunk, for sequences of at most `longest` keys."""
    width = block.lanes * block.vectors
    keys = CHUNK_KEYS if head_dim <= 128 else CHUNK_KEYS // 2 if head_dim <= 256 else CHUNK_KEYS // 4
    return max(1, min(keys // width, -(-longest // width)))


def row_tasks(call: Call, splits: Ints) -> Ints:
    """`ROWS` tasks: up to 64 queries of one head each, over all sequences."""
    heads = np.arange(call.problem.num_heads_q, dtype=np.int64)
    parts = [np.zeros((0, ROWS.size), np.int64)]
    for b, n in enumerate(call.q_len.tolist()):
        first = np.arange(0, n, BLOCK_Q, dtype=np.int64)
        grid = np.empty((len(heads), len(first), ROWS.size), np.int64)
        grid[:, :, 0], grid[:, :, 1], grid[:, :, 2] = b, heads[:, None], first
        grid[:, :, 3], grid[:, :, 4] = np.minimum(n - first, BLOCK_Q), splits[b]
        parts.append(grid.reshape(-1, ROWS.size))
    return np.concatenate(parts)


def chunk_work(n: int, m: int, bounds: NDArray[np.int32] | None, keys: int) -> Floats:
    """Work of each chunk of `keys` keys for n queries and m keys: pairs that its queries span; bounds as in `Call`."""
    first = np.arange(0, m, keys)
    stop = np.minimum(first + keys, m)
    if bounds is None:
        return ((stop - first) * n).astype(np.float64)
    rows = np.zeros(len(first))
    for starts, stops in bounds:
        lo, hi = np.searchsorted(stops, first, side="right"), np.searchsorted(starts, stop - 1, side="right")
        rows += np.maximum(hi - lo, 0)
    return ((stop - first) * np.minimum(rows, n)).astype(np.float64)


def cut(total: Floats, splits: int) -> Ints:
    """Where `splits` ranges of equal work begin and end, of chunks whose work sums up to `total` [chunks + 1]."""
    goals = np.arange(1, splits) * (total[-1] / splits)
    return np.concatenate([[0], np.searchsorted(total, goals), [len(total) - 1]]).astype(np.int64)


def chunk_tasks(call: Call, keys: int) -> tuple[Ints, Ints]:
    """(`CHUNKS` tasks, heaviest first; number of dQ buffers that each sequence uses)."""
    p = call.problem
    known: dict[tuple[int, int, int], Floats] = {}
    totals: list[Floats] = []  # of each sequence: work before each chunk, and of all
    for b, (n, m) in enumerate(zip(call.q_len.tolist(), call.kv_len.tolist(), strict=True)):
        bounds = call.bounds[b] if call.bounds else None
        key = (n, m, id(bounds))
        if key not in known:
            known[key] = np.concatenate([[0.0], np.cumsum(chunk_work(n, m, bounds, keys))])
        totals.append(known[key])
    work = np.array([total[-1] for total in totals])
    shares = work / max(p.num_heads_kv * float(work.sum()), 1.0)
    splits = np.ones(len(totals), np.int64)
    for wanted, least_keys in WANTED_TASKS:
        most = np.clip(call.kv_len // least_keys, 1, MAX_SPLITS)
        splits = np.maximum(splits, np.minimum(np.ceil(shares * wanted - 1e-9).astype(np.int64), most))
    heads = np.arange(p.num_heads_kv, dtype=np.int64)
    parts, weights = [np.zeros((0, CHUNKS.size), np.int64)], [np.zeros(0)]
    for b, total in enumerate(totals):
        ends = cut(total, int(splits[b]))
        grid = np.empty((len(heads), len(ends) - 1, CHUNKS.size), np.int64)
        grid[:, :, 0], grid[:, :, 1] = b, heads[:, None]
        grid[:, :, 2], grid[:, :, 3], grid[:, :, 4] = ends[:-1], ends[1:], np.arange(len(ends) - 1)
        parts.append(grid.reshape(-1, CHUNKS.size))
        weights.append(np.tile(total[ends[1:]] - total[ends[:-1]], len(heads)))
    tasks = np.concatenate(parts)
    return np.ascontiguousarray(tasks[np.argsort(-np.concatenate(weights), kind="stable")]), splits
