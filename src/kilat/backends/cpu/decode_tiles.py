"""The tile steps of few queries against many keys: lanes run along head_dim for products, along keys for the softmax.

Rows are (query head of the group, query) pairs of one kv head, so every K/V row that is read serves all of them. S and
P are [row][KEYS]; K and V tiles are natural rows padded to whole vectors; the accumulator is O[row][head_dim_v].
"""

from __future__ import annotations

import math

from kilat.backends.cpu.emit import I16, I32, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.forward_tiles import ACCURATE, finite_or_zero, lane_bits
from kilat.backends.cpu.layout import Geometry
from kilat.backends.cpu.math import exp

KEYS = 64  # keys of a tile
COLUMNS = 4  # vectors of O that a product step holds in registers


def decode_geometry(compute: Type, lanes: int) -> Geometry:
    """The score tile: lanes are keys, rows are queries."""
    return Geometry(compute, lanes, KEYS // lanes, KEYS, query_lanes=False)


def row_group(lanes: int) -> int:
    """Rows that a product step works on."""
    return min(4, lanes)


def reduce_tree(f: Function, vs: list[Value]) -> Value:
    """w vectors of w lanes to one vector whose lane i is the sum of vs[i], in w - 1 additions."""
    lanes = vs[0].type.lanes
    while len(vs) > 1:
        h = len(vs) // 2
        low = [i if not i & h else lanes + i - h for i in range(lanes)]
        high = [i + h if not i & h else lanes + i for i in range(lanes)]
        vs = [f.shuffle(vs[i], vs[i + h], low) + f.shuffle(vs[i], vs[i + h], high) for i in range(h)]
    return vs[0]


def build_scores(m: Module, geo: Geometry) -> Function:
    """scores(Q, K, pitch, S, rows): S[r][n] = q_r . k_n for all KEYS keys; pitch: bytes of a row of Q and K."""
    vec, t = geo.vector, geo.compute
    rg = row_group(geo.lanes)
    kg = geo.lanes // rg
    with m.function("scores", [PTR, PTR, I64, PTR, I64]) as f:
        q, k, pitch, s, rows = f.args
        with f.range(0, rows, rg) as r, f.range(0, KEYS, kg) as n:
            acc = [[f.var(vec, 0.0) for _ in range(kg)] for _ in range(rg)]
            with f.range(0, pitch, vec.bytes) as d:
                qs = [f.load(vec, q.at((r + i) * pitch), d) for i in range(rg)]
                for j in range(kg):
                    y = f.load(vec, k.at((n + j) * pitch), d)
                    for i, x in enumerate(qs):
                        acc[i][j].set(f.fma(x, y, acc[i][j].get()))
            sums = reduce_tree(f, [a.get() for row in acc for a in row])  # lane i * kg + j
            for i in range(rg):
                at = s.at((r + i) * geo.row_bytes + n * t.bytes)
                f.store(f.shuffle(sums, None, range(i * kg, (i + 1) * kg)) if kg > 1 else f.extract(sums, i), at)
    return f


def build_softmax(m: Module, geo: Geometry) -> Function:
    """softmax(S, bits, masked, nb, max, sum, O, width): one row.

    S becomes P = exp(S - max), 0 behind nb and where hidden.

    FlashAttention-2, algorithm 1, lines 8 to 10; max and sum are scalars, O (width vectors) is scaled if max rises.
    """
    vec, t, vs = geo.vector, geo.compute, range(geo.vectors)
    with m.function("softmax", [PTR, PTR, I64, I64, PTR, PTR, PTR, I64]) as f:
        s, bits, masked, nb, mp, lp, o, width = f.args
        xs = [f.var(vec, f.load(vec, s, v * vec.bytes)) for v in vs]
        index = f.iota(I32.vec(geo.lanes))
        live = [index < f.splat(f.cast("trunc", nb - v * geo.lanes, I32), geo.lanes) for v in vs]
        for v in vs:
            xs[v].set(f.select(live[v], xs[v].get(), -math.inf))
        with f.when(masked.ne(0)):
            for v in vs:
                xs[v].set(f.select(lane_bits(f, bits, v, geo.lanes), xs[v].get(), -math.inf))
        top = xs[0].get()
        for v in vs[1:]:
            top = f.maximum(xs[v].get(), top)
        old = f.load(t, mp)
        new = f.maximum(f.reduce(top, "max"), old)
        with f.when(new > old):
            alpha = f.extract(exp(f, f.splat(old - new, geo.lanes)), 0)
            f.store(f.load(t, lp) * alpha, lp)
            f.store(new, mp)
            with f.range(0, width) as d:
                f.store(f.load(vec, o, d * vec.bytes) * f.splat(alpha, geo.lanes), o, d * vec.bytes)
        ref, total = f.splat(finite_or_zero(f, new), geo.lanes), None
        for v in vs:
            p = exp(f, xs[v].get() - ref, accurate=ACCURATE)
            total = p if total is None else total + p
            f.store(p, s, v * vec.bytes)
        if total is None:
            raise ValueError("vectors must be positive; got 0")
        f.store(f.load(t, lp) + f.reduce(total, "add"), lp)
    return f


def build_product(m: Module, geo: Geometry) -> Function:
    """product(P, V, O, width, rows, nb): O[r][d] += sum_n P[r][n] V[n][d], COLUMNS vectors of d at a time."""
    vec, t, rg = geo.vector, geo.compute, row_group(geo.lanes)
    with m.function("product", [PTR, PTR, PTR, I64, I64, I64]) as f:
        p, v_rows, o, width, rows, nb = f.args
        pitch = width * vec.bytes

        def columns(r: Value, c: Value, count: int) -> None:
            acc = [[f.var(vec, 0.0) for _ in range(count)] for _ in range(rg)]
            with f.range(0, nb) as n:
                row = v_rows.at(n * pitch + c * vec.bytes)
                ys = [f.load(vec, row, j * vec.bytes) for j in range(count)]
                for i in range(rg):
                    x = f.splat(f.load(t, p.at((r + i) * geo.row_bytes), n * t.bytes), geo.lanes)
                    for j, y in enumerate(ys):
                        acc[i][j].set(f.fma(x, y, acc[i][j].get()))
            for i in range(rg):
                for j in range(count):
                    at = o.at((r + i) * pitch + c * vec.bytes)
                    f.store(f.load(vec, at, j * vec.bytes) + acc[i][j].get(), at, j * vec.bytes)

        whole = width & -COLUMNS
        with f.range(0, rows, rg) as r:
            with f.range(0, whole, COLUMNS) as c:
                columns(r, c, COLUMNS)
            with f.range(whole, width) as c:
                columns(r, c, 1)
    return f


def build_product_select(m: Module, geo: Geometry) -> Function:
    """product of one row that adds only keys whose bit is set: for V tiles with NaN or inf that the row may not see."""
    vec, t = geo.vector, geo.compute
    with m.function("product_select", [PTR, PTR, PTR, I64, I64, PTR]) as f:
        p, v_rows, o, width, nb, bits = f.args
        with f.range(0, width) as d:
            acc = f.var(vec, 0.0)  # summed as in `product`: rows that see finite numbers alone keep their bits
            with f.range(0, nb) as n:
                word = f.load(I16, bits, n // geo.lanes * 2)
                with f.when((f.cast("zext", word, I64) >> (n % geo.lanes) & 1).ne(0)):
                    x = f.splat(f.load(t, p, n * t.bytes), geo.lanes)
                    y = f.load(vec, v_rows.at(n * width * vec.bytes), d * vec.bytes)
                    acc.set(f.fma(x, y, acc.get()))
            f.store(f.load(vec, o, d * vec.bytes) + acc.get(), o, d * vec.bytes)
    return f


def build_hide(m: Module, geo: Geometry) -> Function:
    """hide(S, bits, masked): clear one row's bits of keys whose score is -inf (all were set before, if not masked)."""
    with m.function("hide", [PTR, PTR, I64]) as f:
        s, bits, masked = f.args
        for v in range(geo.vectors):
            seen = f.bitcast(f.load(geo.vector, s, v * geo.vector.bytes).ne(-math.inf), Type(f"i{geo.lanes}"))
            word = seen if geo.lanes == 16 else f.cast("zext", seen, I16)
            old = f.select(masked.ne(0), f.load(I16, bits, v * 2), f.const(-1, I16))
            f.store(word & old, bits, v * 2)
    return f


def build_drop(m: Module, geo: Geometry) -> Function:
    """drop(P, bits): one row; P = 0 where the bit is clear (1 / (1 - p) is applied at the end)."""
    with m.function("drop", [PTR, PTR]) as f:
        p, bits = f.args
        for v in range(geo.vectors):
            at = v * geo.vector.bytes
            f.store(f.select(lane_bits(f, bits, v, geo.lanes), f.load(geo.vector, p, at), 0.0), p, at)
    return f
