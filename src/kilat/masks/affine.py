"""Masks whose interval moves with the query: q_pos - left <= j <= q_pos + right. Kernels take these as two numbers.

Full, causal (both corners) and sliding windows are of this kind, and so is every `&` of them. A kernel needs no table
for them: the ends of a block follow from its first and last query.
"""

from __future__ import annotations

from typing import NamedTuple

from kilat.masks.causal import Causal
from kilat.masks.core import FAR, Mask, leaves
from kilat.masks.window import Window


class Affine(NamedTuple):
    """Key j is visible iff q_pos - left <= j <= q_pos + right and j <= i + right_top_left; `FAR` is no bound."""

    left: int = FAR
    right: int = FAR
    right_top_left: int = FAR

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Which of the bounds exist: what a kernel is compiled for."""
        return self.left < FAR, self.right < FAR, self.right_top_left < FAR


def affine(mask: Mask | None) -> Affine | None:
    """The mask as an `Affine`, or None if it is not of this kind."""
    found = Affine()
    for leaf in leaves(mask):
        if isinstance(leaf, Causal):
            new = Affine(right=0) if leaf.align == "bottom_right" else Affine(right_top_left=0)
        elif isinstance(leaf, Window) and not leaf.first:
            new = Affine(*(FAR if x is None else min(x, FAR) for x in (leaf.left, leaf.right)))
        else:
            return None
        found = Affine(*map(min, found, new))
    return found
