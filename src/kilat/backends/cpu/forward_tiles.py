"""The tile steps of the forward in paper order: scores, online softmax, product with V, epilogue.

Lanes run along queries: S[key][query], so K and V are read as broadcast scalars from natural rows, row maxima and sums
are element-wise, and only Q is transposed, once a task. The accumulator is O^T[d][query].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kilat.backends.cpu.emit import I1, I16, I64, PTR, Function, Module, Type, Value, Var
from kilat.backends.cpu.gemm import Blocking, accumulators, clamp_rows, multiply
from kilat.backends.cpu.layout import Geometry
from kilat.backends.cpu.math import exp, log

# A row's reference maximum rises only if a score exceeds it by more than this many nats: p stays below e^8, so sums
# are exact to the same relative error, and most tiles leave the accumulator alone (FlashAttention-4's lazy rescale).
LAZY_RISE = 8.0
# One fused multiply-add reduces the argument: its relative error, 1e-7 per unit of score below the maximum, is within
# the budget (which grows with the scores too), and the softmax is what keeps the forward below the FMA peak.
ACCURATE = False


@dataclass(frozen=True)
class Steps:
    """The emitted functions of one forward module."""

    fused: Function
    fused_masked: Function
    begin: Function
    scores: Function
    scores_live: Function
    softmax: Function
    softmax_masked: Function
    product: Function
    product_live: Function
    product_select: Function
    hide: Function
    drop: Function
    epilogue: Function


def lane_bits(f: Function, bits: Value, slot: Value | int, lanes: int) -> Value:
    """The `lanes` mask bits of int16 slot number `slot`."""
    word = f.load(I16, bits, slot * 2)
    narrow = word if lanes == 16 else f.cast("trunc", word, Type(f"i{lanes}"))
    return f.bitcast(narrow, Type("i1", lanes))


def live_words(f: Function, bits: Value, key: Value, block: Blocking, last: Value) -> Value:
    """The slots of `mr` keys or-ed together, as one int64 (four vectors of 16-bit slots)."""
    word = None
    for i in range(block.mr):
        row = f.load(I64, bits, f.minimum(key + i, last) * 8, 2)
        word = row if word is None else word | row
    if word is None:
        raise ValueError("mr must be positive; got 0")
    return word


def build_scores(m: Module, block: Blocking, live: bool) -> Function:
    """scores(QT, K, pitch, S, nb, dim, bits): S[n][r] = sum_d K[n][d] QT[d][r].

    live: vectors of queries that see none of a group of keys, counted from the first, are left out (bits say so).
    """
    geo_bytes = block.vectors * block.lanes * block.compute.bytes
    vec = block.compute.vec(block.lanes)
    with m.function("scores_live" if live else "scores", [PTR, PTR, I64, PTR, I64, I64, PTR]) as f:
        qt, k, pitch, s, nb, dim, bits = f.args
        last = nb - 1

        def group(n: Value, v0: int, count: int) -> None:
            acc = accumulators(f, vec, block.mr, count)
            rows = clamp_rows(f, k, n, block.mr, last, pitch)
            multiply(f, acc, rows, block.compute.bytes, qt.at(v0 * vec.bytes), geo_bytes, dim)
            for i in range(block.mr):  # [mr, lanes] scores; rows behind nb land in the tile's padding
                for v in range(count):
                    f.store(acc[i][v].get(), s, (n + i) * geo_bytes + (v0 + v) * vec.bytes)

        with f.range(0, nb, block.mr) as n:
            if live and block.vectors == 4 and block.nv == 4:
                first = f.intrinsic("llvm.cttz.i64", I64, live_words(f, bits, n, block, last), f.const(0, I1)) >> 4
                for v0 in range(4):
                    with f.when(first.eq(v0)):
                        group(n, v0, 4 - v0)
            else:
                for v0 in range(0, block.vectors, block.nv):
                    group(n, v0, block.nv)
    return f


def build_fused(m: Module, block: Blocking, masked: bool) -> Function:
    """fused(QT, K, pitch, S, nb, dim, bits, max, sum) -> 1 if it must be redone step by step, else 0.

    Scores, exponentials and row sums straight from the accumulators: P[n][r] = exp(s - max) for the max that stands.
    If some score exceeds it by more than LAZY_RISE nothing is committed. The bits are those of the separate steps.
    """
    row, vec = block.vectors * block.lanes * block.compute.bytes, block.compute.vec(block.lanes)
    args = [PTR, PTR, I64, PTR, I64, I64, PTR, PTR, PTR]
    with m.function("fused_masked" if masked else "fused", args, I64) as f:
        qt, k, pitch, s, nb, dim, bits, mp, lp = f.args
        last, rises = nb - 1, None
        for c in range(0, block.vectors, block.nv):
            vs = range(c, c + block.nv)
            refs = {v: finite_or_zero(f, f.load(vec, mp, v * vec.bytes)) for v in vs}
            tops, sums = {v: f.var(vec, -math.inf) for v in vs}, {v: f.var(vec, 0.0) for v in vs}

            def group(
                n: Value,
                dead: int,
                whole: bool,
                c: int = c,
                refs: dict[int, Value] = refs,
                tops: dict[int, Var] = tops,
                sums: dict[int, Var] = sums,
            ) -> None:
                acc = accumulators(f, vec, block.mr, block.nv - dead)
                rows = clamp_rows(f, k, n, block.mr, last, pitch)
                multiply(f, acc, rows, block.compute.bytes, qt.at((c + dead) * vec.bytes), row, dim)
                for i in range(block.mr):  # [mr, lanes] scores
                    inside = None if whole else f.splat(n + i < nb, block.lanes)
                    for v in range(c, c + block.nv):
                        at = (n + i) * row + v * vec.bytes
                        if v < c + dead:
                            f.store(f.const(0.0, vec), s, at)
                            continue
                        x = acc[i][v - c - dead].get()
                        seen = inside
                        if masked:
                            bit = lane_bits(f, bits, f.minimum(n + i, last) * block.vectors + v, block.lanes)
                            seen = bit if seen is None else seen & bit
                        if seen is not None:
                            x = f.select(seen, x, -math.inf)
                        tops[v].set(f.maximum(x, tops[v].get()))
                        p = exp(f, x - refs[v], accurate=ACCURATE)
                        sums[v].add(p)
                        f.store(p, s, at)

            whole = f.const(0, I64) if masked else nb - nb % block.mr
            if not masked:
                with f.range(0, whole, block.mr) as n:
                    group(n, 0, True)
            with f.range(whole, nb, block.mr) as n:
                if masked and block.vectors == 4 and block.nv == 4:
                    first = f.intrinsic("llvm.cttz.i64", I64, live_words(f, bits, n, block, last), f.const(0, I1)) >> 4
                    for dead in range(4):
                        with f.when(first.eq(dead)):
                            group(n, dead, False)
                    unseen = f.select(first >= 4, (n + block.mr) * row, 0)  # no query sees any of these keys
                    with f.range(n * row, unseen, vec.bytes) as o:
                        f.store(f.const(0.0, vec), s, o)
                else:
                    group(n, 0, False)
            for v in vs:
                rise = tops[v].get() > f.load(vec, mp, v * vec.bytes) + LAZY_RISE
                rises = rise if rises is None else rises | rise
                f.store(sums[v].get(), lp, v * vec.bytes + row)
        if rises is None:
            raise ValueError("vectors must be positive; got 0")
        redo = f.bitcast(rises, Type(f"i{block.lanes}")).ne(0)
        with f.unless(redo), f.range(0, row, vec.bytes) as o:
            f.store(f.load(vec, lp, o) + f.load(vec, lp.at(row), o), lp, o)
        f.ret_value(f.cast("zext", redo, I64))
    return f


def build_begin(m: Module, block: Blocking) -> Function:
    """begin(S, bits, masked, count, max): max = the row maximum over `count` keys, for rows that have none yet."""
    row, vec = block.vectors * block.lanes * block.compute.bytes, block.compute.vec(block.lanes)
    with m.function("begin", [PTR, PTR, I64, I64, PTR]) as f:
        s, bits, masked, count, mp = f.args
        with f.range(0, block.vectors) as v:
            top = f.var(vec, -math.inf)
            with f.range(0, count) as n:
                slot = n * block.vectors + v
                seen = lane_bits(f, bits, slot, block.lanes) | f.splat(masked.eq(0), block.lanes)
                x = f.select(seen, f.load(vec, s, n * row + v * vec.bytes), -math.inf)
                top.set(f.maximum(x, top.get()))
            f.store(top.get(), mp, v * vec.bytes)
    return f


def finite_or_zero(f: Function, x: Value) -> Value:
    """0 for -inf: a row that has seen nothing has max -inf; -inf - 0 keeps its p at 0 instead of NaN."""
    return f.select(x.eq(-math.inf), 0.0, x)


def build_softmax(m: Module, block: Blocking, masked: bool) -> Function:
    """softmax(S, bits, nb, max, sum, OT, dim_v): S becomes P = exp(S - max) in place; sum and OT are kept in step.

    FlashAttention-2, algorithm 1, lines 8 to 10, with max raised only by more than LAZY_RISE.
    """
    vec, width = block.compute.vec(block.lanes), block.vectors * block.lanes
    row = width * block.compute.bytes
    lanes = block.lanes
    with m.function("softmax_masked" if masked else "softmax", [PTR, PTR, I64, PTR, PTR, PTR, I64]) as f:
        s, bits, nb, mp, lp, ot, dim_v = f.args

        def score(n: Value, v: int) -> Value:
            x = f.load(vec, s, n * row + v * vec.bytes)
            return f.select(lane_bits(f, bits, n * block.vectors + v, lanes), x, -math.inf) if masked else x

        for c in range(0, block.vectors, block.nv):
            vs = range(c, c + block.nv)
            tops = [f.var(vec, -math.inf) for _ in vs]
            with f.range(0, nb) as n:
                for top, v in zip(tops, vs, strict=True):
                    top.set(f.maximum(score(n, v), top.get()))
            sums = [f.var(vec, 0.0) for _ in vs]
            refs = [f.var(vec) for _ in vs]
            for top, ref, v in zip(tops, refs, vs, strict=True):
                old, new = f.load(vec, mp, v * vec.bytes), top.get()
                rise = new > old + LAZY_RISE
                ref.set(f.select(rise, new, old))
                with f.when(f.bitcast(rise, Type(f"i{lanes}")).ne(0)):
                    # exp(-inf - new) is 0: the first tile of a row scales an accumulator of zeros
                    alpha = f.select(rise, exp(f, old - new), 1.0)
                    f.store(ref.get(), mp, v * vec.bytes)
                    f.store(f.load(vec, lp, v * vec.bytes) * alpha, lp, v * vec.bytes)
                    with f.range(0, dim_v) as d:
                        f.store(f.load(vec, ot, d * row + v * vec.bytes) * alpha, ot, d * row + v * vec.bytes)
                ref.set(finite_or_zero(f, ref.get()))
            with f.range(0, nb) as n:
                for ref, total, v in zip(refs, sums, vs, strict=True):
                    p = exp(f, score(n, v) - ref.get(), accurate=ACCURATE)
                    total.add(p)
                    f.store(p, s, n * row + v * vec.bytes)
            for total, v in zip(sums, vs, strict=True):
                f.store(f.load(vec, lp, v * vec.bytes) + total.get(), lp, v * vec.bytes)
    return f


def build_product(m: Module, block: Blocking, live: bool) -> Function:
    """product(P, V, pitch, OT, nb, dim_v, bits): OT[d][r] += sum_n V[n][d] P[n][r].

    live: keys that none of the first vectors see are left out of their sums (p is 0 there; the causal triangle).
    The tile's sum starts from zero and is added to OT once: two-level summation halves the error.
    """
    vec, row = block.compute.vec(block.lanes), block.vectors * block.lanes * block.compute.bytes
    with m.function("product_live" if live else "product", [PTR, PTR, I64, PTR, I64, I64, PTR]) as f:
        p, v_rows, pitch, ot, nb, dim_v, bits = f.args
        triangle = live and block.vectors == 4 and block.nv == 4
        segments = [(0, f.const(0, I64), nb)]
        if triangle:
            segments, stops = [], _last_live(f, bits, nb)
            for v in range(4):
                segments.append((v, stops[v - 1] if v else f.const(0, I64), stops[v] if v < 3 else nb))

        def columns(d: Value, c: int) -> None:
            acc = accumulators(f, vec, block.mr, block.nv)
            for v0, lo, hi in segments:
                a = [v_rows.at(lo * pitch + f.minimum(d + i, dim_v - 1) * vec.scalar.bytes) for i in range(block.mr)]
                cut = [r[v0:] for r in acc]
                multiply(f, cut, a, pitch, p.at(lo * row + (c + v0) * vec.bytes), row, hi - lo)
            for i in range(block.mr):  # rows behind dim_v land in the accumulator's padding
                for v in range(block.nv):
                    at = (d + i) * row + (c + v) * vec.bytes
                    f.store(f.load(vec, ot, at) + acc[i][v].get(), ot, at)

        with f.range(0, dim_v, block.mr) as d:
            for c in range(0, block.vectors, block.nv):
                columns(d, c)
    return f


def _last_live(f: Function, bits: Value, nb: Value) -> list[Value]:
    """For vectors 0..2: one behind the last key that any of vectors 0..v sees (non-decreasing in v)."""
    stops = [f.var(I64, 0) for _ in range(3)]
    with f.range(0, nb) as n:
        word = f.load(I64, bits, n * 8, 2)
        for v, stop in enumerate(stops):
            seen = (word & ((1 << 16 * (v + 1)) - 1)).ne(0)
            stop.set(f.select(seen, n + 1, stop.get()))
    return [s.get() for s in stops]


def build_product_select(m: Module, block: Blocking) -> Function:
    """product for a partial tile whose V holds NaN or inf: a query adds only keys that it sees. Slow and exact.

    Sums run as in `product`, so the rows that see finite numbers alone get the bits that they would have had.
    """
    vec, row = block.compute.vec(block.lanes), block.vectors * block.lanes * block.compute.bytes
    with m.function("product_select", [PTR, PTR, I64, PTR, I64, I64, PTR]) as f:
        p, v_rows, pitch, ot, nb, dim_v, bits = f.args
        with f.range(0, dim_v) as d, f.range(0, block.vectors) as v:
            at = d * row + v * vec.bytes
            acc = f.var(vec, 0.0)
            with f.range(0, nb) as n:
                x = f.splat(f.load(block.compute, v_rows, n * pitch + d * vec.scalar.bytes), vec.lanes)
                y = f.fma(x, f.load(vec, p, n * row + v * vec.bytes), acc.get())
                acc.set(f.select(lane_bits(f, bits, n * block.vectors + v, block.lanes), y, acc.get()))
            f.store(f.load(vec, ot, at) + acc.get(), ot, at)
    return f


def build_hide(m: Module, block: Blocking) -> Function:
    """hide(S, bits, fill, nb): clear the bits of scores that are -inf; fill: all bits count as set before."""
    vec, row = block.compute.vec(block.lanes), block.vectors * block.lanes * block.compute.bytes
    with m.function("hide", [PTR, PTR, I64, I64]) as f:
        s, bits, fill, nb = f.args
        with f.range(0, nb) as n, f.range(0, block.vectors) as v:
            slot = n * block.vectors + v
            seen = f.load(vec, s, n * row + v * vec.bytes).ne(-math.inf)
            word = f.bitcast(seen, Type(f"i{block.lanes}"))
            word = word if block.lanes == 16 else f.cast("zext", word, I16)
            old = f.select(fill.ne(0), f.const(-1, I16), f.load(I16, bits, slot * 2))
            f.store(word & old, bits, slot * 2)
    return f


def build_drop(m: Module, block: Blocking) -> Function:
    """drop(P, bits, nb): P = 0 where the bit is clear (dropout; 1 / (1 - p) is applied once, in the epilogue)."""
    vec, row = block.compute.vec(block.lanes), block.vectors * block.lanes * block.compute.bytes
    with m.function("drop", [PTR, PTR, I64]) as f:
        p, bits, nb = f.args
        with f.range(0, nb) as n, f.range(0, block.vectors) as v:
            at = n * row + v * vec.bytes
            kept = lane_bits(f, bits, n * block.vectors + v, block.lanes)
            f.store(f.select(kept, f.load(vec, p, at), 0.0), p, at)
    return f


def build_epilogue(m: Module, block: Blocking, transpose: Function, store_rows: Function) -> Function:
    """epilogue(OT, max, sum, tmp, nr, dim_v, out, out_stride, code, lse, factor, has_sink, sink): write out and lse.

    lse = max + log(sum), out = OT / sum; a sink joins as one more key without a value: with M = max(max, sink),
    sum' = sum exp(max - M) + exp(sink - M). Rows that saw nothing: out 0, lse -inf (with a sink: lse = sink).
    """
    vec, row = block.compute.vec(block.lanes), block.vectors * block.lanes * block.compute.bytes
    t = block.compute
    args = [PTR, PTR, PTR, PTR, I64, I64, PTR, I64, I64, PTR, t, I64, t]
    with m.function("epilogue", args) as f:
        ot, mp, lp, tmp, nr, dim_v, out, out_stride, code, lse, factor, has_sink, sink = f.args
        pad = (dim_v + (block.lanes - 1)) // block.lanes * block.lanes
        with f.range(0, block.vectors) as v:
            top, total = f.var(vec, f.load(vec, mp, v * vec.bytes)), f.var(vec, f.load(vec, lp, v * vec.bytes))
            scale = f.var(vec, 1.0)
            with f.when(has_sink.ne(0)):
                old, sinks = top.get(), f.splat(sink, vec.lanes)
                new = f.maximum(old, sinks)
                base = f.select(new.eq(-math.inf), 0.0, new)
                alpha = exp(f, old - base)
                top.set(new)
                scale.set(alpha)
                total.set(f.fma(total.get(), alpha, exp(f, sinks - base)))
            dead = total.get().eq(0.0)
            inverse = f.select(dead, 0.0, scale.get() * f.splat(factor, vec.lanes) / total.get())
            f.store(f.select(dead, -math.inf, top.get() + log(f, f.select(dead, 1.0, total.get()))), lp, v * vec.bytes)
            with f.range(0, dim_v) as d:
                at = d * row + v * vec.bytes
                f.store(f.load(vec, ot, at) * inverse, ot, at)
            with f.range(dim_v, pad) as d:
                f.store(f.const(0.0, vec), ot, d * row + v * vec.bytes)
        f.call(transpose, ot, f.const(row, I64), tmp, pad * t.bytes, pad, f.const(row // t.bytes, I64))
        f.call(store_rows, tmp, nr, out, out_stride, dim_v, f.const(1.0, t), code)
        with f.range(0, nr) as r:
            f.store(f.load(t, lp, r * t.bytes), lse, r * t.bytes)
    return f


def build_steps(m: Module, block: Blocking, transpose: Function, store_rows: Function) -> Steps:
    """All steps of one forward module."""
    return Steps(
        fused=build_fused(m, block, masked=False),
        fused_masked=build_fused(m, block, masked=True),
        begin=build_begin(m, block),
        scores=build_scores(m, block, live=False),
        scores_live=build_scores(m, block, live=True),
        softmax=build_softmax(m, block, masked=False),
        softmax_masked=build_softmax(m, block, masked=True),
        product=build_product(m, block, live=False),
        product_live=build_product(m, block, live=True),
        product_select=build_product_select(m, block),
        hide=build_hide(m, block),
        drop=build_drop(m, block),
        epilogue=build_epilogue(m, block, transpose, store_rows),
    )


def geometry(block: Blocking) -> Geometry:
    """The score tile of the forward: 64 keys by `vectors` vectors of queries."""
    return Geometry(block.compute, block.lanes, block.vectors)
