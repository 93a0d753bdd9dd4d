"""Values and variables of the language in `emit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from kilat.backends.cpu.emit_types import I64, PTR, Type

if TYPE_CHECKING:
    from kilat.backends.cpu.emit import Function

Operand = Union["Value", int, float]
"""What an operator takes beside a value: a value, or a number that becomes a constant of its type."""


@dataclass(frozen=True, eq=False)
class Value:
    """One SSA value: its function, its name and its type."""

    f: Function
    name: str
    type: Type

    def __bool__(self) -> bool:
        raise TypeError("a Value is known only when the kernel runs; branch with `f.when` or `f.select`")

    def _op(self, float_op: str, int_op: str, other: Operand, reverse: bool = False) -> Value:
        op = float_op if self.type.is_float else int_op
        if not op:
            raise TypeError(f"operator not defined for {self.type}")
        a, b = self, self.f.coerce(other, self.type)
        return self.f.binary(op, b, a) if reverse else self.f.binary(op, a, b)

    def __add__(self, o: Operand) -> Value:
        return self._op("fadd", "add", o)

    def __radd__(self, o: Operand) -> Value:
        return self._op("fadd", "add", o, True)

    def __sub__(self, o: Operand) -> Value:
        return self._op("fsub", "sub", o)

    def __rsub__(self, o: Operand) -> Value:
        return self._op("fsub", "sub", o, True)

    def __mul__(self, o: Operand) -> Value:
        return self._op("fmul", "mul", o)

    def __rmul__(self, o: Operand) -> Value:
        return self._op("fmul", "mul", o, True)

    def __truediv__(self, o: Operand) -> Value:
        return self._op("fdiv", "", o)

    def __rtruediv__(self, o: Operand) -> Value:
        return self._op("fdiv", "", o, True)

    def __floordiv__(self, o: Operand) -> Value:
        return self._op("", "sdiv", o)

    def __mod__(self, o: Operand) -> Value:
        return self._op("", "srem", o)

    def __rfloordiv__(self, o: Operand) -> Value:
        return self._op("", "sdiv", o, True)

    def __rmod__(self, o: Operand) -> Value:
        return self._op("", "srem", o, True)

    def __and__(self, o: Operand) -> Value:
        return self._op("", "and", o)

    def __or__(self, o: Operand) -> Value:
        return self._op("", "or", o)

    def __xor__(self, o: Operand) -> Value:
        return self._op("", "xor", o)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lshift__(self, o: Operand) -> Value:
        return self._op("", "shl", o)

    def __rshift__(self, o: Operand) -> Value:
        """Logical shift; `ashr` keeps the sign."""
        return self._op("", "lshr", o)

    def ashr(self, o: Operand) -> Value:
        """Arithmetic shift: floor division by 2**o."""
        return self._op("", "ashr", o)

    def __neg__(self) -> Value:
        return self.f.negate(self)

    def __invert__(self) -> Value:
        return self ^ -1

    def _cmp(self, float_op: str, int_op: str, other: Operand) -> Value:
        op = float_op if self.type.is_float else int_op
        if not op:
            raise TypeError(f"comparison not defined for {self.type}")
        return self.f.compare(op, self, self.f.coerce(other, self.type))

    def __lt__(self, o: Operand) -> Value:
        return self._cmp("fcmp olt", "icmp slt", o)

    def __le__(self, o: Operand) -> Value:
        return self._cmp("fcmp ole", "icmp sle", o)

    def __gt__(self, o: Operand) -> Value:
        return self._cmp("fcmp ogt", "icmp sgt", o)

    def __ge__(self, o: Operand) -> Value:
        return self._cmp("fcmp oge", "icmp sge", o)

    def eq(self, o: Operand) -> Value:
        """Equal; `==` compares the Python objects."""
        return self._cmp("fcmp oeq", "icmp eq", o)

    def ne(self, o: Operand) -> Value:
        """Not equal; true for NaN."""
        return self._cmp("fcmp une", "icmp ne", o)

    def ult(self, o: Operand) -> Value:
        """Less than, both read as unsigned."""
        return self._cmp("", "icmp ult", o)

    def uge(self, o: Operand) -> Value:
        """Not less than, both read as unsigned."""
        return self._cmp("", "icmp uge", o)

    def at(self, offset: Operand) -> Value:
        """The pointer `offset` bytes further on."""
        if isinstance(offset, int) and offset == 0:
            return self
        o = self.f.coerce(offset, I64)
        return self.f.emit_value(f"getelementptr i8, ptr {self.name}, i64 {o.name}", PTR)


class Var:
    """A mutable variable; an alloca in the entry block that LLVM promotes to a register."""

    def __init__(self, f: Function, t: Type, init: Operand | None = None) -> None:
        self.f, self.type = f, t
        self.name = f.fresh("var")
        f.allocas.append(f"  {self.name} = alloca {t}, align 64")
        if init is not None:
            self.set(init)

    def get(self) -> Value:
        """The value now, as a `Value` that later `set`s do not change."""
        return self.f.emit_value(f"load {self.type}, ptr {self.name}", self.type)

    def set(self, x: Operand) -> None:
        """Assign."""
        v = self.f.coerce(x, self.type)
        self.f.emit(f"store {self.type} {v.name}, ptr {self.name}")

    def add(self, x: Operand) -> None:
        """Add to it."""
        self.set(self.get() + x)
