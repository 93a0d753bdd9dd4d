"""Traced expressions to IR values at one vector of a tile; the meaning of every operation is `symbolic.evaluate`'s."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kilat.backends.cpu.emit import F32, F64, I1, I8, I16, I32, I64, PTR, Function, Type, Value
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.math import absolute, exp_full, log, sqrt, tanh
from kilat.backends.cpu.tiles_scores import to_compute
from kilat.symbolic import Call, Const, Expr, Load, Var, nodes

MAX_AXES = 4
"""Axes of a tensor that a user function may index."""

_ELEMENT = {
    "float32": F32, "float64": F64, "float16": I16, "bfloat16": I16, "bool": I8,
    "int8": I8, "uint8": I8, "int16": I16, "int32": I32, "int64": I64,
}  # fmt: skip
"""How elements are loaded, by the name of their type."""

_RECORD_BYTES = 8 * (2 + 3 * MAX_AXES)
_SIZE, _STRIDE = 8, 8 * (1 + MAX_AXES)


def check_dtypes(exprs: Sequence[Expr], dtypes: Sequence[str]) -> None:
    """Raises TypeError for a type that cannot be loaded, ValueError for a tensor or an axis that is not there."""
    for n, name in enumerate(dtypes):
        if name not in _ELEMENT:
            raise TypeError(f"tensors[{n}] must have one of the types {', '.join(_ELEMENT)}; got {name}")
    for node in nodes(*exprs):
        if isinstance(node, Load) and (node.tensor >= len(dtypes) or len(node.indices) > MAX_AXES):
            raise ValueError(f"an expression must index {len(dtypes)} tensors of at most {MAX_AXES} axes; got {node!r}")


class Translator:
    """Values of expressions at one vector of pairs; each node is emitted once, scalar if its operands are."""

    def __init__(
        self,
        f: Function,
        variables: Mapping[str, Value],
        records: Value,
        dtypes: Sequence[str],
        floats: Type,
        lanes: int,
        isa: Isa,
    ) -> None:
        self.f, self.variables, self.records, self.dtypes = f, variables, records, dtypes
        self.floats, self.lanes, self.isa = floats, lanes, isa
        self.done: dict[Expr, Value] = {}

    def vector(self, expr: Expr) -> Value:
        """The value in all lanes."""
        for node in nodes(expr):
            if node not in self.done:
                self.done[node] = self._node(node)
        return self._spread(self.done[expr])

    def floating(self, expr: Expr) -> Value:
        """The value in all lanes as floats, whatever its kind."""
        x = self.vector(expr)
        if expr.kind == "float":
            return x
        return self.f.cast("uitofp" if expr.kind == "bool" else "sitofp", x, x.type.like(self.floats))

    def offsets(self, load: Load, strides_at: int) -> Value:
        """Bytes from the start of a tensor (or of its gradient) to the elements that a load reads, in all lanes."""
        for index in load.indices:
            self.vector(index)
        return self._spread(self._offset(load, strides_at))

    def _spread(self, x: Value) -> Value:
        return x if x.type.lanes else self.f.splat(x, self.lanes)

    def _together(self, args: Sequence[Value]) -> list[Value]:
        """Scalars spread to lanes if any argument has lanes."""
        return [self._spread(a) for a in args] if any(a.type.lanes for a in args) else list(args)

    def _node(self, node: Expr) -> Value:
        if isinstance(node, Var):
            return self.variables[node.name]
        if isinstance(node, Const):
            return self._constant(node)
        if isinstance(node, Load):
            return self._load(node)
        if isinstance(node, Call):
            return self._call(node, self._together([self.done[a] for a in node.args]))
        raise TypeError(f"cannot compile {node!r}")

    def _constant(self, node: Const) -> Value:
        value = node.value
        if node.kind == "float" and self.floats == F32 and abs(value) > float.fromhex("0x1.ffffffp+127"):
            value = math.copysign(math.inf, value)  # as NumPy rounds it; packing would raise
        return self.f.const(value, {"bool": I1, "int": I32, "float": self.floats}[node.kind])

    # ---- tensors -------------------------------------------------------------------------------------------------
    def _offset(self, node: Load, strides_at: int) -> Value:
        """Each index is clamped to its axis, so no value of it leads outside the tensor."""
        f = self.f
        record = self.records.at(node.tensor * _RECORD_BYTES)
        total = f.const(0, I64)
        for axis, index in enumerate(self._together([self.done[i] for i in node.indices])):
            last = f.cast("trunc", f.load(I64, record, _SIZE + 8 * axis) - 1, I32)
            inside = f.maximum(f.minimum(index, last), 0)
            wide = f.cast("sext", inside, index.type.like(I64))
            part = wide * f.load(I64, record, strides_at + 8 * axis)
            total = part + total if part.type.lanes else total + part
        return total

    def _load(self, node: Load) -> Value:
        f, name = self.f, self.dtypes[node.tensor]
        elem = _ELEMENT[name]
        base = f.load(PTR, self.records, node.tensor * _RECORD_BYTES)
        offset = self._offset(node, _STRIDE)
        if not offset.type.lanes:
            x = f.load(elem, base, offset)
        else:
            pointers = Type("ptr", self.lanes)
            at = f.emit_value(f"getelementptr i8, ptr {base.name}, {offset.type} {offset.name}", pointers)
            t = elem.vec(self.lanes)
            every, nothing = f.const(1, I1.vec(self.lanes)), f.const(0, t)
            gather = f"llvm.masked.gather.{t.suffix}.v{self.lanes}p0"
            x = f.intrinsic(gather, t, at, f.const(elem.bytes, I32), every, nothing)
        if node.kind == "float":
            return to_compute(f, x, name, self.floats, self.isa)
        return x.ne(0) if node.kind == "bool" else self._integer(x, name)

    def _integer(self, x: Value, name: str) -> Value:
        """An element as int32; an int64 outside its range becomes the nearest end of it."""
        f, t = self.f, x.type.like(I32)
        if name == "int64":
            return f.cast("trunc", f.maximum(f.minimum(x, 2**31 - 1), -(2**31)), t)
        return f.cast("zext" if name == "uint8" else "sext", x, t)

    # ---- operations ----------------------------------------------------------------------------------------------
    def _call(self, node: Call, args: Sequence[Value]) -> Value:
        f, op, a = self.f, node.op, args[0]
        b = args[1] if len(args) > 1 else a
        if op in ("floordiv", "mod"):
            divide = self._divide_floats if node.kind == "float" else self._divide_integers
            return divide(a, b)[op == "mod"]
        if op == "where":
            return f.select(a, b, args[2])
        if op == "float":
            return f.cast("sitofp" if node.args[0].kind == "int" else "uitofp", a, a.type.like(self.floats))
        if op == "int":
            return f.cast("zext", a, a.type.like(I32))
        if op in _FUNCTIONS:
            return _FUNCTIONS[op](f, a)
        return _OPERATORS[op](f, a, b)

    def _divide_integers(self, a: Value, b: Value) -> tuple[Value, Value]:
        """(floor of a / b, remainder with b's sign); both 0 for b = 0, which in hardware would trap, as -2^31 / -1."""
        f = self.f
        by_zero, by_minus_one = b.eq(0), b.eq(-1)
        safe = f.select(by_zero | by_minus_one, 1, b)
        quotient = f.fdiv(a, safe)
        remainder = a - quotient * safe
        quotient = f.select(by_zero, 0, f.select(by_minus_one, -a, quotient))
        return quotient, f.select(by_zero | by_minus_one, 0, remainder)

    def _divide_floats(self, a: Value, b: Value) -> tuple[Value, Value]:
        """(floor of a / b, a - b floor(a / b)); the rounded quotient may be one off, which its remainder shows."""
        f = self.f
        quotient = floor(f, a / b)
        remainder = f.fma(-quotient, b, a)
        low = (remainder < 0.0) & (b > 0.0) | (remainder > 0.0) & (b < 0.0)
        high = absolute(f, remainder) >= absolute(f, b)
        quotient = f.select(low, quotient - 1.0, f.select(high, quotient + 1.0, quotient))
        remainder = f.select(low, remainder + b, f.select(high, remainder - b, remainder))
        return quotient, remainder


def floor(f: Function, x: Value) -> Value:
    """Round down without the instruction that the baseline lacks; numbers from 2^mantissa up are whole already."""
    single = x.type.elem == "float"
    integer = x.type.like(I32 if single else I64)
    small = absolute(f, x) < 2.0 ** (23 if single else 52)
    safe = f.select(small, x, 0.0)
    whole = f.cast("sitofp", f.cast("fptosi", safe, integer), x.type)
    whole = f.select(whole > safe, whole - 1.0, whole)
    return f.select(small, whole, x)


_FUNCTIONS = {
    "exp": exp_full,
    "log": log,
    "tanh": tanh,
    "sqrt": sqrt,
    "abs": absolute,
    "neg": lambda f, a: -a,
    "not": lambda f, a: ~a,
}
_OPERATORS = {
    "add": lambda f, a, b: a + b,
    "sub": lambda f, a, b: a - b,
    "mul": lambda f, a, b: a * b,
    "div": lambda f, a, b: a / b,
    "min": lambda f, a, b: f.minimum(a, b),
    "max": lambda f, a, b: f.maximum(a, b),
    "and": lambda f, a, b: a & b,
    "or": lambda f, a, b: a | b,
    "lt": lambda f, a, b: a < b,
    "le": lambda f, a, b: a <= b,
    "gt": lambda f, a, b: a > b,
    "ge": lambda f, a, b: a >= b,
    "eq": lambda f, a, b: a.eq(b),
    "ne": lambda f, a, b: a.ne(b),
}
