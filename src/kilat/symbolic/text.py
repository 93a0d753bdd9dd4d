"""Expressions as text and back: the compile key, and what travels in the spec string of a custom operator.

One item a node, operands first, separated by spaces; numbers in an item are the places of earlier items:
`s q_pos j sub:1,2 float:3 add:0,4` is s + float(q_pos - j). Linear in the number of distinct nodes.
"""

from __future__ import annotations

import functools

from kilat.symbolic.nodes import VARIABLES, Call, Const, Expr, Kind, Load, Var, nodes

_KINDS: dict[str, Kind] = {"b": "bool", "i": "int", "f": "float"}


def to_text(expr: Expr) -> str:
    """The one text of an expression: equal expressions have equal texts."""
    place: dict[Expr, int] = {}
    items: list[str] = []
    for node in nodes(expr):
        place[node] = len(items)
        inputs = ",".join(str(place[o]) for o in node.operands())
        if isinstance(node, Var):
            items.append(node.name)
        elif isinstance(node, Const):
            value = node.value
            items.append(f"={value.hex() if isinstance(value, float) else value}")
        elif isinstance(node, Load):
            items.append(f"[{node.kind[0]}{node.tensor}:{inputs}")
        elif isinstance(node, Call):
            items.append(f"{node.op}:{inputs}")
    return " ".join(items)


@functools.lru_cache(maxsize=1024)
def from_text(text: str) -> Expr:
    """The expression that `to_text` wrote; raises ValueError for any other text."""
    done: list[Expr] = []
    for item in text.split(" "):
        try:
            done.append(_parse(item, done))
        except (IndexError, KeyError, ValueError, TypeError) as error:
            raise ValueError(f"text must be an expression written by to_text; got {item!r} in {text!r}") from error
    return done[-1]


def _parse(item: str, done: list[Expr]) -> Expr:
    if item in VARIABLES:
        return Var(item)
    if item.startswith("="):
        return Const(_number(item[1:]))
    head, _, inputs = item.partition(":")
    operands = tuple(done[int(n)] for n in inputs.split(",") if n)
    if head.startswith("["):
        return Load(int(head[2:]), operands, _KINDS[head[1]])
    return Call(head, operands)


def _number(text: str) -> bool | int | float:
    if text in ("True", "False"):
        return text == "True"
    if text.lstrip("-").isdigit():
        return int(text)
    return float.fromhex(text)
