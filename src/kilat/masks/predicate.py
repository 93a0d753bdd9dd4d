"""A mask given by a function of a user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kilat.masks.core import Mask
from kilat.structure import TensorEquality
from kilat.symbolic import Expr, Var, nodes, trace


@dataclass(frozen=True, eq=False, init=False)
class Predicate(TensorEquality, Mask):
    """fn(b, h, q_pos, j, *tensors) -> bool, traced once; raises TypeError for what cannot be traced.

    A function that takes (b, h, q_pos, j) alone may read the tensors of `tensors=` from the scope around it.
    """

    expr: Expr
    tables: tuple[Any, ...]
    tensor_fields: ClassVar[tuple[str, ...]] = ("tables",)

    def __init__(self, fn: Callable[..., Any], tensors: Sequence[Any] = ()) -> None:
        expr = trace(fn, ("b", "h", "q_pos", "j"), tensors)
        if expr.kind != "bool":
            raise TypeError(f"fn must return a boolean; got kind {expr.kind} for {expr!r}")
        object.__setattr__(self, "expr", expr)
        object.__setattr__(self, "tables", tuple(tensors))

    @property
    def name(self) -> str:
        return "predicate"

    def depends_on_batch(self) -> bool:
        return Var("b") in nodes(self.expr)

    def depends_on_head(self) -> bool:
        return Var("h") in nodes(self.expr)
