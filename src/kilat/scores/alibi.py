"""Linear position biases (ALiBi: Press et al. 2022, arXiv 2108.12409)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kilat.scores.core import ScoreModifier
from kilat.structure import Slot, check_dtype, float_tensor, shape_of


@dataclass(frozen=True, eq=False)
class Alibi(ScoreModifier):
    """s = s - slope * |q_pos - j|; slopes [heads] or [batch, heads]. Slopes are constants: they have no gradient."""

    slopes: Any
    tensor_fields: ClassVar[tuple[str, ...]] = ("slopes",)
    order = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "slopes", float_tensor(self.slopes, "slopes"))
        check_dtype(self.slopes, "slopes", "float16", "bfloat16", "float32", "float64")
        if not isinstance(self.slopes, Slot) and len(self.slopes.shape) not in (1, 2):
            raise ValueError(f"slopes must be [heads] or [batch, heads]; got slopes.shape={shape_of(self.slopes)}")

    def check(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool = True) -> None:
        shape = shape_of(self.slopes)
        if shape not in ((num_heads_q,), (batch, num_heads_q), (1, num_heads_q)):
            raise ValueError(
                f"slopes must be [num_heads_q={num_heads_q}] or [batch={batch}, num_heads_q={num_heads_q}]; "
                f"got slopes.shape={shape}"
            )

    @staticmethod
    def forward(s: Any, slope: Any, q_pos: Any, j: Any) -> Any:
        """The score with its position bias; d forward / ds is 1."""
        return s - slope * abs(q_pos - j)
