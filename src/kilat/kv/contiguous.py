"""A cache with one stretch of memory for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from kilat.kv.cache import Cache, swapped
from kilat.validate_basic import check_device, check_rank, fail
from kilat.validate_tensors import check_scales

if TYPE_CHECKING:
    from typing_extensions import Self


class ContiguousCache(Cache):
    """k [batch, capacity, num_heads_kv, head_dim], v [..., head_dim_v], lengths int32 [batch], all the caller's.

    Keys and values of float8_e4m3fn or int8 have k_scale and v_scale float32, [num_heads_kv] or
    [batch, capacity, num_heads_kv]: value = stored * scale. Raises TypeError or ValueError for tensors that do not fit.
    """

    def __init__(self, k: Any, v: Any, lengths: Any, k_scale: Any = None, v_scale: Any = None) -> None:
        super().__init__(k, v, lengths, k_scale, v_scale)
        check_contiguous(self)

    @classmethod
    def heads_first(cls, k: Any, v: Any, lengths: Any, k_scale: Any = None, v_scale: Any = None) -> Self:
        """The cache over k [batch, num_heads_kv, capacity, head_dim] and v alike (HND); no copy.

        Scales are [num_heads_kv] or [batch, num_heads_kv, capacity].
        """
        return cls(swapped(k), swapped(v), lengths, swapped(k_scale), swapped(v_scale))

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence can have."""
        return self.k.shape[1]

    def locate(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """(row, position) in k and v."""
        return sequence, position


def check_contiguous(cache: Cache) -> None:
    """TypeError or ValueError unless k, v, lengths and scales are those of sequences with a stretch of memory each."""
    check_rank("k", cache.k, ("batch", "capacity", "num_heads_kv", "head_dim"))
    check_rank("v", cache.v, ("batch", "capacity", "num_heads_kv", "head_dim_v"))
    check_device("v", cache.v, cache.k.device)
    if cache.k.shape[:3] != cache.v.shape[:3]:
        fail(ValueError, "k and v must have the same batch, capacity and heads", k=cache.k.shape, v=cache.v.shape)
    if cache.lengths.shape[0] != cache.k.shape[0]:
        fail(ValueError, "lengths must be [batch]", batch=cache.k.shape[0], shape=cache.lengths.shape)
    check_scales(cache.k, cache.v, cache.k_scale, cache.v_scale)
