"""A cache of the first tokens and the last ones (StreamingLLM: Xiao et al. 2024, arXiv 2309.17453)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from kilat.kv.cache import Cache, swapped
from kilat.kv.contiguous import check_contiguous
from kilat.masks.core import FAR
from kilat.reference_parts import ring_slot
from kilat.validate_basic import check_host_int, fail

if TYPE_CHECKING:
    from typing_extensions import Self


class RingCache(Cache):
    """The first tokens of each sequence, and in a ring behind them the last: sequences without end in fixed memory.

    Token t lies in slot t if t < first, else in first + (t - first) % (slots - first), over what lay there before.

    - k [batch, slots, num_heads_kv, head_dim], v [..., head_dim_v], first < slots; k_scale and v_scale as in
      ContiguousCache, [num_heads_kv] or [batch, slots, num_heads_kv].
    - lengths int32 [batch]: tokens of each sequence, those included that are gone. Positions are the true ones, for
      masks, scores and rotary embedding alike.

    `cached_attention` takes masks with a Window(left, right, first=n) that shows nothing that is gone:
    n <= first and left + seqlen_q <= slots - first. Longer prompts are appended and attended in such pieces. Raises
    TypeError or ValueError for tensors that do not fit.
    """

    def __init__(self, k: Any, v: Any, lengths: Any, first: int, k_scale: Any = None, v_scale: Any = None) -> None:
        super().__init__(k, v, lengths, k_scale, v_scale)
        check_contiguous(self)
        check_host_int("first", first, 0)
        if first >= self.slots:
            fail(ValueError, "first must be less than the slots of a sequence", first=first, slots=self.slots)
        self.ring_first = first

    @classmethod
    def heads_first(cls, k: Any, v: Any, lengths: Any, first: int, k_scale: Any = None, v_scale: Any = None) -> Self:
        """The cache over k [batch, num_heads_kv, slots, head_dim] and v alike (HND); no copy.

        Scales are [num_heads_kv] or [batch, num_heads_kv, slots].
        """
        return cls(swapped(k), swapped(v), lengths, first, swapped(k_scale), swapped(v_scale))

    @property
    def slots(self) -> int:
        """Tokens that a sequence has in memory at most."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence can have: positions fit 32 bits."""
        return FAR

    def locate(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """(row, slot) in k and v."""
        return sequence, ring_slot(position, self.ring_first or 0, self.slots)

    def lasting(self, position: Tensor, after: Tensor, longest: int) -> Tensor | None:
        """All but those that later ones of the same append take the slots of."""
        first = self.ring_first or 0
        around = self.slots - first
        return None if longest <= around else (position < first) | (position >= after - around)
