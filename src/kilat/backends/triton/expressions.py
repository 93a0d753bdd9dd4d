"""User functions (`Predicate`, `Score`): traced expressions written as Triton source, compiled with the kernel.

A function made here is f(s, b, h, q_pos, j, tables): s is a tile of float32 scores (unused by predicates), b and h
are scalars, q_pos and j int32 and broadcast to the tile, tables a tuple of `Table`. It returns a tile.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from kilat.backends.triton import tiles_user
from kilat.backends.triton.arguments import Jitted
from kilat.symbolic import Call, Const, Expr, Load, Var, nodes, to_text

_BINARY = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "min": "tl.where({0} < {1}, {0}, {1})",
    "max": "tl.where({0} > {1}, {0}, {1})",
    "where": "tl.where({0}, {1}, {2})",
    "neg": "-{0}",
    "not": "~{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt({0})",
    "tanh": "tanh({0})",
    "int": "{0}.to(tl.int32)",
}
"""Operations that read the same for every kind."""

_GLOBALS = {
    "tl": tl,
    "tanh": tiles_user.tanh,
    "floordiv_int": tiles_user.floordiv_int,
    "mod_int": tiles_user.mod_int,
    "floordiv_float": tiles_user.floordiv_float,
    "mod_float": tiles_user.mod_float,
}

_made: dict[str, Jitted] = {}


def predicate_function(expr: Expr) -> Jitted:
    """The visibility of a tile: bool. Floats in it are float64, as on the CPU."""
    return _function("predicate", (expr,), "tl.float64")


def score_function(expr: Expr) -> Jitted:
    """Scores, or a derivative by s: float32."""
    return _function("score", (expr,), "tl.float32")


def tuple_function(exprs: Sequence[Expr]) -> Jitted:
    """Several float or int expressions at once, as a tuple of tiles."""
    return _function("values", tuple(exprs), "tl.float32")


def name_of(function: Jitted) -> str:
    """The name of a function made here: it holds a digest of the function's source."""
    return function.__name__


def source(kind: str, exprs: tuple[Expr, ...], floats: str) -> tuple[str, str]:
    """(name, source text) of a function."""
    body = _body(exprs, floats)
    digest = hashlib.sha256(f"{kind} {floats} {[to_text(e) for e in exprs]} {body}".encode()).hexdigest()[:20]
    name = f"{kind}_{digest}"
    return name, f"def {name}(s, b, h, q_pos, j, tables):\n" + "".join(f"    {line}\n" for line in body)


def _function(kind: str, exprs: tuple[Expr, ...], floats: str) -> Jitted:
    name, text = source(kind, exprs, floats)
    function = _made.get(name)
    if function is None:
        file = f"<kilat {name}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # Triton reads the source
        scope: dict[str, Any] = dict(_GLOBALS, __name__=__name__)
        exec(compile(text, file, "exec"), scope)
        function = _made.setdefault(name, triton.jit(scope[name]))
    return function


def _body(exprs: tuple[Expr, ...], floats: str) -> list[str]:
    """One line a node, operands first."""
    names: dict[Expr, str] = {}
    lines = ["zero = q_pos * 0 + j * 0"]
    for node in nodes(*exprs):
        if isinstance(node, Var):
            names[node] = node.name
            continue
        names[node] = f"x{len(names)}"
        lines.append(f"{names[node]} = {_value(node, names, floats)}")
    results = [_spread(names[e], e, floats) for e in exprs]
    result = results[0] if len(exprs) == 1 else f"({', '.join(results)},)"
    return [*lines, f"return {result}"]


def _spread(name: str, expr: Expr, floats: str) -> str:
    """A value with the tile's shape, which it may not have: constants, functions of one index."""
    if expr.kind == "bool":
        return f"{name} & (zero == 0)"
    return f"{name} + zero.to({floats})" if expr.kind == "float" else f"{name} + zero"


def _value(node: Expr, names: dict[Expr, str], floats: str) -> str:
    if isinstance(node, Const):
        return _constant(node.value, floats)
    if isinstance(node, Load):
        return _load(node, names, floats)
    if not isinstance(node, Call):
        raise TypeError(f"node must be a Const, Load or Call; got {node!r}")
    args = [names[a] for a in node.args]
    if node.op in ("floordiv", "mod"):
        return f"{node.op}_{node.kind}({args[0]}, {args[1]})"
    if node.op == "float":
        return f"{args[0]}.to({floats})"
    return _BINARY[node.op].format(*args)


def _constant(value: bool | int | float, floats: str) -> str:
    """A scalar tensor, so that every operation on it is Triton's and not Python's."""
    if isinstance(value, bool):
        return f"zero {'==' if value else '!='} 0"
    if isinstance(value, int):
        return f"tl.full((), {value}, tl.int32)"
    text = repr(value) if math.isfinite(value) else f'float("{value}")'
    return f"tl.full((), {text}, {floats})"


def _load(node: Load, names: dict[Expr, str], floats: str) -> str:
    """An element: every index clamped, so that none reaches outside."""
    table = f"tables[{node.tensor}]"
    offsets = [
        f"tl.minimum(tl.maximum({names[index]}, 0), {table}.sizes[{axis}] - 1).to(tl.int64) * {table}.strides[{axis}]"
        for axis, index in enumerate(node.indices)
    ]
    where = " + ".join([f"{table}.ptr", *offsets])
    if node.kind == "bool":
        return f"tl.load({where}) != 0"
    return f"tl.load({where}).to({floats if node.kind == 'float' else 'tl.int32'})"
