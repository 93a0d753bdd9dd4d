"""A range of keys for each batch entry: left padding, or a part of a longer buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kilat.masks.core import IntervalMask
from kilat.structure import check_batch, int32_tensor


@dataclass(frozen=True, eq=False)
class KeyRange(IntervalMask):
    """start[b] <= j < stop[b], both int32 [batch]. Positions stay what they are."""

    start: Any
    stop: Any
    tensor_fields: ClassVar[tuple[str, ...]] = ("start", "stop")

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", int32_tensor(self.start, "start", 1))
        object.__setattr__(self, "stop", int32_tensor(self.stop, "stop", 1))

    def check(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool = True) -> None:
        check_batch(self.start, "start", batch)
        check_batch(self.stop, "stop", batch)

    @staticmethod
    def kv_start(q_pos: Any, i: Any, p: Any) -> Any:
        return q_pos * 0 + p.start

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return q_pos * 0 + p.stop
