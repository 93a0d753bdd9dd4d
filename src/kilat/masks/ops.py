"""The functions that `kv_start` and `kv_stop` may call besides + - *.

They work on ints, NumPy arrays and traced values. A backend that compiles masks into its DSL uses `rebind` to give the
same functions other meanings of these names.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kilat.math import maximum, minimum
from kilat.symbolic import SymbolicTensor

__all__ = ["fdiv", "lookup", "maximum", "minimum", "rebind"]


def fdiv(a: Any, b: Any) -> Any:
    """a / b rounded down; a name of its own because // rounds toward zero in LLVM and Triton."""
    return a // b


def lookup(table: Any, index: Any) -> Any:
    """table[index], with the index clamped to the table."""
    if isinstance(table, SymbolicTensor):
        return table[index]
    return np.take(table, index, mode="clip")


def rebind(fn: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of a plain function that finds `names` (fdiv, minimum, maximum, lookup) before its own globals."""
    if not isinstance(fn, types.FunctionType):
        raise TypeError(f"kv_start and kv_stop must be plain functions; got {fn!r}")
    return types.FunctionType(fn.__code__, {**fn.__globals__, **names}, fn.__name__, fn.__defaults__, fn.__closure__)
