"""A score modifier given by a function of a user, with its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kilat.scores.core import ScoreModifier
from kilat.symbolic import Expr, Load, derivative_to_text, from_text, partial_load, trace_to_text

_NAMES = ("s", "b", "h", "q_pos", "j")


@dataclass(frozen=True, eq=False, init=False)
class Score(ScoreModifier):
    """s = fn(s, b, h, q_pos, j, *tensors), traced once; raises TypeError for what cannot be traced.

    `expr` is the traced function, `d_expr` its derivative by s: traced from `derivative`, a function of the same
    arguments, or found by differentiating. A function that takes (s, b, h, q_pos, j) alone may read the tensors of
    `tensors=` from the scope around it. Float tensors have gradients: `partials`.
    """

    text: str
    d_text: str
    tables: tuple[Any, ...]
    tensor_fields: ClassVar[tuple[str, ...]] = ("tables",)
    unique = False

    def __init__(
        self, fn: Callable[..., Any], tensors: Sequence[Any] = (), derivative: Callable[..., Any] | None = None
    ) -> None:
        text = trace_to_text(fn, _NAMES, tensors, "float")
        d_text = trace_to_text(derivative, _NAMES, tensors, "float") if derivative else derivative_to_text(text)
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "d_text", d_text)
        object.__setattr__(self, "tables", tuple(tensors))

    @property
    def expr(self) -> Expr:
        """The traced function; `text` is the same as text."""
        return from_text(self.text)

    @property
    def d_expr(self) -> Expr:
        """Its derivative by s; `d_text` is the same as text."""
        return from_text(self.d_text)

    @property
    def name(self) -> str:
        return "score"

    def partials(self) -> list[tuple[Load, Expr]]:
        """(element of a tensor, d expr / d element) for every element that the function reads of a float tensor."""
        return partial_load(self.expr)
