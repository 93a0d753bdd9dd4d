"""Expressions evaluated on arrays, with NumPy or torch: the meaning that compiled functions are tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from kilat.symbolic.nodes import Call, Const, Expr, Load, Var, nodes


def evaluate(expr: Expr, env: Mapping[str, Any], tensors: Sequence[Any] = (), xp: Any = np, dtype: Any = None) -> Any:
    """The value of an expression for arrays `env[name]` that broadcast, by the functions of `xp` (numpy or torch).

    Floats are computed in `dtype`: the type of env["s"] if None, float64 if there is no score. torch keeps gradients.
    """
    if dtype is None:
        dtype = env["s"].dtype if hasattr(env.get("s"), "dtype") else xp.float64
    functions = _Numpy(dtype) if xp is np else _Torch(xp, dtype)
    value: dict[Expr, Any] = {}
    with np.errstate(all="ignore") if xp is np else nullcontext():
        for node in nodes(expr):
            if isinstance(node, Var):
                value[node] = functions.array(env[node.name], node.kind)
            elif isinstance(node, Const):
                value[node] = functions.array(node.value, node.kind)
            elif isinstance(node, Load):
                value[node] = functions.load(tensors[node.tensor], [value[i] for i in node.indices], node.kind)
            elif isinstance(node, Call):
                value[node] = functions.call(node, [value[a] for a in node.args])
    return value[expr]


class _Numpy:
    """Operations on NumPy arrays."""

    xp: Any = np

    def __init__(self, dtype: Any) -> None:
        self.dtypes = {"float": dtype, "int": self.xp.int64, "bool": self.xp.bool_}

    def array(self, x: Any, kind: str) -> Any:
        return np.asarray(x, dtype=self.dtypes[kind])

    def load(self, tensor: Any, indices: list[Any], kind: str) -> Any:
        tensor = np.asarray(tensor)
        clamped = tuple(np.clip(i, 0, n - 1) for i, n in zip(indices, tensor.shape, strict=True))
        return self.array(tensor[clamped], kind)

    def call(self, node: Call, args: list[Any]) -> Any:
        xp, op = self.xp, node.op
        if op in ("int", "float"):
            return self.array(args[0], op)
        if op in ("floordiv", "mod"):
            function = xp.floor_divide if op == "floordiv" else xp.remainder
            if node.kind == "float":
                return function(*args)
            by_zero = args[1] == 0
            quotient = function(args[0], xp.where(by_zero, xp.ones_like(args[1]), args[1]))
            return xp.where(by_zero, xp.zeros_like(quotient), quotient)
        if op == "eq":
            return args[0] == args[1]
        if op in ("and", "or", "not"):
            return getattr(xp, f"bitwise_{op}")(*args)
        return getattr(xp, _FUNCTION.get(op, op))(*args)


class _Torch(_Numpy):
    """Operations on torch tensors; `torch` is handed in, never imported here."""

    def __init__(self, torch: Any, dtype: Any) -> None:
        self.xp = torch
        self.dtypes = {"float": dtype, "int": torch.int64, "bool": torch.bool}

    def array(self, x: Any, kind: str) -> Any:
        # Where torch has a default device, as_tensor would move tensors there; numbers on the CPU go with any device.
        return self.xp.as_tensor(x, dtype=self.dtypes[kind], device=getattr(x, "device", "cpu"))

    def load(self, tensor: Any, indices: list[Any], kind: str) -> Any:
        device = tensor.device
        clamped = tuple(i.clamp(0, n - 1).to(device) for i, n in zip(indices, tensor.shape, strict=True))
        return self.array(tensor[clamped] if clamped else tensor, kind)


_FUNCTION: Mapping[str, str] = {
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "neg": "negative",
    "min": "minimum",
    "max": "maximum",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "ne": "not_equal",
}
"""Names in both libraries, where they are not our own; torch.equal is not elementwise, so eq is spelled by ==."""
