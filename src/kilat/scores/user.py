"""A score modifier given by a function of a user, with its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kilat.scores.core import ScoreModifier
from kilat.structure import TensorEquality
from kilat.symbolic import Call, Const, Expr, Load, derivative, partial_load, trace

_NAMES = ("s", "b", "h", "q_pos", "j")


@dataclass(frozen=True, eq=False, init=False)
class Score(TensorEquality, ScoreModifier):
    """s = fn(s, b, h, q_pos, j, *tensors), traced once; raises TypeError for what cannot be traced.

    `expr` is the traced function, `d_expr` its derivative by s: traced from `derivative`, a function of the same
    arguments, or found by differentiating. A function that takes (s, b, h, q_pos, j) alone may read the tensors of
    `tensors=` from the scope around it. Float tensors have gradients: `partials`.
    """

    expr: Expr
    d_expr: Expr
    tables: tuple[Any, ...]
    tensor_fields: ClassVar[tuple[str, ...]] = ("tables",)
    unique = False

    def __init__(
        self, fn: Callable[..., Any], tensors: Sequence[Any] = (), derivative: Callable[..., Any] | None = None
    ) -> None:
        expr = _float(trace(fn, _NAMES, tensors), "fn")
        if derivative is None:
            d_expr = _derivative(expr)
        else:
            d_expr = _float(trace(derivative, _NAMES, tensors), "derivative")
        object.__setattr__(self, "expr", expr)
        object.__setattr__(self, "d_expr", d_expr)
        object.__setattr__(self, "tables", tuple(tensors))

    @property
    def name(self) -> str:
        return "score"

    def partials(self) -> list[tuple[Load, Expr]]:
        """(element of a tensor, d expr / d element) for every element that the function reads of a float tensor."""
        return partial_load(self.expr)


_derivative = derivative  # the constructor's argument of that name hides it


def _float(expr: Expr, name: str) -> Expr:
    """The expression as a float; raises TypeError for a boolean."""
    if expr.kind == "bool":
        raise TypeError(f"{name} must return a number; got kind bool for {expr!r}")
    if isinstance(expr, Const):
        return Const(float(expr.value))
    return expr if expr.kind == "float" else Call("float", (expr,))
