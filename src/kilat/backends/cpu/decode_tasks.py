"""The task list of the kernel for few queries: key ranges of row blocks, cut so that the machine is filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kilat.backends.cpu.decode import MAX_ROWS, TASK
from kilat.backends.cpu.decode_tiles import KEYS
from kilat.backends.cpu.forward_tasks import key_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kilat.backends.cpu.host import Call

# Constants, since neither the number of threads nor (batch_invariant) the companions may change a bit.
WANTED_TASKS = 32
MIN_CHUNK = 256
INVARIANT_CHUNK = 1024


def tasks(call: Call, chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int64], int, int]:
    """(tasks, number of row blocks, most rows of a block) of the chosen sequences, heaviest first."""
    p = call.problem
    step = max(1, MAX_ROWS // p.group)
    blocks: list[tuple[int, int, int, list[tuple[int, int]]]] = []  # sequence, first query, queries, key ranges
    known: dict[tuple[int, int, int], list[tuple[int, int, list[tuple[int, int]]]]] = {}
    for b in np.flatnonzero(chosen & (call.q_len > 0)).tolist():
        n, m = int(call.q_len[b]), int(call.kv_len[b])
        bounds = call.bounds[b] if call.bounds else None
        key = (n, m, id(bounds))
        if key not in known:
            known[key] = _row_blocks(n, m, step, bounds)
        blocks.extend((b, *block) for block in known[key])
    if not blocks:
        return np.zeros((0, TASK.size), np.int64), 0, 0
    rows = _cut(blocks, p.num_heads_kv, _chunk_sizes(call, blocks))
    work = (rows[:, 5] - rows[:, 4]) * rows[:, 3]
    most = p.group * max(block[2] for block in blocks)
    ordered = np.ascontiguousarray(rows[np.argsort(-work, kind="stable")])
    return ordered, len(blocks) * p.num_heads_kv, most


def _row_blocks(
    n: int, m: int, step: int, bounds: NDArray[np.int32] | None
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(first query, queries, non-empty key ranges) of the row blocks of one sequence."""
    first = np.arange(0, n, step, dtype=np.int64)
    count = np.minimum(n - first, step)
    ranges = key_ranges(first, count, m, bounds).T.tolist()
    out = []
    for i, c, (lo0, hi0, lo1, hi1) in zip(first.tolist(), count.tolist(), ranges, strict=True):
        out.append((i, c, [(lo, hi) for lo, hi in ((lo0, hi0), (lo1, hi1)) if hi > lo]))
    return out


def _chunk_sizes(call: Call, blocks: list[tuple[int, int, int, list[tuple[int, int]]]]) -> list[int]:
    """Keys of a task, for every row block; a multiple of a tile."""
    p = call.problem
    keys = [sum(hi - lo for lo, hi in block[3]) for block in blocks]
    if p.num_splits is not None:
        sizes = [-(-n // p.num_splits) for n in keys]
    elif p.batch_invariant:
        sizes = [INVARIANT_CHUNK] * len(blocks)
    else:
        even = -(-sum(keys) * p.num_heads_kv // WANTED_TASKS)
        sizes = [max(MIN_CHUNK, even)] * len(blocks)
    return [max(KEYS, -(-size // KEYS) * KEYS) for size in sizes]


def _cut(
    blocks: list[tuple[int, int, int, list[tuple[int, int]]]], num_heads_kv: int, sizes: list[int]
) -> NDArray[np.int64]:
    """`TASK` rows: every key range in pieces, for every kv head. A block without keys keeps one empty piece."""
    out, part, index = [], 0, 0
    for (b, first, count, ranges), size in zip(blocks, sizes, strict=True):
        pieces = [(j, min(j + size, hi)) for lo, hi in ranges for j in range(lo, hi, size)] or [(0, 0)]
        for head in range(num_heads_kv):
            for n, (lo, hi) in enumerate(pieces):
                out.append((b, head, first, count, lo, hi, part + n, part, len(pieces), index))
            part += len(pieces)
            index += 1
    return np.array(out, np.int64)
