"""The task list of the forward: which queries, heads and keys make one task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kilat.backends.cpu.forward import BLOCK_KV, MAX_BLOCKS, TASK
from kilat.backends.cpu.gemm import Blocking

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kilat.backends.cpu.host import Call
    from kilat.problem import Problem


def tasks(call: Call, block: Blocking, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The tasks of the chosen sequences, heaviest first; no bit depends on how queries and heads are grouped."""
    p = call.problem
    width = block.lanes * block.vectors
    total_blocks = int((-(-call.q_len[chosen] // width)).sum()) * p.num_heads_q
    per_task = MAX_BLOCKS
    while per_task > 1 and total_blocks // per_task < 4 * torch.get_num_threads():
        per_task //= 2
    parts: list[NDArray[np.int64]] = []
    known: dict[tuple[int, int, int], NDArray[np.int64]] = {}
    for b in range(p.batch):
        n, m = int(call.q_len[b]), int(call.kv_len[b])
        if n == 0 or not chosen[b]:
            continue
        bounds = call.bounds[b] if call.bounds else None
        key = (n, m, id(bounds))
        if key not in known:
            known[key] = _sequence_tasks(p, n, m, bounds, width, per_task)
        rows = known[key].copy()
        rows[:, 0] = b
        parts.append(rows)
    if not parts:
        return np.zeros((0, TASK.size), np.int64)
    rows = np.concatenate(parts)
    work = (rows[:, 6] - rows[:, 5] + rows[:, 8] - rows[:, 7]) * rows[:, 2] * rows[:, 4]
    return np.ascontiguousarray(rows[np.argsort(-work, kind="stable")])


def _sequence_tasks(
    p: Problem, n: int, m: int, bounds: NDArray[np.int32] | None, width: int, per_task: int
) -> NDArray[np.int64]:
    """Tasks of one sequence of n queries and m keys; see `TASK` for the columns."""
    blocks = -(-n // width)
    heads = 1
    while heads * 2 * min(blocks, per_task) <= per_task and p.group % (heads * 2) == 0:
        heads *= 2
    step = min(per_task // heads, blocks) * width
    first = np.arange(0, n, step, dtype=np.int64)
    count = np.minimum(n - first, step)
    head = np.arange(0, p.num_heads_q, heads, dtype=np.int64)
    grid = np.zeros((len(head), len(first), TASK.size), np.int64)
    grid[:, :, 1], grid[:, :, 2] = head[:, None], heads
    grid[:, :, 3], grid[:, :, 4] = first, count
    grid[:, :, 5:9] = key_ranges(first, count, m, bounds).T
    return grid.reshape(-1, TASK.size)


def key_ranges(
    first: NDArray[np.int64], count: NDArray[np.int64], m: int, bounds: NDArray[np.int32] | None
) -> NDArray[np.int64]:
    """[lo0, hi0, lo1, hi1] for every block of queries: the keys that any of its rows may see, tiles aligned.

    Bounds are monotone, so a block's first row has the lowest start and its last row the highest stop.
    """
    zero = np.zeros_like(first)
    if bounds is None:
        return np.stack([zero, zero + m, zero, zero])
    last = first + count - 1
    lo, hi = bounds[:, 0, :][:, first].astype(np.int64), bounds[:, 1, :][:, last].astype(np.int64)
    lo = lo // BLOCK_KV * BLOCK_KV
    hi = np.maximum(hi, lo)
    if len(bounds) == 1:
        return np.stack([lo[0], hi[0], zero, zero])
    a, b = (0, 1)
    swap = lo[0] > lo[1]
    lo0, hi0 = np.where(swap, lo[b], lo[a]), np.where(swap, hi[b], hi[a])
    lo1, hi1 = np.where(swap, lo[a], lo[b]), np.where(swap, hi[a], hi[b])
    empty0, empty1 = hi0 <= lo0, hi1 <= lo1
    # Two ranges that share a tile would visit it twice: join them. Joined by pairs of tiles, which the bfloat16 kernel
    # takes at once: else the blocks of a task, and so the number of threads, would decide what is summed together.
    pair = 2 * BLOCK_KV
    join = (lo1 // pair < -(-hi0 // pair)) & ~empty0 & ~empty1
    hi0 = np.where(join, np.maximum(hi0, hi1), hi0)
    lo1, hi1 = np.where(join, 0, lo1), np.where(join, 0, hi1)
    return np.stack([lo0, hi0, lo1, hi1])
