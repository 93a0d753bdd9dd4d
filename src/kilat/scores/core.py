"""Score modifiers: functions of the scaled score, applied before the softmax."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import ClassVar

from kilat.structure import Structured


class ScoreModifier(Structured):
    """Changes the score of a query and a key. `order` is its place among the modifiers of a call."""

    order: ClassVar[int] = 3
    unique: ClassVar[bool] = True


def in_order(scores: Sequence[ScoreModifier]) -> tuple[ScoreModifier, ...]:
    """Softcap, alibi, bias, then user scores as given; raises ValueError for two of one built-in."""
    if isinstance(scores, ScoreModifier):
        scores = (scores,)
    for score in scores:
        if not isinstance(score, ScoreModifier):
            remedy = "a tensor to add goes into Bias, a function into Score"
            got = score.__name__ if isinstance(score, type) else f"type={type(score).__name__}"
            raise TypeError(f"scores must be Softcap, Alibi, Bias or Score objects ({remedy}); got {got}")
        count = sum(type(other) is type(score) for other in scores)
        if score.unique and count > 1:
            raise ValueError(f"scores must have at most one {type(score).__name__}; got {count}")
    # index: to a tracer the order of an object that it was given is a symbolic int
    return tuple(sorted(scores, key=lambda s: operator.index(s.order)))
