"""Functions for masks and scores: traced in user functions, and the same functions on numbers, arrays and tensors.

kilat.Score(lambda s, b, h, q_pos, j: kilat.math.where(q_pos - j > 64, s - 1.0, s))
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kilat.symbolic.trace import Traced, apply

__all__ = ["abs", "exp", "log", "maximum", "minimum", "sqrt", "tanh", "where"]


def _call(op: str, name: str, *operands: Any) -> Any:
    """`op` if a value is traced, else the function of that name in torch (if a value is a tensor) or NumPy."""
    if any(isinstance(x, Traced) for x in operands):
        return apply(op, *operands)
    torch = sys.modules.get("torch")
    tensors = [x for x in operands if torch is not None and isinstance(x, torch.Tensor)]
    if torch is not None and tensors:
        device = tensors[0].device
        return getattr(torch, name)(*(torch.as_tensor(x, device=device) for x in operands))
    return getattr(np, name)(*operands)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, b elsewhere."""
    if isinstance(condition, (bool, np.bool_)):
        return a if condition else b
    return _call("where", "where", condition, a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two values."""
    if isinstance(a, int) and isinstance(b, int):
        return a if a < b else b
    return _call("min", "minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two values."""
    if isinstance(a, int) and isinstance(b, int):
        return a if a > b else b
    return _call("max", "maximum", a, b)


def abs(x: Any) -> Any:
    """The absolute value."""
    return _call("abs", "abs", x)


def exp(x: Any) -> Any:
    """e to the power of x."""
    return _call("exp", "exp", x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return _call("log", "log", x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _call("tanh", "tanh", x)


def sqrt(x: Any) -> Any:
    """The square root."""
    return _call("sqrt", "sqrt", x)
