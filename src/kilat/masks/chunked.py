"""Chunked attention: a sequence cut into pieces that do not see each other."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kilat.masks.core import IntervalMask
from kilat.masks.ops import fdiv
from kilat.structure import check_int


@dataclass(frozen=True)
class Chunked(IntervalMask):
    """floor(j / size) == floor(q_pos / size): all of a query's own chunk, before it and after it."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_int(self.size, "size", 1))

    @staticmethod
    def kv_start(q_pos: Any, i: Any, p: Any) -> Any:
        return fdiv(q_pos, p.size) * p.size

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return fdiv(q_pos, p.size) * p.size + p.size

    def parameters(self, b: int, q_len: int, kv_len: int) -> Any:
        return SimpleNamespace(size=min(self.size, q_len + kv_len + 1))  # larger ones make one chunk all the same
