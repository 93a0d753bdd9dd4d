"""A cache in pages that any sequence may own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from kilat.kv.cache import Cache, shared, swapped
from kilat.problem import Operands
from kilat.validate_basic import check_device, check_host_int, check_int32, check_rank, fail
from kilat.validate_tensors import check_scales

if TYPE_CHECKING:
    from typing_extensions import Self


class PagedCache(Cache):
    """Token t of sequence b lies in page page_table[b, t // page_size], at t % page_size.

    - k_pages [num_pages, page_size, num_heads_kv, head_dim], v_pages [..., head_dim_v]; other orders in memory by
      strides. v_pages=None reads the values from the first head_dim_v channels of the keys.
    - page_table int32 [batch, max_pages]: entries that no length reaches may hold anything, and sequences may share
      pages (an append to a shared page writes it for all of them). lengths int32 [batch].
    - k_scale, v_scale float32, [num_heads_kv] or [num_pages, page_size, num_heads_kv]: value = stored * scale, of pages
      of float8_e4m3fn or int8. With v_pages=None, values have the scale of the keys.

    Raises TypeError or ValueError for tensors that do not fit.
    """

    def __init__(
        self,
        k_pages: Any,
        v_pages: Any,
        page_table: Any,
        lengths: Any,
        k_scale: Any = None,
        v_scale: Any = None,
        head_dim_v: int | None = None,
    ) -> None:
        self.shares_values = v_pages is None
        if v_pages is None:
            v_pages = _first_channels(k_pages, head_dim_v)
        elif head_dim_v is not None and head_dim_v != v_pages.shape[-1]:
            fail(ValueError, "head_dim_v must be that of v_pages", head_dim_v=head_dim_v, v_pages=v_pages.shape)
        if self.shares_values:
            if v_scale is not None:
                fail(ValueError, "v_scale must be None where v_pages is None", v_scale=type(v_scale).__name__)
            v_scale = k_scale
        super().__init__(k_pages, v_pages, lengths, k_scale, v_scale)
        if isinstance(page_table, np.ndarray) is not self.holds_numpy:
            fail(
                TypeError,
                "a cache must hold either torch tensors or NumPy arrays",
                page_table=type(page_table).__name__,
            )
        self.page_table = shared("page_table", page_table)
        check_rank("k_pages", self.k, ("num_pages", "page_size", "num_heads_kv", "head_dim"))
        check_rank("v_pages", self.v, ("num_pages", "page_size", "num_heads_kv", "head_dim_v"))
        check_device("v_pages", self.v, self.k.device)
        if self.k.shape[:3] != self.v.shape[:3]:
            fail(ValueError, "k_pages and v_pages must agree in their first three axes", k=self.k.shape, v=self.v.shape)
        if self.k.shape[1] < 1:
            fail(ValueError, "page_size must be at least 1", k_pages=self.k.shape)
        check_rank("page_table", self.page_table, ("batch", "max_pages"))
        table_shape = (self.lengths.shape[0], self.page_table.shape[1])
        check_int32("page_table", self.page_table, table_shape, "batch, max_pages", self.k.device)
        check_scales(self.k, self.v, self.k_scale, self.v_scale)

    @classmethod
    def heads_first(
        cls,
        k_pages: Any,
        v_pages: Any,
        page_table: Any,
        lengths: Any,
        k_scale: Any = None,
        v_scale: Any = None,
        head_dim_v: int | None = None,
    ) -> Self:
        """The cache over k_pages [num_pages, num_heads_kv, page_size, head_dim] and v_pages alike (HND); no copy.

        Scales are [num_heads_kv] or [num_pages, num_heads_kv, page_size].
        """
        k_pages, v_pages, k_scale, v_scale = (swapped(x) for x in (k_pages, v_pages, k_scale, v_scale))
        return cls(k_pages, v_pages, page_table, lengths, k_scale, v_scale, head_dim_v)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence can have."""
        return self.page_table.shape[1] * self.page_size

    def locate(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """(page, place in it) in k and v."""
        return self.page_table[sequence, position // self.page_size].long(), position % self.page_size

    def operands(self, q: Any) -> Operands:
        """Operands of a call, with the page table."""
        found = super().operands(q)
        found.page_table = self.page_table
        return found


def _first_channels(k_pages: Any, head_dim_v: int | None) -> Any:
    if head_dim_v is None:
        raise ValueError("head_dim_v must be given where v_pages is None; got head_dim_v=None")
    check_host_int("head_dim_v", head_dim_v, 1)
    if head_dim_v > k_pages.shape[-1]:
        fail(ValueError, "head_dim_v must not exceed head_dim", head_dim_v=head_dim_v, k_pages=k_pages.shape)
    return k_pages[..., :head_dim_v]
