"""Causal attention: a query sees its own position and those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kilat.masks.core import Bound, IntervalMask


@dataclass(frozen=True)
class Causal(IntervalMask):
    """j <= q_pos: the last query sees all keys. With align="top_left" j <= i: the first query sees one key."""

    align: Literal["bottom_right", "top_left"] = "bottom_right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom_right", "top_left"):
            raise ValueError(f'align must be "bottom_right" or "top_left"; got align={self.align!r}')

    @property
    def name(self) -> str:
        return "causal" if self.align == "bottom_right" else "causal_top_left"

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return q_pos + 1

    @staticmethod
    def kv_stop_top_left(q_pos: Any, i: Any, p: Any) -> Any:
        """One past the last key where queries count from the first key."""
        return i + 1

    def intervals(self) -> Sequence[tuple[Bound, Bound]]:
        return ((self.kv_start, self.kv_stop if self.align == "bottom_right" else self.kv_stop_top_left),)
