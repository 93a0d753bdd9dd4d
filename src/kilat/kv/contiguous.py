"""A cache with one stretch of memory for each sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kilat.kv.cache import Cache
from kilat.validate_basic import check_device, check_rank, fail


class ContiguousCache(Cache):
    """k [batch, capacity, num_heads_kv, head_dim], v [..., head_dim_v], lengths int32 [batch], all the caller's."""

    def __init__(self, k: Any, v: Any, lengths: Any) -> None:
        super().__init__(k, v, lengths)
        check_rank("k", self.k, ("batch", "capacity", "num_heads_kv", "head_dim"))
        check_rank("v", self.v, ("batch", "capacity", "num_heads_kv", "head_dim_v"))
        check_device("v", self.v, self.k.device)
        if self.k.shape[:3] != self.v.shape[:3]:
            fail(ValueError, "k and v must have the same batch, capacity and heads", k=self.k.shape, v=self.v.shape)
        if self.lengths.shape[0] != self.k.shape[0]:
            fail(ValueError, "lengths must be [batch]", batch=self.k.shape[0], shape=self.lengths.shape)

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence can have."""
        return self.k.shape[1]

    def locate(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """(row, position) in k and v."""
        return sequence, position
