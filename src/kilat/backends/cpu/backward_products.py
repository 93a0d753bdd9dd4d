"""The five tile products of the backward: S = Q K^T, dP = dO V^T, dV += P^T dO, dK += dS^T Q, dQ += dS K.

A tile is 64 queries (rows) by `vectors` vectors of keys (lanes). The first two products read K^T and V^T, packed once
a chunk of keys, and end in the softmax gradient; the other three have natural rows of dO, Q and K as vector operands.
In a partial tile `extents` says which vectors a group of rows sees and which rows a vector of keys is seen by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kilat.backends.cpu.emit import I16, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.gemm import Blocking, accumulators, clamp_rows, multiply
from kilat.backends.cpu.layout import Geometry
from kilat.backends.cpu.math import exp
from kilat.backends.cpu.tiles import from_bits

BLOCK_Q = 64

Finish = Callable[[Value, Value, Value], Value]
"""(accumulator, row, vector number) -> what is stored."""


def geometry(block: Blocking) -> Geometry:
    """The score tile of the backward: 64 queries by `vectors` vectors of keys."""
    return Geometry(block.compute, block.lanes, block.vectors, BLOCK_Q, query_lanes=False)


def extents_size(block: Blocking) -> int:
    """int64 in an extents table: (first, stop) vector of each row group, then (first, stop) row of each vector."""
    return 2 * (BLOCK_Q // block.mr) + 2 * block.vectors


@dataclass(frozen=True)
class Products:
    """The emitted functions. Arguments of all: see the builders."""

    extents: Function
    extents_all: Function
    scores: Function
    probabilities: Function
    probabilities_masked: Function
    gradients: Function
    add_keys: Function
    add_rows: Function
    add_select: Function


def build_extents(m: Module, block: Blocking) -> Function:
    """extents(bits, nr, table): which parts of a partial tile hold any visible pair."""
    mr, groups = block.mr, BLOCK_Q // block.mr
    with m.function("extents", [PTR, I64, PTR]) as f:
        bits, nr, table = f.args
        first_row = [f.var(I64, BLOCK_Q) for _ in range(block.vectors)]
        stop_row = [f.var(I64, 0) for _ in range(block.vectors)]
        with f.range(0, groups) as g:
            first, stop = f.var(I64, block.vectors), f.var(I64, 0)
            for v in range(block.vectors):
                rows = [g * mr + i for i in range(mr)]
                word = f.load(I16, bits, rows[0] * (2 * block.vectors) + 2 * v)
                for r in rows[1:]:
                    word = word | f.load(I16, bits, r * (2 * block.vectors) + 2 * v)
                seen = word.ne(0)
                first.set(f.select(seen, f.minimum(first.get(), v), first.get()))
                stop.set(f.select(seen, f.const(v + 1, I64), stop.get()))
                first_row[v].set(f.select(seen, f.minimum(first_row[v].get(), g * mr), first_row[v].get()))
                stop_row[v].set(f.select(seen, g * mr + mr, stop_row[v].get()))
            f.store(first.get(), table, g * 16)
            f.store(stop.get(), table, g * 16 + 8)
        for v in range(block.vectors):
            f.store(first_row[v].get(), table, groups * 16 + 16 * v)
            f.store(f.minimum(stop_row[v].get(), nr), table, groups * 16 + 16 * v + 8)
    return f


def build_extents_all(m: Module, block: Blocking) -> Function:
    """extents_all(nr, nb, table): the table of a tile of which all nr x nb pairs are visible."""
    groups = BLOCK_Q // block.mr
    with m.function("extents_all", [I64, I64, PTR]) as f:
        nr, nb, table = f.args
        live = (nb + (block.lanes - 1)) // block.lanes
        pair = I64.vec(2)
        whole = f.insert(f.const(0, pair), live, 1)
        rows = f.insert(f.const(0, pair), nr, 1)
        for entry in range(groups + block.vectors):
            f.store(whole if entry < groups else rows, table, entry * 16)
    return f


def _rows_times_keys(
    f: Function, block: Blocking, a: Value, a_pitch: Value, b: Value, dim: Value, table: Value, nr: Value,
    out: Value, finish: Finish,
) -> None:  # fmt: skip
    """out[r][n] = finish(sum_d A[r][d] B[d][n]) wherever a group of mr rows sees the vector that holds key n."""
    vec, mr, nv = block.compute.vec(block.lanes), block.mr, block.nv
    row = block.vectors * vec.bytes

    def group(r: Value, first: Value, count: int) -> None:
        acc = accumulators(f, vec, mr, count)
        multiply(
            f, acc, [a.at((r + i) * a_pitch) for i in range(mr)], vec.scalar.bytes, b.at(first * vec.bytes), row, dim
        )
        for i in range(mr):
            for v in range(count):
                at = (r + i) * row + (first + v) * vec.bytes
                f.store(finish(acc[i][v].get(), r + i, first + v), out, at)

    with f.range(0, nr, mr) as r:
        entry = table.at(r // mr * 16)
        first, stop = f.load(I64, entry), f.load(I64, entry, 8)
        for c in range(0, block.vectors, nv):
            lo = f.maximum(first, c)
            live = f.minimum(stop, c + nv) - lo
            for count in range(nv, 0, -1):
                with f.when(live.eq(count)):
                    group(r, lo, count)


def build_scores(m: Module, block: Blocking) -> Function:
    """scores(A, a_pitch, B, dim, table, nr, S): S = A B, rows of A by columns of B."""
    with m.function("scores", [PTR, I64, PTR, I64, PTR, I64, PTR]) as f:
        a, pitch, b, dim, table, nr, s = f.args
        _rows_times_keys(f, block, a, pitch, b, dim, table, nr, s, lambda x, r, v: x)
    return f


def probability(f: Function, s: Value, lse: Value) -> Value:
    """p = exp(s - lse), at most 1 also where s was rounded up; NaN stays NaN."""
    x = s - lse
    return exp(f, f.select(x > 0.0, 0.0, x), accurate=False)


def build_probabilities(m: Module, block: Blocking, masked: bool) -> Function:
    """probabilities(A, a_pitch, B, dim, table, nr, P, lse, bits): P = exp(A B - lse), 0 where a bit is clear."""
    args = [PTR, I64, PTR, I64, PTR, I64, PTR, PTR, PTR]
    with m.function("probabilities_masked" if masked else "probabilities", args) as f:
        a, pitch, b, dim, table, nr, p, lse, bits = f.args

        def finish(x: Value, r: Value, v: Value) -> Value:
            row_lse = f.splat(f.load(block.compute, lse, r * block.compute.bytes), block.lanes)
            x = probability(f, x, row_lse)
            if masked:
                x = f.select(from_bits(f, f.load(I16, bits, (r * block.vectors + v) * 2), block.lanes), x, 0.0)
            return x

        _rows_times_keys(f, block, a, pitch, b, dim, table, nr, p, finish)
    return f


def gradient(f: Function, p: Value, dp: Value, delta: Value) -> Value:
    """ds = p (dp - delta), exactly 0 where p is 0: a masked pair contributes nothing even if dp is NaN."""
    return f.select(p.ne(0.0), p * (dp - delta), 0.0)


def build_gradients(m: Module, block: Blocking) -> Function:
    """gradients(A, a_pitch, B, dim, table, nr, dS, delta, P): dS = P (A B - delta)."""
    vec = block.compute.vec(block.lanes)
    with m.function("gradients", [PTR, I64, PTR, I64, PTR, I64, PTR, PTR, PTR]) as f:
        a, pitch, b, dim, table, nr, ds, delta, p = f.args

        def finish(x: Value, r: Value, v: Value) -> Value:
            row_delta = f.splat(f.load(block.compute, delta, r * block.compute.bytes), block.lanes)
            return gradient(f, f.load(vec, p, (r * block.vectors + v) * vec.bytes), x, row_delta)

        _rows_times_keys(f, block, a, pitch, b, dim, table, nr, ds, finish)
    return f


def _columns(f: Function, block: Blocking, vectors: Value, body: Callable[[Value, int, int], None]) -> None:
    """body(first vector, number of vectors, rows) over a run-time number of vectors; few vectors take more rows."""
    rows = {count: block.mr * (1 << (block.nv // count).bit_length() - 1) for count in range(1, block.nv + 1)}
    whole = vectors // block.nv * block.nv
    with f.range(0, whole, block.nv) as c:
        body(c, block.nv, rows[block.nv])
    for count in range(1, block.nv):
        with f.when((vectors - whole).eq(count)):
            body(whole, count, rows[count])


def build_add_keys(m: Module, block: Blocking) -> Function:
    """add_keys(T, B, pitch, dst, vectors, table, nb): dst[n] += sum_m T[m][n] B[m], rows of `vectors` vectors.

    The tile's sum starts from zero and is added once: two-level summation halves the error.
    """
    vec, size, row = (
        block.compute.vec(block.lanes),
        block.compute.bytes,
        block.vectors * block.lanes * block.compute.bytes,
    )
    by_vector = BLOCK_Q // block.mr * 16
    with m.function("add_keys", [PTR, PTR, I64, PTR, I64, PTR, I64]) as f:
        t, b, pitch, dst, vectors, table, nb = f.args

        def body(c: Value, count: int, rows: int) -> None:
            with f.range(0, nb, rows) as n:
                entry = table.at(n // block.lanes * 16 + by_vector)
                lo, hi = f.load(I64, entry), f.load(I64, entry, 8)
                for k in range(1, rows // block.lanes):
                    lo = f.minimum(lo, f.load(I64, entry, 16 * k))
                    hi = f.maximum(hi, f.load(I64, entry, 16 * k + 8))
                with f.when(lo < hi):
                    acc = accumulators(f, vec, rows, count)
                    source = t.at(lo * row + n * size)
                    multiply(f, acc, [source.at(i * size) for i in range(rows)], row, b.at(lo * pitch + c * vec.bytes),
                             pitch, hi - lo)  # fmt: skip
                    for i in range(rows):
                        for v in range(count):
                            at = (n + i) * pitch + (c + v) * vec.bytes
                            f.store(f.load(vec, dst, at) + acc[i][v].get(), dst, at)

        _columns(f, block, vectors, body)
    return f


def build_add_rows(m: Module, block: Blocking) -> Function:
    """add_rows(T, B, pitch, dst, dst_pitch, vectors, table, nr, nb): dst[m] += sum_n T[m][n] B[n]."""
    vec, size, row = (
        block.compute.vec(block.lanes),
        block.compute.bytes,
        block.vectors * block.lanes * block.compute.bytes,
    )
    with m.function("add_rows", [PTR, PTR, I64, PTR, I64, I64, PTR, I64, I64]) as f:
        t, b, pitch, dst, dst_pitch, vectors, table, nr, nb = f.args

        def body(c: Value, count: int, rows: int) -> None:
            with f.range(0, nr, rows) as r:
                entry = table.at(r // block.mr * 16)
                lo, hi = f.load(I64, entry), f.load(I64, entry, 8)
                for k in range(1, rows // block.mr):
                    lo = f.minimum(lo, f.load(I64, entry, 16 * k))
                    hi = f.maximum(hi, f.load(I64, entry, 16 * k + 8))
                lo, hi = lo * block.lanes, f.minimum(hi * block.lanes, nb)
                with f.when(lo < hi):
                    acc = accumulators(f, vec, rows, count)
                    source = clamp_rows(f, t, r, rows, nr - 1, row)
                    multiply(
                        f,
                        acc,
                        [x.at(lo * size) for x in source],
                        size,
                        b.at(lo * pitch + c * vec.bytes),
                        pitch,
                        hi - lo,
                    )
                    to = [x.at(c * vec.bytes) for x in clamp_rows(f, dst, r, rows, nr - 1, dst_pitch)]
                    old = [[f.load(vec, x, v * vec.bytes) for v in range(count)] for x in to]
                    # Clamped rows repeat the last one, with the same sum: all are read before any is written.
                    for i, x in enumerate(to):
                        for v in range(count):
                            f.store(old[i][v] + acc[i][v].get(), x, v * vec.bytes)

        _columns(f, block, vectors, body)
    return f


def build_add_select(m: Module, block: Blocking) -> Function:
    """add_select(bits, T, B, pitch, dst, dst_pitch, vectors, nr, nb, by_key): the sums of add_keys (by_key = 1) and
    add_rows (0) over visible pairs only, for partial tiles whose B holds NaN or inf. Slow and exact.

    Sums run as in those two, so that what sees finite numbers alone gets the bits that it would have had.
    """
    vec, size, row = (
        block.compute.vec(block.lanes),
        block.compute.bytes,
        block.vectors * block.lanes * block.compute.bytes,
    )
    with m.function("add_select", [PTR, PTR, PTR, I64, PTR, I64, I64, I64, I64, I64]) as f:
        bits, t, b, pitch, dst, dst_pitch, vectors, nr, nb, by_key = f.args
        keys = by_key.ne(0)
        outer, inner = f.select(keys, nb, nr), f.select(keys, nr, nb)
        with f.range(0, outer) as a, f.range(0, vectors * vec.bytes, vec.bytes) as o:
            acc = f.var(vec, 0.0)
            with f.range(0, inner) as c:
                r, n = f.select(keys, c, a), f.select(keys, a, c)
                word = f.load(I16, bits, (r * block.vectors + n // block.lanes) * 2)
                lane = f.cast("trunc", n % block.lanes, I16)
                with f.when(((word >> lane) & 1).ne(0)):
                    x = f.splat(f.load(block.compute, t, r * row + n * size), block.lanes)
                    acc.set(f.fma(x, f.load(vec, b.at(c * pitch), o), acc.get()))
            to = dst.at(a * dst_pitch)
            f.store(f.load(vec, to, o) + acc.get(), to, o)
    return f


def build_products(m: Module, block: Blocking) -> Products:
    """All products of one backward module."""
    return Products(
        extents=build_extents(m, block),
        extents_all=build_extents_all(m, block),
        scores=build_scores(m, block),
        probabilities=build_probabilities(m, block, masked=False),
        probabilities_masked=build_probabilities(m, block, masked=True),
        gradients=build_gradients(m, block),
        add_keys=build_add_keys(m, block),
        add_rows=build_add_rows(m, block),
        add_select=build_add_select(m, block),
    )


def row_bytes(dim: Value, block: Blocking) -> Value:
    """Bytes of a scratch row of `dim` elements, padded to whole vectors."""
    return padded(dim, block) * block.compute.bytes


def padded(dim: Value, block: Blocking) -> Value:
    """dim rounded up to the lanes."""
    return (dim + (block.lanes - 1)) // block.lanes * block.lanes


NEGATIVE_INFINITY = -math.inf
"""The score of a key that a bias hides."""


def vector_type(block: Blocking) -> Type:
    """One vector of the compute type."""
    return block.compute.vec(block.lanes)
