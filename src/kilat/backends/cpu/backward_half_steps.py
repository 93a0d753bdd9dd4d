"""A tile of the bfloat16 backward step by step: scores, dropout, and operands that are not finite.

S and dP come whole, float32 [64][64], by pair products or (careful) by sums over visible pairs only; then the
element-wise steps of the float kernel; then either pairs again, or sums over visible pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilat.backends.cpu.backward_half_tiles import (
    BLOCK,
    HALF_ROW,
    HIGH,
    LANES,
    ROW,
    STRIP,
    VEC,
    VECTORS,
    WIDTH,
    WORDS,
    pack,
    rounded,
)
from kilat.backends.cpu.backward_tile import Scope
from kilat.backends.cpu.emit import F32, I16, I32, I64, PTR, Function, Module, Value
from kilat.backends.cpu.gemm import Blocking
from kilat.backends.cpu.tiles import TILE_ARGS, from_bits
from kilat.backends.cpu.tiles_mask import PARTIAL
from kilat.backends.cpu.tiles_scores import SOFTCAP, USER

_TILE = WIDTH * ROW
STEPS_BYTES = 2 * _TILE + WIDTH * 2 * VECTORS  # raw scores, one more tile, dropout bits


def build_all_bits(m: Module) -> Function:
    """all_bits(bits, nr, nb): bits of a tile of which all nr x nb pairs are visible."""
    with m.function("all_bits", [PTR, I64, I64]) as f:
        bits, nr, nb = f.args
        with f.range(0, WIDTH) as r, f.range(0, VECTORS) as v:
            live = f.minimum(f.maximum(f.select(r < nr, nb, f.const(0, I64)) - v * LANES, 0), LANES)
            word = (f.const(1, I64) << live) - 1
            f.store(f.cast("trunc", word, I16), bits, r * (2 * VECTORS) + 2 * v)
    return f


def _number_at(f: Function, row: Value, d: Value) -> Value:
    """Number d of a bfloat16 row, in all lanes."""
    word = f.cast("zext", f.load(I16, row, d * 2), I32) << 16
    return f.splat(f.bitcast(word, F32), LANES)


def _lanes_at(f: Function, pairs: Value, d: Value, v: Value) -> Value:
    """16 keys' number d from pairs along d, int32 [dim / 2][64 keys]."""
    word = f.load(WORDS, pairs, (d >> 1) * ROW + v * VEC.bytes)
    return f.bitcast(f.select((d & 1).eq(0), word << 16, word & HIGH), VEC)


def build_exact_scores(m: Module) -> Function:
    """exact_scores(A, dim, BT, nr, S): S = A B for nr rows of A, without pair products; B as pairs along dim."""
    with m.function("exact_scores", [PTR, I64, PTR, I64, PTR]) as f:
        a, dim, bt, nr, s = f.args
        pitch = (dim + (BLOCK - 1) & -BLOCK) * 2
        with f.range(0, nr) as r, f.range(0, VECTORS) as v:
            total = f.var(VEC, 0.0)
            with f.range(0, dim) as d:
                total.set(f.fma(_number_at(f, a.at(r * pitch), d), _lanes_at(f, bt, d, v), total.get()))
            f.store(total.get(), s, r * ROW + v * VEC.bytes)
    return f


def build_exact_sums(m: Module) -> Function:
    """exact_sums(bits, nr, T, A, dim, CT): CT[d][key] += sum over visible queries of T[query][key] A[query][d]."""
    with m.function("exact_sums", [PTR, I64, PTR, PTR, I64, PTR]) as f:
        bits, nr, t, a, dim, ct = f.args
        pitch = (dim + (BLOCK - 1) & -BLOCK) * 2
        with f.range(0, nr) as r, f.range(0, VECTORS) as v:
            mask = from_bits(f, f.load(I16, bits, r * (2 * VECTORS) + v * 2), LANES)
            x = f.load(VEC, t, r * ROW + v * VEC.bytes)
            with f.range(0, dim) as d:
                at = d * ROW + v * VEC.bytes
                old = f.load(VEC, ct, at)
                f.store(f.select(mask, f.fma(x, _number_at(f, a.at(r * pitch), d), old), old), ct, at)
    return f


def build_exact_dq(m: Module) -> Function:
    """exact_dq(bits, nr, dS, KT, dim, dQ, pitch): dQ[query] += sum over visible keys of dS K."""
    with m.function("exact_dq", [PTR, I64, PTR, PTR, I64, PTR, I64]) as f:
        bits, nr, ds, kt, dim, dq, pitch = f.args
        with f.range(0, nr) as r, f.range(0, VECTORS) as v:
            mask = from_bits(f, f.load(I16, bits, r * (2 * VECTORS) + v * 2), LANES)
            x = f.load(VEC, ds, r * ROW + v * VEC.bytes)
            with f.range(0, dim) as d:
                part = f.reduce(f.select(mask, x * _lanes_at(f, kt, d, v), 0.0), "add")
                at = dq.at(r * pitch + d * 4)
                f.store(f.load(F32, at) + part, at)
    return f


def build_pack_tile(m: Module) -> Function:
    """pack_tile(P, dS, nr, P pairs, dS pairs, dS_n): a float32 tile of nr rows as what `gradient` makes of it."""
    with m.function("pack_tile", [PTR, PTR, I64, PTR, PTR, PTR]) as f:
        p, ds, nr, p_out, ds_out, rows_out = f.args
        with f.range(nr * ROW, _TILE, VEC.bytes) as o:
            f.store(f.const(0.0, VEC), p, o)
            f.store(f.const(0.0, VEC), ds, o)
        with f.range(0, WIDTH // STRIP) as n, f.range(0, LANES) as i:
            for source, to in ((p, p_out), (ds, ds_out)):
                low = source.at((n * STRIP + i) * ROW)
                for v in range(VECTORS):
                    x, y = (rounded(f, f.load(VEC, low, half * LANES * ROW + v * VEC.bytes)) for half in (0, 1))
                    f.store(pack(x, y), to, (n * LANES + i) * ROW + v * VEC.bytes)
        with f.range(0, WIDTH) as r:
            for n in (0, 1):
                x, y = (rounded(f, f.load(VEC, ds, r * ROW + (2 * n + v) * VEC.bytes)) for v in (0, 1))
                f.store(pack(x, y), rows_out, r * HALF_ROW + n * 64)
    return f


def build_steps(m: Module, block: Blocking) -> Function:
    """steps(tile, kind, bad, bits, scratch) -> kind: S and dP in at_raw and at_tmp become P and dS, P with dropout.

    kind: class of mask_bits; bad: Q, K, V or dO hold a number that is not finite, and then bits become those of pairs
    that count, and the answer is PARTIAL. The functions are those that `backward_tile.build_tile` wrote before.
    """
    known = {f.name: f for f in m.functions}
    with m.function("half_steps", [*TILE_ARGS, I64, I64, PTR, PTR], I64) as f:
        where, (kind, bad, bits, scratch) = f.args[:-4], f.args[-4:]
        scope, nr = Scope(f, block, f.args[0], scratch), f.args[5]
        s, dp, raw = scope.buffer("at_raw"), scope.buffer("at_tmp"), scope.buffer("at_out")
        tmp, drop, result = raw.at(_TILE), raw.at(2 * _TILE), f.var(I64, kind)
        has_scores, dropout = scope.read("has_scores").ne(0), scope.read("dropout").ne(0)
        kept, scale = scope.floating("dropout_scale"), f.splat(scope.floating("scale"), LANES)
        with f.range(0, nr * ROW, VEC.bytes) as o:
            f.store(f.load(VEC, s, o) * scale, s, o)
        with f.when(has_scores):
            f.call(known["copy"], s, raw, nr)
            f.call(known["scores_forward"], *where, s)
        with f.when(bad.ne(0)):
            f.call(known["step_hide"], s, bits, kind, nr)
            result.set(PARTIAL)
        f.call(known["step_probabilities"], s, scope.buffer("at_lse"), bits, result.get(), nr)
        with f.when(dropout):
            f.call(known["dropout_bits"], *where, drop)
            f.call(known["step_drop"], dp, drop, kept, nr)
        f.call(known["step_gradients"], s, dp, scope.buffer("at_delta"), bits, bad, nr)
        with f.when(has_scores):
            for stage in (USER, SOFTCAP):
                f.call(known["scores_backward"], *where, raw, dp, tmp, stage)
        with f.when(dropout):
            f.call(known["step_drop"], s, drop, kept, nr)
        f.ret_value(result.get())
    return f


@dataclass(frozen=True)
class StepParts:
    """The emitted functions."""

    steps: Function
    pack_tile: Function
    all_bits: Function
    exact_scores: Function
    exact_sums: Function
    exact_dq: Function


def build_step_parts(m: Module, block: Blocking) -> StepParts:
    """All of them."""
    return StepParts(
        build_steps(m, block),
        build_pack_tile(m),
        build_all_bits(m),
        build_exact_scores(m),
        build_exact_sums(m),
        build_exact_dq(m),
    )
