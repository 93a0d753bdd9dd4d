"""An additive bias given entry by entry, with its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kilat.scores.core import ScoreModifier
from kilat.structure import check_broadcast, check_dtype, four_axes


@dataclass(frozen=True, eq=False)
class Bias(ScoreModifier):
    """s = s + bias[b, h, i, j], broadcastable to [batch, num_heads_q, seqlen_q, seqlen_kv].

    d s / d bias is 1; the gradient of a broadcast entry is the sum over the entries that it reached.
    """

    bias: Any
    tensor_fields: ClassVar[tuple[str, ...]] = ("bias",)
    order = 2

    def __post_init__(self) -> None:
        check_dtype(self.bias, "bias", "float16", "bfloat16", "float32", "float64")
        object.__setattr__(self, "bias", four_axes(self.bias, "bias"))

    def check(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool = True) -> None:
        check_broadcast(self.bias, "bias", batch, num_heads_q, seqlen_q, seqlen_kv, exact=exact)
