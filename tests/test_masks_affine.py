"""Masks as two numbers: the same visible pairs as the mask itself, and None for what is not of that kind."""

from __future__ import annotations

import numpy as np
import pytest

import kilat
from kilat.masks.affine import Affine, affine
from kilat.masks.core import FAR, Mask
from kilat.masks.ranges import visible

SIZES = [(1, 1), (1, 7), (7, 1), (5, 9), (9, 5), (8, 8)]
ENDS = (None, 0, 2, 100, 2**31 - 1)
WINDOWS = [kilat.Window(left, right) for left in ENDS for right in ENDS]
MASKS: list[Mask] = [kilat.Causal(), kilat.Causal(align="top_left"), *WINDOWS]


def shown(found: Affine, q_len: int, kv_len: int) -> np.ndarray:
    i, j = np.arange(q_len, dtype=np.int64)[:, None], np.arange(kv_len)[None, :]
    q_pos = i + kv_len - q_len
    return (q_pos - found.left <= j) & (j <= q_pos + found.right) & (j <= i + found.right_top_left)


def check(mask: Mask | None) -> None:
    found = affine(mask)
    assert found is not None
    for q_len, kv_len in SIZES:
        same = shown(found, q_len, kv_len) == visible(mask, 0, 0, q_len, kv_len)
        assert same.all(), (mask and mask.name, q_len, kv_len)


@pytest.mark.parametrize("mask", [None, *MASKS], ids=lambda m: "full" if m is None else m.name)
def test_an_affine_mask_shows_the_same_pairs_alone_and_with_any_other(mask: Mask | None) -> None:
    check(mask)
    if mask is not None:
        for other in MASKS:
            check(mask & other)


@pytest.mark.parametrize(
    "mask", [kilat.Window(2, 2, first=1), kilat.Chunked(4), kilat.Causal() & kilat.Chunked(4)], ids=lambda m: m.name
)
def test_other_masks_are_not(mask: Mask) -> None:
    assert affine(mask) is None


def test_the_kind_says_which_bounds_exist() -> None:
    assert Affine().kind == (False, False, False)
    assert affine(kilat.Causal()) == Affine(right=0)
    assert Affine(left=3, right_top_left=0).kind == (True, False, True)
    assert affine(kilat.Window(2**31 - 1, None)) == Affine(FAR, FAR, FAR)
