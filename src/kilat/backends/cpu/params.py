"""Kernel arguments: one array of int64 slots with names, written by Python and read by the kernel."""

from __future__ import annotations

import struct

from kilat.backends.cpu.emit import F32, F64, I32, I64, PTR, Function, Type, Value


class Params:
    """Named int64 slots. Python fills an array by `index`; a kernel reads them by `read` and friends."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.index = {n: i for i, n in enumerate(names)}
        self.size = len(names)

    def read(self, f: Function, p: Value, name: str) -> Value:
        return f.load(I64, p, 8 * self.index[name])

    def pointer(self, f: Function, p: Value, name: str) -> Value:
        return f.load(PTR, p, 8 * self.index[name])

    def floating(self, f: Function, p: Value, name: str, t: Type) -> Value:
        """A float slot, stored as the bits of a double, in the type that the kernel computes in."""
        x = f.bitcast(self.read(f, p, name), F64)
        return x if t == F64 else f.cast("fptrunc", x, F32)

    def integer(self, f: Function, p: Value, name: str) -> Value:
        return f.cast("trunc", self.read(f, p, name), I32)


def float_bits(x: float) -> int:
    """A Python float as the int64 that `Params.floating` reads."""
    return struct.unpack("<q", struct.pack("<d", x))[0]
