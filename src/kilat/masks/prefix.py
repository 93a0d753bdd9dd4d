"""Prefix language models: a prefix seen by all, then causal attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kilat.masks.core import IntervalMask
from kilat.masks.ops import maximum
from kilat.structure import check_batch, int32_tensor


@dataclass(frozen=True, eq=False)
class Prefix(IntervalMask):
    """j <= q_pos or j < lengths[b]; lengths int32 [batch]."""

    lengths: Any
    tensor_fields: ClassVar[tuple[str, ...]] = ("lengths",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", int32_tensor(self.lengths, "lengths", 1))

    def check(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool = True) -> None:
        check_batch(self.lengths, "lengths", batch)

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return maximum(q_pos + 1, p.lengths)
