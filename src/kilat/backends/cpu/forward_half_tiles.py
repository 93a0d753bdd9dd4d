"""Tile steps of the bfloat16 forward whose products take pairs: packing, softmax to pairs, the careful product.

S and O^T stay float32 as in the float kernel (same lanes, same bits of masks); Q^T and P are pairs along the reduction
(int32 [k / 2][query]), K and V^T bfloat16 rows. The scale is applied to S, since Q must stay as it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kilat.backends.cpu.dots import STEP, pack_pairs
from kilat.backends.cpu.emit import F32, I1, I16, I32, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.forward_tiles import LAZY_RISE, finite_or_zero, lane_bits
from kilat.backends.cpu.math import exp, transpose
from kilat.backends.cpu.rows import row_offset

LANES, VECTORS = 16, 4
WIDTH = LANES * VECTORS
ROW = WIDTH * 4  # bytes of a row of S, P (pairs) and O^T
VEC = F32.vec(LANES)
# 1e-7: as for float32; degree 4 (3e-6) would do for out but shows in lse
DEGREE = 5


def build_load_raw(m: Module) -> Function:
    """load_raw(base, stride, pages, page_size, page_stride, first, rows, pad, dst, pitch, dim): rows as they are.

    dst[r][0 : pitch / 2] = row r, zero behind dim, rows up to pad zero; pitch is a multiple of 64. Rows are found as
    in `load_rows`. Returns 1 if some number is not finite.
    """
    wide = I16.vec(32)
    with m.function("load_raw", [PTR, I64, PTR, I64, I64, I64, I64, I64, PTR, I64, I64], I64) as f:
        base, stride, pages, page_size, page_stride, first, rows, pad, dst, pitch, dim = f.args
        bad = f.var(I32, 0)
        whole = dim - dim % 32
        tail = f.iota(I16.vec(32)) < f.splat(f.cast("trunc", dim - whole, I16), 32)

        def put(x: Value, to: Value) -> None:
            bad.set(bad.get() | f.bitcast((x & 0x7F80).eq(0x7F80), I32))
            f.store(x, to)

        with f.range(0, rows) as r:
            src, to = base.at(row_offset(f, first + r, stride, pages, page_size, page_stride)), dst.at(r * pitch)
            with f.range(0, whole, 32) as d:
                put(f.load(wide, src, d * 2), to.at(d * 2))
            with f.when(whole < dim):
                put(f.masked_load(wide, src.at(whole * 2), tail), to.at(whole * 2))
        with f.range(rows * pitch, pad * pitch, 64) as o:
            f.store(f.const(0, wide), dst, o)
        f.ret_value(f.cast("zext", bad.get().ne(0), I64))
    return f


def build_transpose_pairs(m: Module) -> Function:
    """transpose_pairs(src, src_pitch, dst, dst_pitch, rows, columns): dst[c][r] = src[r][c]; multiples of 32."""
    short = I16.vec(LANES)
    with m.function("transpose_pairs", [PTR, I64, PTR, I64, I64, I64]) as f:
        src, src_pitch, dst, dst_pitch, rows, columns = f.args
        mix = [n for i in range(LANES) for n in (i, LANES + i)]
        with f.range(0, rows, 32) as r, f.range(0, columns, LANES) as c:
            tile = []
            for i in range(0, 32, 2):
                one, two = (f.load(short, src.at((r + i + k) * src_pitch), c * 2) for k in (0, 1))
                tile.append(f.bitcast(f.shuffle(one, two, mix), I32.vec(LANES)))
            for i, row in enumerate(transpose(f, tile)):
                f.store(row, dst.at((c + i) * dst_pitch), r * 2)
    return f


def build_scale(m: Module) -> Function:
    """scale(S, nb, factor): S *= factor, for scores that are modified before the softmax."""
    with m.function("scale_scores", [PTR, I64, F32]) as f:
        s, nb, factor = f.args
        with f.range(0, nb * ROW, VEC.bytes) as o:
            f.store(f.load(VEC, s, o) * f.splat(factor, LANES), s, o)
    return f


def build_softmax_pairs(m: Module, masked: bool, lazy: bool) -> Function:
    """softmax(S, P, bits, nb, max, sum, OT, dim_v, factor) -> 1 if P must be formed again with `lazy` False, else 0.

    P = exp(factor * S - max) as pairs, zero up to a multiple of 32 keys. lazy: max stands, and nothing is committed if
    some score exceeds it by more than LAZY_RISE. Otherwise max, sum and OT are brought up to date first.
    """
    name = f"softmax_pairs{'_masked' * masked}{'_lazy' * lazy}"
    with m.function(name, [PTR, PTR, PTR, I64, PTR, PTR, PTR, I64, F32], I64) as f:
        s, p, bits, nb, mp, lp, ot, dim_v, factor = f.args
        scale, vs = f.splat(factor, LANES), range(VECTORS)

        def score(n: Value, v: int, minus: Value) -> Value:
            # Not fused: the scaled score is rounded as it was for the maximum, so that no x is above 0 by a rounding.
            x = f.load(VEC, s, n * ROW + v * VEC.bytes) * scale + minus
            return f.select(lane_bits(f, bits, n * VECTORS + v, LANES), x, -math.inf) if masked else x

        if not lazy:
            _raise_maximum(f, (s, nb, mp, lp, ot, dim_v), lambda n, v: score(n, v, f.const(0.0, VEC)))
        olds = [f.load(VEC, mp, v * VEC.bytes) for v in vs]
        minus = [-finite_or_zero(f, old) for old in olds]
        sums, tops = [f.var(VEC, 0.0) for _ in vs], [f.var(VEC, -math.inf) for _ in vs]

        def exps(n: Value, v: int) -> Value:
            x = score(n, v, minus[v])
            if lazy:
                tops[v].set(f.maximum(x, tops[v].get()))
            e = exp(f, x, accurate=False, degree=DEGREE)
            sums[v].add(e)
            return e

        even = nb & -2
        with f.range(0, even, 2) as n:
            for v in vs:
                f.store(pack_pairs(f, exps(n, v), exps(n + 1, v)), p, (n >> 1) * ROW + v * VEC.bytes)
        with f.range(even, nb) as n:
            for v in vs:
                f.store(pack_pairs(f, exps(n, v), f.const(0.0, VEC)), p, (n >> 1) * ROW + v * VEC.bytes)
        with f.range((nb + 1) >> 1, (nb + (STEP - 1)) // STEP * (STEP // 2)) as n:
            for v in vs:
                f.store(f.const(0, I32.vec(LANES)), p, n * ROW + v * VEC.bytes)
        redo = f.const(0, I1)
        if lazy:
            for old, top in zip(olds, tops, strict=True):
                limit = f.select(old.eq(-math.inf), f.const(-math.inf, VEC), LAZY_RISE)
                redo = redo | f.bitcast(top.get() > limit, Type(f"i{LANES}")).ne(0)
        with f.unless(redo):
            for v, total in zip(vs, sums, strict=True):
                f.store(f.load(VEC, lp, v * VEC.bytes) + total.get(), lp, v * VEC.bytes)
        f.ret_value(f.cast("zext", redo, I64))
    return f


def _raise_maximum(f: Function, args: tuple[Value, ...], score: Callable[[Value, int], Value]) -> None:
    """Bring max up to the tile's maxima where they rise enough, and sum and OT with it."""
    _, nb, mp, lp, ot, dim_v = args
    tops = [f.var(VEC, -math.inf) for _ in range(VECTORS)]
    with f.range(0, nb) as n:
        for v, top in enumerate(tops):
            top.set(f.maximum(score(n, v), top.get()))
    for v, top in enumerate(tops):
        old, new = f.load(VEC, mp, v * VEC.bytes), top.get()
        rise = new > old + LAZY_RISE
        with f.when(f.bitcast(rise, Type(f"i{LANES}")).ne(0)):
            alpha = f.select(rise, exp(f, old - new), 1.0)
            f.store(f.select(rise, new, old), mp, v * VEC.bytes)
            f.store(f.load(VEC, lp, v * VEC.bytes) * alpha, lp, v * VEC.bytes)
            with f.range(0, dim_v) as d:
                at = d * ROW + v * VEC.bytes
                f.store(f.load(VEC, ot, at) * alpha, ot, at)


def build_drop_pairs(m: Module) -> Function:
    """drop_pairs(P, bits, nb): clear the half of a pair whose key is dropped."""
    with m.function("drop_pairs", [PTR, PTR, I64]) as f:
        p, bits, nb = f.args
        with f.range(0, nb, 2) as n, f.range(0, VECTORS) as v:
            at, keep = (n >> 1) * ROW + v * VEC.bytes, f.const(0, I32.vec(LANES))
            for half, word in ((0, 0xFFFF), (1, -65536)):
                slot = f.minimum(n + half, nb - 1) * VECTORS + v
                keep = keep | f.select(lane_bits(f, bits, slot, LANES), f.const(word, I32.vec(LANES)), 0)
            f.store(f.load(I32.vec(LANES), p, at) & keep, p, at)
    return f


def build_product_select_pairs(m: Module) -> Function:
    """product_select(P, VT, pitch, OT, nb, dim_v, bits): a query adds only keys that it sees; for V with NaN or inf."""
    with m.function("product_select_pairs", [PTR, PTR, I64, PTR, I64, I64, PTR]) as f:
        p, vt, pitch, ot, nb, dim_v, bits = f.args
        with f.range(0, dim_v) as d, f.range(0, VECTORS) as v:
            at = d * ROW + v * VEC.bytes
            acc = f.var(VEC, f.load(VEC, ot, at))
            with f.range(0, nb) as n:
                word = f.cast("zext", f.load(I16, vt.at(d * pitch), n * 2), I32)
                x = f.splat(f.bitcast(word << 16, F32), LANES)
                pair = f.load(I32.vec(LANES), p, (n >> 1) * ROW + v * VEC.bytes)
                y = f.bitcast(f.select((n & 1).eq(0), pair << 16, pair & -65536), VEC)
                seen = lane_bits(f, bits, n * VECTORS + v, LANES)
                acc.set(f.select(seen, f.fma(x, y, acc.get()), acc.get()))
            f.store(acc.get(), ot, at)
    return f
