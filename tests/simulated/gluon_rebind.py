"""Plain Python functions out of gluon.jit functions, with stand-ins for the names they use."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from simulated.gluon_values import I32

SEEDS = 60
"""Draws of delays in which a planted bug must show: a missing wait shows in one of three, so all 60 miss it never."""


def _record(cls: Any) -> Callable[..., types.SimpleNamespace]:
    """What stands for an aggregate: its constructor takes the fields in order."""
    init = cls.hash_attrs[0]  # Triton 3.6 and 3.7 keep nothing else of the class
    fields = list(inspect.signature(getattr(init, "fn", init)).parameters)[1:]
    return lambda *values: types.SimpleNamespace(**dict(zip(fields, values, strict=True)))


class Rebinder:
    """Copies of jit functions whose globals are the stand-ins, module by module."""

    def __init__(self, stand_ins: dict[str, Any], also: dict[str, Any]) -> None:
        self.stand_ins, self.also = stand_ins, also
        self.known: dict[int, dict[str, Any]] = {}

    def globals_of(self, origin: dict[str, Any]) -> dict[str, Any]:
        made = self.known.get(id(origin))
        if made is None:
            made = self.known[id(origin)] = {}
            made.update({name: self.bind(value) for name, value in origin.items()})
            made.update({name: value for name, value in self.stand_ins.items() if name in origin})
            made["range"] = lambda *bounds: (I32(i) for i in range(*bounds))
            made.update({name: value for name, value in self.also.items() if name in origin})
        return made

    def bind(self, value: Any) -> Any:
        function = getattr(value, "fn", None)
        if isinstance(function, types.FunctionType):  # a jit function
            bound = self.globals_of(function.__globals__)
            return types.FunctionType(function.__code__, bound, function.__name__, function.__defaults__)
        if type(value).__name__ == "constexpr":
            return value.value
        if getattr(value, "__triton_aggregate__", False):
            return _record(value)
        return value
