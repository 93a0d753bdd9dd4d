"""The one microkernel of the FMA kernels, and how wide it is on each instruction set.

    acc[i][v] += sum_k A_i[k] * B[k][v]          A_i[k] scalars at a byte step, B[k] vectors at a byte step

Accumulators live in registers (mr * nv of them), k is unrolled by four. 4 x 4 vectors on AVX-512 leaves 12 registers
for operands; 4 x 3 on AVX2 was faster than 6 x 2 and 4 x 2 (measured on Zen 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilat.backends.cpu.emit import I64, Function, Operand, Type, Value, Var

UNROLL = 4


@dataclass(frozen=True)
class Blocking:
    """Register block: mr rows by nv vectors of `lanes` elements; a score tile is `vectors` wide (a multiple of nv)."""

    compute: Type
    lanes: int
    mr: int
    nv: int
    vectors: int


def blocking(lanes32: int, compute: Type) -> Blocking:
    """The blocking for an instruction set with `lanes32` float32 lanes."""
    lanes = lanes32 * 4 // compute.bytes
    if lanes32 == 16:
        return Blocking(compute, lanes, 4, 4, 4)
    return Blocking(compute, lanes, 4, 3, 6) if lanes32 == 8 else Blocking(compute, lanes, 4, 2, 4)


def accumulators(f: Function, t: Type, rows: int, vectors: int) -> list[list[Var]]:
    """rows x vectors variables of type t, all zero."""
    return [[f.var(t, 0.0) for _ in range(vectors)] for _ in range(rows)]


def multiply(
    f: Function, acc: Sequence[Sequence[Var]], a: Sequence[Value], a_step: Operand, b: Value, b_step: Operand, k: Value
) -> None:
    """acc[i][v] += A_i[k] * B[k][v] for all k; a holds one pointer a row."""
    vec = acc[0][0].type

    def steps(k0: Value, count: int) -> None:
        for u in range(count):
            kk = k0 + u if u else k0
            row, at = b.at(kk * b_step), kk * a_step
            bs = [f.load(vec, row, v * vec.bytes) for v in range(len(acc[0]))]
            for i, pointer in enumerate(a):
                x = f.splat(f.load(vec.scalar, pointer, at), vec.lanes)
                for v, y in enumerate(bs):
                    acc[i][v].set(f.fma(x, y, acc[i][v].get()))

    whole = k & -UNROLL
    with f.range(0, whole, UNROLL) as k0:
        steps(k0, UNROLL)
    with f.range(whole, k) as k0:
        steps(k0, 1)


def clamp_rows(f: Function, base: Value, first: Value, count: int, last: Value, pitch: Operand) -> list[Value]:
    """Pointers to rows first, first + 1, ... of a tile, never behind row `last`."""
    return [base.at(f.minimum(first + i if i else first, f.coerce(last, I64)) * pitch) for i in range(count)]
