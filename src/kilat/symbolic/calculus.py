"""Derivatives of expressions with respect to the score or to elements of tensors.

Subgradients at kinks: 0 for abs at 0; where operands of minimum and maximum tie, the second one's.
"""

from __future__ import annotations

from kilat.symbolic.nodes import Call, Const, Expr, Load, Var, nodes
from kilat.symbolic.text import from_text, to_text

_ZERO, _ONE = Const(0.0), Const(1.0)


def derivative(expr: Expr, name: str = "s") -> Expr:
    """d expr / d name; raises TypeError where the expression takes a floor or a remainder of that variable."""
    return _derive(expr, Var(name))


def derivative_to_text(text: str) -> str:
    """`derivative` by the score, from text to text; may be called while torch.compile traces the caller."""
    return to_text(derivative(from_text(text)))


derivative_to_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see trace.py


def partial_load(expr: Expr) -> list[tuple[Load, Expr]]:
    """(load, d expr / d load) for every element of a float tensor that the expression reads, in order of appearance."""
    loads = [n for n in nodes(expr) if isinstance(n, Load) and n.kind == "float"]
    return [(load, _derive(expr, load)) for load in loads]


def _derive(expr: Expr, by: Expr) -> Expr:
    if expr.kind != "float":
        return _ZERO
    done: dict[Expr, Expr] = {}
    for node in nodes(expr):
        if node is by:
            done[node] = _ONE
        elif isinstance(node, Call) and node.kind == "float":
            done[node] = _chain(node, [done[a] for a in node.args])
        else:  # constants, other variables and loads, ints, bools
            done[node] = _ZERO
    return done[expr]


def _chain(node: Call, d: list[Expr]) -> Expr:
    """The derivative of one operation, given those of its operands."""
    op, args = node.op, node.args
    if op == "where":
        return _where(args[0], d[1], d[2])
    if all(x is _ZERO for x in d):
        return _ZERO
    if op in ("floordiv", "mod"):
        raise TypeError(f"{op} of the score or of a float tensor has no useful derivative; give derivative=")
    if op == "add":
        return _add(d[0], d[1])
    if op == "sub":
        return _add(d[0], _neg(d[1]))
    if op == "neg":
        return _neg(d[0])
    if op == "mul":
        return _add(_mul(d[0], args[1]), _mul(args[0], d[1]))
    if op == "div":
        return _add(_div(d[0], args[1]), _neg(_mul(node, _div(d[1], args[1]))))
    if op in ("min", "max"):
        return _where(Call("lt" if op == "min" else "gt", args), d[0], d[1])
    x = args[0]
    if op == "abs":
        negative, positive = Call("lt", (x, _ZERO)), Call("gt", (x, _ZERO))
        return _where(positive, d[0], _where(negative, _neg(d[0]), _ZERO))
    if op == "exp":
        return _mul(node, d[0])
    if op == "log":
        return _div(d[0], x)
    if op == "tanh":
        return _mul(Call("sub", (_ONE, Call("mul", (node, node)))), d[0])
    if op == "sqrt":
        return _div(d[0], Call("mul", (Const(2.0), node)))
    raise TypeError(f"no derivative is known for {op}")


def _add(a: Expr, b: Expr) -> Expr:
    if a is _ZERO:
        return b
    if b is _ZERO:
        return a
    return Call("add", (a, b))


def _mul(a: Expr, b: Expr) -> Expr:
    if a is _ZERO or b is _ZERO:
        return _ZERO
    if a is _ONE:
        return b
    if b is _ONE:
        return a
    return Call("mul", (a, b))


def _div(a: Expr, b: Expr) -> Expr:
    return a if a is _ZERO or b is _ONE else Call("div", (a, b))


def _neg(a: Expr) -> Expr:
    if isinstance(a, Const):
        return a if a is _ZERO else Const(-a.value)
    if isinstance(a, Call) and a.op == "neg":
        return a.args[0]
    return Call("neg", (a,))


def _where(condition: Expr, a: Expr, b: Expr) -> Expr:
    return a if a is b else Call("where", (condition, a, b))
