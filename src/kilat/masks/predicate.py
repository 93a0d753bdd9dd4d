"""A mask given by a function of a user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kilat.masks.core import Mask
from kilat.symbolic import Expr, Var, from_text, nodes, trace_to_text


@dataclass(frozen=True, eq=False, init=False)
class Predicate(Mask):
    """fn(b, h, q_pos, j, *tensors) -> bool, traced once; raises TypeError for what cannot be traced.

    A function that takes (b, h, q_pos, j) alone may read the tensors of `tensors=` from the scope around it.
    """

    text: str
    tables: tuple[Any, ...]
    tensor_fields: ClassVar[tuple[str, ...]] = ("tables",)

    def __init__(self, fn: Callable[..., Any], tensors: Sequence[Any] = ()) -> None:
        object.__setattr__(self, "text", trace_to_text(fn, ("b", "h", "q_pos", "j"), tensors, "bool"))
        object.__setattr__(self, "tables", tuple(tensors))

    @property
    def expr(self) -> Expr:
        """The traced function; `text` is the same as text."""
        return from_text(self.text)

    @property
    def name(self) -> str:
        return "predicate"

    def depends_on_batch(self) -> bool:
        return Var("b") in nodes(self.expr)

    def depends_on_head(self) -> bool:
        return Var("h") in nodes(self.expr)
