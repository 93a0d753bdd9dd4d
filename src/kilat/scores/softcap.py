"""Soft capping of scores (Gemma 2: arXiv 2408.00118)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kilat.math import tanh
from kilat.scores.core import ScoreModifier
from kilat.structure import check_number


@dataclass(frozen=True)
class Softcap(ScoreModifier):
    """s = cap * tanh(s / cap), cap > 0. The cap is a constant: it has no gradient."""

    cap: float
    order = 0

    def __post_init__(self) -> None:
        cap = check_number(self.cap, "cap")
        if not (cap > 0 and math.isfinite(cap)):
            raise ValueError(f"cap must be finite and above 0; got cap={self.cap}")
        object.__setattr__(self, "cap", cap)

    def forward(self, s: Any) -> Any:
        """The capped score of numbers, arrays, tensors or traced values."""
        return self.cap * tanh(s / self.cap)

    def derivative(self, s: Any) -> Any:
        """d forward / ds at the score before capping: 1 - tanh(s / cap) ** 2."""
        t = tanh(s / self.cap)
        return 1.0 - t * t
