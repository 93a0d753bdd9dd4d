"""The mask algebra, proved on small sizes: every mask alone and every pair under `&`.

The truth is written here a second time, as a condition on (b, h, i, q_pos, j) straight from the semantics page; bounds,
transposed bounds, block ranges and block classes must say the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from kilat.masks import (
    Causal,
    Chunked,
    Dense,
    Documents,
    KeyRange,
    Mask,
    Predicate,
    Prefix,
    Window,
    bounds,
    decompose,
)
from kilat.masks.ranges import EMPTY, FULL, PARTIAL, block_classes, block_ranges, dense_mask, transposed, visible

SIZES = range(10)
LONGEST = max(SIZES)
PAIR_SIZES = [(q, kv) for q in SIZES for kv in SIZES if (q + kv) % 3 != 1]
BATCH, HEADS = 2, 2
BLOCKS = list(itertools.product((1, 2, 3, 4), repeat=2))
INT32_MAX = 2**31 - 1
Truth = Callable[[int, int, int, int, int], bool]
"""(b, h, i, q_pos, j) -> visible"""

PREFIXES = [3, 0]
RANGES = [[1, -2], [7, 99]]
IDS = [5, 5, 2, -1, -1, 7, 7, 7, -3]
IDS_BATCH = [[0, 0, 0, 1, 1, 1, 1, 2, 2], [-1, 4, 3, 3, 3, 3, 0, 0, -1]]
ENTRIES = np.random.default_rng(0).random((BATCH, HEADS, LONGEST, LONGEST)) < 0.5
ROW = np.arange(LONGEST) % 3 != 1
TABLE = np.array([[0, 2, 1, 3], [1, 0, 0, 2]], np.int32)


def window(left: int, right: int, first: int = 0) -> Truth:
    return lambda b, h, i, q, j: q - left <= j <= q + right or j < first


def documents(ids: list[list[int]]) -> Truth:
    return lambda b, h, i, q, j: q >= 0 and ids[b][q] == ids[b][j] >= 0


MASKS: dict[str, tuple[Mask, Truth]] = {
    "causal": (Causal(), lambda b, h, i, q, j: j <= q),
    "causal_top_left": (Causal("top_left"), lambda b, h, i, q, j: j <= i),
    "window_0_0": (Window(0, 0), window(0, 0)),
    "window_2_1": (Window(2, 1), window(2, 1)),
    "window_none_0": (Window(None, 0), window(99, 0)),
    "window_1_none": (Window(1, None), window(1, 99)),
    "window_max": (Window(INT32_MAX, INT32_MAX), window(INT32_MAX, INT32_MAX)),
    "window_none": (Window(None, None), window(99, 99)),
    "window_1_0_first_2": (Window(1, 0, first=2), window(1, 0, 2)),
    "window_0_2_first_1": (Window(0, 2, first=1), window(0, 2, 1)),
    "window_3_none_first_max": (Window(3, None, first=INT32_MAX), window(3, 99, INT32_MAX)),
    "prefix": (Prefix(PREFIXES), lambda b, h, i, q, j: j <= q or j < PREFIXES[b]),
    "chunked_1": (Chunked(1), lambda b, h, i, q, j: j == q),
    "chunked_3": (Chunked(3), lambda b, h, i, q, j: j // 3 == q // 3),
    "chunked_max": (Chunked(INT32_MAX), lambda b, h, i, q, j: q >= 0),
    "key_range": (KeyRange(*RANGES), lambda b, h, i, q, j: RANGES[0][b] <= j < RANGES[1][b]),
    "documents": (Documents(IDS), documents([IDS, IDS])),
    "documents_batch": (Documents(IDS_BATCH), documents(IDS_BATCH)),
    "dense": (Dense(ENTRIES), lambda b, h, i, q, j: bool(ENTRIES[b, h, i, j])),
    "dense_row": (Dense(ROW), lambda b, h, i, q, j: bool(ROW[j])),
    "dilated": (Predicate(lambda b, h, q, j: (q - j) % 3 == 0), lambda b, h, i, q, j: (q - j) % 3 == 0),
    "table": (
        Predicate(lambda b, h, q, j, t: t[b, (q - h) % 4] > j // 2, (TABLE,)),
        lambda b, h, i, q, j: bool(TABLE[b, (q - h) % 4] > j // 2),
    ),
}


def by_definition(truth: Truth, q_len: int, kv_len: int) -> np.ndarray:
    """bool [batch, heads, q_len, kv_len], entry by entry."""
    shape = (BATCH, HEADS, q_len, kv_len)
    entries = [truth(b, h, i, i + kv_len - q_len, j) for b, h, i, j in np.ndindex(shape)]
    return np.array(entries, np.bool_).reshape(shape)


@pytest.fixture(scope="module")
def truths() -> dict[tuple[str, int, int], np.ndarray]:
    return {
        (name, q_len, kv_len): by_definition(truth, q_len, kv_len)
        for name, (_, truth) in MASKS.items()
        for q_len in SIZES
        for kv_len in SIZES
    }


def union(ends: np.ndarray, length: int) -> np.ndarray:
    """bool [rows, length]: inside any of the intervals ends [intervals, 2, rows]."""
    j = np.arange(length)
    return ((ends[:, 0, :, None] <= j) & (j < ends[:, 1, :, None])).any(axis=0)


def check_bounds(ends: np.ndarray, truth: np.ndarray) -> None:
    """Bounds and transposed bounds of one batch entry against bool [q_len, kv_len]."""
    q_len, kv_len = truth.shape
    assert ends.shape in ((1, 2, q_len), (2, 2, q_len))
    assert ends.dtype == np.int32
    assert not ends.flags.writeable
    assert (ends >= 0).all()
    assert (ends <= kv_len).all()
    assert (ends[:, 0] <= ends[:, 1]).all()
    assert (np.diff(ends, axis=2) >= 0).all(), "an end decreases"
    assert (union(ends, kv_len) == truth).all()
    if len(ends) == 2:
        assert (ends[0, 1] <= ends[1, 0]).all() or not (union(ends[:1], kv_len) & union(ends[1:], kv_len)).any()
    columns = transposed(ends, kv_len)
    assert columns.dtype == np.int32
    assert (columns[:, 0] <= columns[:, 1]).all()
    assert (np.diff(columns, axis=2) >= 0).all()
    assert (union(columns, q_len) == truth.T).all()


def classes_of(truth: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """EMPTY, PARTIAL or FULL of each block of bool [..., q_len, kv_len], by cutting it up."""
    *outer, q_len, kv_len = truth.shape
    rows, columns = -(-q_len // block_q), -(-kv_len // block_kv)

    def cut(filler: bool) -> np.ndarray:
        whole = np.full((*outer, rows * block_q, columns * block_kv), filler)
        whole[..., :q_len, :kv_len] = truth
        return whole.reshape(*outer, rows, block_q, columns, block_kv)

    every, some = cut(True).all(axis=(-3, -1)), cut(False).any(axis=(-3, -1))
    return np.where(every, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.int8)


def check_ranges(ends: np.ndarray, classes: np.ndarray, kv_len: int, block_q: int, block_kv: int) -> None:
    """Block ranges: what is not visited is empty, what needs no mask is full; with one interval full is exact."""
    ranges = block_ranges(ends, kv_len, block_q, block_kv)
    assert all(r.dtype == np.int32 for r in ranges)
    assert (ranges.visit_start <= ranges.full_start).all()
    assert (ranges.full_start <= ranges.full_stop).all()
    assert (ranges.full_stop <= ranges.visit_stop).all()
    assert (ranges.visit_stop <= -(-kv_len // block_kv)).all()
    visited = union(np.stack([ranges.visit_start, ranges.visit_stop], axis=1), classes.shape[1])
    unmasked = union(np.stack([ranges.full_start, ranges.full_stop], axis=1), classes.shape[1])
    assert (visited | (classes == EMPTY)).all()
    if len(ends) == 1:
        assert (unmasked == (classes == FULL)).all()
    else:
        assert (classes[unmasked] == FULL).all()


def check(mask: Mask, truth: np.ndarray, blocks: list[tuple[int, int]]) -> None:
    """Everything derived from a mask against bool [batch, heads, q_len, kv_len]."""
    q_len, kv_len = truth.shape[2:]
    parts = decompose(mask)
    intervals_only = not parts.dense and not parts.predicates
    wanted = {block: classes_of(truth, *block) for block in blocks}
    for b in range(BATCH if mask.depends_on_batch() else 1):
        if intervals_only:
            ends = bounds(mask, b, q_len, kv_len)
            check_bounds(ends, truth[b, 0])
            for block in blocks:
                check_ranges(ends, wanted[block][b, 0], kv_len, *block)
        else:
            for h in range(HEADS if mask.depends_on_head() else 1):
                assert (visible(mask, b, h, q_len, kv_len) == truth[b, h]).all()
    for block in blocks:
        classes = block_classes(mask, BATCH, HEADS, q_len, kv_len, *block)
        assert classes.dtype == np.int8
        assert (np.broadcast_to(classes, wanted[block].shape) == wanted[block]).all()


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_alone(name: str, truths: dict[tuple[str, int, int], np.ndarray]) -> None:
    mask = MASKS[name][0]
    for q_len, kv_len in itertools.product(SIZES, SIZES):
        truth = truths[name, q_len, kv_len]
        check(mask, truth, BLOCKS)
        entries = dense_mask(mask, BATCH, HEADS, q_len, kv_len)
        assert (np.broadcast_to(entries, truth.shape) == truth).all()
        # what does not depend on the batch or the head is computed once for all of them
        assert entries.shape[0] == (BATCH if mask.depends_on_batch() else 1)
        assert entries.shape[1] == (HEADS if mask.depends_on_head() else 1)


@pytest.mark.parametrize("name", MASKS)
def test_every_pair(name: str, truths: dict[tuple[str, int, int], np.ndarray]) -> None:
    place = list(MASKS).index(name)
    blocks = itertools.cycle(BLOCKS)  # 16 does not divide the number of sizes: a pair meets many of them
    for other in list(MASKS)[place:]:
        pair = (MASKS[name][0], MASKS[other][0])
        mask = pair[0] & pair[1] if place % 2 else pair[1] & pair[0]
        for q_len, kv_len in PAIR_SIZES:
            check(mask, truths[name, q_len, kv_len] & truths[other, q_len, kv_len], [next(blocks)])


def test_three_masks_with_two_intervals_each() -> None:
    names = ("window_1_0_first_2", "window_0_2_first_1", "window_3_none_first_max", "prefix")
    mask = MASKS[names[0]][0] & (MASKS[names[1]][0] & MASKS[names[2]][0]) & MASKS[names[3]][0]
    parts = decompose(mask)
    assert len(parts.predicates) == 2
    for q_len, kv_len in itertools.product((0, 1, 4, 9), (0, 1, 5, 9)):
        truth = np.ones((BATCH, HEADS, q_len, kv_len), np.bool_)
        for name in names:
            truth &= by_definition(MASKS[name][1], q_len, kv_len)
        check(mask, truth, [(2, 3)])


def test_no_mask_shows_everything() -> None:
    for q_len, kv_len in itertools.product(SIZES, SIZES):
        truth = np.ones((q_len, kv_len), np.bool_)
        check_bounds(bounds(None, 0, q_len, kv_len), truth)
        assert (visible(None, 0, 0, q_len, kv_len) == truth).all()
        for block_q, block_kv in BLOCKS:
            assert (block_classes(None, BATCH, HEADS, q_len, kv_len, block_q, block_kv) == FULL).all()
            classes = classes_of(truth, block_q, block_kv)
            check_ranges(bounds(None, 0, q_len, kv_len), classes, kv_len, block_q, block_kv)
