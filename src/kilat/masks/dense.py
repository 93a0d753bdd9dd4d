"""A mask given entry by entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kilat.masks.core import Mask
from kilat.structure import check_broadcast, check_dtype, four_axes


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """mask[b, h, i, j], bool, True = visible; broadcastable to [batch, num_heads_q, seqlen_q, seqlen_kv]."""

    mask: Any
    tensor_fields: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        check_dtype(self.mask, "mask", "bool", remedy="of zeros and ones: mask != 0; what is added goes into Bias")
        object.__setattr__(self, "mask", four_axes(self.mask, "mask"))

    def check(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool = True) -> None:
        check_broadcast(self.mask, "mask", batch, num_heads_q, seqlen_q, seqlen_kv, exact=exact)

    def depends_on_batch(self) -> bool:
        return not hasattr(self.mask, "shape") or self.mask.shape[0] != 1

    def depends_on_head(self) -> bool:
        return not hasattr(self.mask, "shape") or self.mask.shape[1] != 1
