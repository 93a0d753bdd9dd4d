"""Kernel arguments: one array of int64 slots with names, written by Python and read by the kernel."""

from __future__ import annotations

import struct

from kilat.backends.cpu.emit import F32, F64, I32, I64, PTR, Function, Type, Value


class Params:
    """Named int64 slots. Python fills an array of `size` by `index[name]`; a kernel reads it by name from pointer p.

    Raises ValueError for a name given twice, and KeyError, while the kernel is written, for one that is not there.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.index = {n: i for i, n in enumerate(names)}
        self.size = len(names)
        if len(self.index) != self.size:
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"parameter names must differ; got {', '.join(twice)} more than once")

    def read(self, f: Function, p: Value, name: str) -> Value:
        """An int64 slot."""
        return f.load(I64, p, 8 * self.index[name])

    def pointer(self, f: Function, p: Value, name: str) -> Value:
        """An address."""
        return f.load(PTR, p, 8 * self.index[name])

    def floating(self, f: Function, p: Value, name: str, t: Type) -> Value:
        """A float slot, stored as `float_bits`, in the type that the kernel computes in: F32 or F64."""
        x = f.bitcast(self.read(f, p, name), F64)
        return x if t == F64 else f.cast("fptrunc", x, F32)

    def integer(self, f: Function, p: Value, name: str) -> Value:
        """The low 32 bits of a slot."""
        return f.cast("trunc", self.read(f, p, name), I32)


def float_bits(x: float) -> int:
    """A Python float as the int64 that `Params.floating` reads."""
    return struct.unpack("<q", struct.pack("<d", x))[0]
