"""Types and literals of the language in `emit`."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}
_FLOATS = ("half", "bfloat", "float", "double")


@dataclass(frozen=True)
class Type:
    """An LLVM type: an element, and a number of lanes (0 for a scalar)."""

    elem: str
    lanes: int = 0

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.elem}>" if self.lanes else self.elem

    @property
    def is_float(self) -> bool:
        return self.elem in _FLOATS

    @property
    def bits(self) -> int:
        """Width of the element; an integer may have any, as masks of 4 lanes that become an i4."""
        return _BITS.get(self.elem) or int(self.elem[1:])

    @property
    def bytes(self) -> int:
        """Size in memory of the whole value."""
        return max(self.lanes, 1) * (self.bits // 8)

    @property
    def scalar(self) -> Type:
        return Type(self.elem)

    @property
    def suffix(self) -> str:
        """The mangled name that overloaded intrinsics carry: v16f32, i64."""
        short = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}.get(self.elem, self.elem)
        return f"v{self.lanes}{short}" if self.lanes else short

    def vec(self, lanes: int) -> Type:
        return Type(self.elem, lanes)

    def like(self, elem: Type) -> Type:
        """The same number of lanes of another element."""
        return Type(elem.elem, self.lanes)


I1, I8, I16, I32, I64 = Type("i1"), Type("i8"), Type("i16"), Type("i32"), Type("i64")
F16, BF16, F32, F64 = Type("half"), Type("bfloat"), Type("float"), Type("double")
PTR, VOID = Type("ptr"), Type("void")


def _round_to_bfloat(x: float) -> int:
    """The bits of the bfloat16 nearest to x, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    if x != x:
        return bits >> 16 | 0x40  # quiet, and never an infinity
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def literal(x: int | float, elem: Type) -> str:
    """How a number is written in LLVM IR; floats are hexadecimal, so exact.

    Raises TypeError for a fraction given as an integer, OverflowError for a number that elem cannot hold.
    """
    if elem.elem == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', x))[0]:04X}"
    if elem.elem == "bfloat":
        return f"0xR{_round_to_bfloat(float(x)):04X}"
    if elem.elem == "float":
        x = struct.unpack("<f", struct.pack("<f", x))[0]
    if elem.is_float:
        return f"0x{struct.unpack('<Q', struct.pack('<d', float(x)))[0]:016X}"
    if elem.elem == "ptr":
        if x != 0:
            raise TypeError(f"the only literal pointer is 0; got {x}")
        return "null"
    if x != int(x):
        raise TypeError(f"a literal of type {elem} must be an integer; got {x}")
    bits, x = elem.bits, int(x)
    if not -(1 << bits - 1) <= x < 1 << bits:
        raise OverflowError(f"a literal of type {elem} must fit in {bits} bits; got {x}")
    return str(x)
