"""Sliding windows, with or without kept first tokens (StreamingLLM: Xiao et al. 2024, arXiv 2309.17453)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kilat.masks.core import FAR, Bound, IntervalMask, Mask, leaves
from kilat.masks.ops import maximum
from kilat.structure import check_int


@dataclass(frozen=True)
class Window(IntervalMask):
    """q_pos - left <= j <= q_pos + right, or j < first. None is unbounded, 0 is a bound."""

    left: int | None = None
    right: int | None = None
    first: int = 0

    def __post_init__(self) -> None:
        for name in ("left", "right", "first"):
            value = getattr(self, name)
            if value is not None or name == "first":
                object.__setattr__(self, name, check_int(value, name, 0))

    @property
    def name(self) -> str:
        ends = ["any" if x is None else str(x) for x in (self.left, self.right)]
        return "_".join(["window", *ends, *([f"first{self.first}"] if self.first else [])])

    @staticmethod
    def kv_start(q_pos: Any, i: Any, p: Any) -> Any:
        return maximum(q_pos - p.left, p.first)  # from `first` on: the two intervals share no key

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return q_pos + p.right + 1

    @staticmethod
    def first_start(q_pos: Any, i: Any, p: Any) -> Any:
        """The kept tokens are the first ones."""
        return q_pos * 0

    @staticmethod
    def first_stop(q_pos: Any, i: Any, p: Any) -> Any:
        """One past the last kept token."""
        return q_pos * 0 + p.first

    def intervals(self) -> Sequence[tuple[Bound, Bound]]:
        window = (self.kv_start, self.kv_stop)
        return ((self.first_start, self.first_stop), window) if self.first else (window,)

    def parameters(self, b: int, q_len: int, kv_len: int) -> Any:
        longest = q_len + kv_len  # a wider window shows the same keys
        return self.clamped(longest)

    def clamped(self, longest: int) -> Any:
        """left, right, first as ints of at most `longest`."""
        left, right = (longest if x is None else min(x, longest) for x in (self.left, self.right))
        return SimpleNamespace(left=left, right=right, first=min(self.first, longest))

    def symbols(self) -> Any:
        return self.clamped(FAR)


def ring_room(mask: Mask | None, first: int, slots: int) -> int:
    """How many queries of a sequence find all keys that the mask may show in a ring cache; 0 or less: none.

    The ring holds tokens below `first` and the last slots - first. The earliest of n queries needs those from
    kv_len - n - left on.
    """
    windows = [x for x in leaves(mask) if isinstance(x, Window) and x.first <= first]
    return max((slots - first - x.left for x in windows if x.left is not None), default=0)
