"""Expressions of user functions: traced once, differentiated, evaluated on arrays, written as text.

The lowest layer: it knows neither masks nor torch nor a compiler. A compiler walks `nodes(expr)`, which lists every
node once, operands first.
"""

from kilat.symbolic.calculus import derivative, derivative_to_text, partial_load
from kilat.symbolic.evaluate import evaluate
from kilat.symbolic.nodes import VARIABLES, Call, Const, Expr, Kind, Load, Var, nodes, substitute
from kilat.symbolic.text import from_text, to_text
from kilat.symbolic.trace import SymbolicTensor, Traced, trace, trace_to_text

__all__ = [
    "VARIABLES",
    "Call",
    "Const",
    "Expr",
    "Kind",
    "Load",
    "SymbolicTensor",
    "Traced",
    "Var",
    "derivative",
    "derivative_to_text",
    "evaluate",
    "from_text",
    "nodes",
    "partial_load",
    "substitute",
    "to_text",
    "trace",
    "trace_to_text",
]
