"""Tile steps of the bfloat16 backward that multiplies pairs: packing and the softmax gradient.

A tile is 64 queries by 64 keys, lanes are keys. A product reads pairs of neighbours along the reduction as 32-bit
words, and in which order the reduction runs is free: pairs are always 16 rows (or keys) apart, so that two vectors
make a vector of pairs by a shift and a blend. With r = 32 n + l, l < 16, word l of block n is the pair (r, r + 16):

    K pairs, P, dS   int32 [32 pairs of rows][columns]       operands B
    Q^T, dO^T, dS_n  int32 [columns or rows][32 pairs]       operands A
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kilat.backends.cpu.emit import F32, I16, I32, I64, PTR, Function, Module, Value
from kilat.backends.cpu.math import LOG2_E, polynomial, transpose
from kilat.backends.cpu.rows import PREFETCH_ROWS, build_transpose
from kilat.backends.cpu.tiles import from_bits

RunJob = Callable[[Function, Value], None]  # writes the code for the job at an address
LANES, VECTORS = 16, 4
WIDTH = 64  # queries and keys of a tile
STRIP = 32  # queries whose scores stand in scratch at a time
ROW = WIDTH * 4  # bytes of a row of scores, of pairs and of dK^T and dV^T
HALF_ROW = WIDTH * 2  # bytes of a row of Q^T, dO^T and dS_n
VEC, WORDS = F32.vec(LANES), I32.vec(LANES)
NAN, INF = 1, 2  # flags of rows that hold such a number
BLOCK = 32  # rows and columns of C that a job of a product fills

# 2^r = 1 + c1 r + ... on 0 <= r < 1, fitted as the coefficients in `math`: relative error 3e-6, below that of P
_EXP2 = (0.6930448457983823, 0.2412801917695691, 0.052242506127099034, 0.013426664124870993)
HIGH = -65536
JOB_BYTES = 64  # of the record of a job, see backward_half_products


# ---- packing ---------------------------------------------------------------------------------------------------------
def build_load_half(m: Module) -> Function:
    """load_half(base, stride, rows, dst, pitch, dim) -> NAN and INF flags: 64 bfloat16 rows as they are.

    dst[r][0 : pitch / 2] = row r, zero behind dim and behind `rows`; pitch is a multiple of 64 bytes.
    """
    wide = I16.vec(32)
    with m.function("load_half", [PTR, I64, I64, PTR, I64, I64], I64) as f:
        base, stride, rows, dst, pitch, dim = f.args
        whole, nans, infinities = dim & -32, f.var(I32, 0), f.var(I32, 0)
        tail = f.iota(wide) < f.splat(f.cast("trunc", dim - whole, I16), 32)

        def put(x: Value, to: Value) -> None:
            magnitude = x & 0x7FFF
            nans.set(nans.get() | f.bitcast(magnitude > 0x7F80, I32))
            infinities.set(infinities.get() | f.bitcast(magnitude.eq(0x7F80), I32))
            f.store(x, to)

        with f.range(0, rows) as r:
            src, to = base.at(r * stride), dst.at(r * pitch)
            ahead = src.at(stride * PREFETCH_ROWS)
            with f.range(0, whole * 2, 64) as o:
                f.prefetch(ahead.at(o))
                put(f.load(wide, src, o), to.at(o))
            with f.when(whole < dim):
                put(f.masked_load(wide, src.at(whole * 2), tail), to.at(whole * 2))
        with f.range(rows * pitch, pitch * WIDTH, 64) as o:
            f.store(f.const(0, wide), dst, o)
        zero = f.const(0, I64)
        flags = (f.select(x.get().ne(0), f.const(n, I64), zero) for x, n in ((nans, NAN), (infinities, INF)))
        f.ret_value(next(flags) | next(flags))
    return f


def pack(low: Value, high: Value) -> Value:
    """Two vectors of float32 bits, already with half a unit added, as one vector of bfloat16 pairs."""
    return (low >> 16) | (high & HIGH)


def rounded(f: Function, x: Value) -> Value:
    """float32 bits plus half a unit of bfloat16: cut, they are rounded to nearest, ties away from zero.

    A NaN stays one, since those that arithmetic makes have their low bits clear.
    """
    return f.bitcast(x, WORDS) + 0x8000


def build_columns(m: Module) -> Function:
    """columns(src, pitch, dst, words): Q^T or dO^T of 64 rows of `words` 32-bit words (a multiple of 16)."""
    with m.function("columns", [PTR, I64, PTR, I64]) as f:
        src, pitch, dst, words = f.args
        with f.range(0, words, LANES) as w, f.range(0, 2) as n:
            for odd in (0, 1):
                rows = []
                for i in range(LANES):
                    at = src.at((n * BLOCK + i) * pitch + w * 4)
                    one, two = f.load(WORDS, at), f.load(WORDS, at.at(pitch * 16))
                    rows.append(pack(one, two) if odd else (one & 0xFFFF) | (two << 16))
                for i, row in enumerate(transpose(f, rows)):
                    f.store(row, dst.at((w + i) * (2 * HALF_ROW) + n * 64), odd * HALF_ROW)
    return f


def build_pairs(m: Module) -> Function:
    """pairs(src, pitch, dst): 64 bfloat16 rows of `pitch` bytes as int32 [32 pairs of rows][pitch / 2]."""
    with m.function("pairs", [PTR, I64, PTR]) as f:
        src, pitch, dst = f.args
        with f.range(0, 2) as n, f.range(0, LANES) as i, f.range(0, pitch, 32) as o:
            at = src.at((n * BLOCK + i) * pitch + o)
            low, high = (
                f.cast("zext", f.load(I16.vec(LANES), x), WORDS) for x in (at, at.at(pitch * 16))
            )  # fmt: skip
            f.store(low | (high << 16), dst.at((n * LANES + i) * pitch * 2), o * 2)
    return f


# ---- softmax gradient ------------------------------------------------------------------------------------------------
def probability(f: Function, s: Value, scale: Value, lse: Value, mask: Value | None) -> Value:
    """p = exp(scale s - lse), at most 1 also where s was rounded up; 0 where the mask (int16) is clear; NaN stays NaN.

    2^x = 2^floor(x) p(x - floor(x)) in AVX-512's own instructions.
    """
    x = f.minimum(f.const(0.0, VEC), f.fma(s, scale, -lse)) * LOG2_E
    everything, current, down = f.const(-1, I16), f.const(4, I32), f.const(9, I32)
    r = f.intrinsic("llvm.x86.avx512.mask.reduce.ps.512", VEC, x, down, x, everything, current)
    p = polynomial(f, r, [1.0, *_EXP2])
    kept = everything if mask is None else mask
    return f.intrinsic("llvm.x86.avx512.mask.scalef.ps.512", VEC, p, x, f.const(0.0, VEC), kept, current)


def build_gradient(m: Module, masked: bool, run_job: RunJob) -> Function:
    """gradient(S, dP, lse, delta, bits, scale, P, dS, dS_n, jobs, n, more, n_more): a strip of 32 queries.

    P = exp(scale S - lse), dS = P (dP - delta), both 0 where a bit is clear. P and dS: 16 rows of pairs of queries;
    dS_n: 32 rows of pairs of keys. lse, delta and bits start at the strip. Between its rows it does n jobs, then
    n_more: AMX's tile unit works on them while the vector ports take exponentials.
    """
    with m.function("gradient_masked" if masked else "gradient", [PTR] * 5 + [F32] + [PTR] * 4 + [I64, PTR, I64]) as f:
        s, dp, lse, delta, bits, factor, p_out, ds_out, rows_out, jobs, n_jobs, more, n_more = f.args
        total, rest = n_jobs + n_more, more.at(n_jobs * -JOB_BYTES)
        scale = f.splat(factor, LANES)
        with f.range(0, LANES) as i:
            with f.range((i * total) >> 4, ((i + 1) * total) >> 4) as n:
                run_job(f, f.select(n < n_jobs, jobs, rest).at(n * JOB_BYTES))
            ps: list[list[Value]] = [[], []]
            grads: list[list[Value]] = [[], []]
            for half in (0, 1):
                r = i + 16 * half
                row_lse, row_delta = (f.splat(f.load(F32, x, r * 4), LANES) for x in (lse, delta))
                for v in range(VECTORS):
                    o = r * ROW + v * VEC.bytes
                    mask = f.load(I16, bits, r * (2 * VECTORS) + 2 * v) if masked else None
                    p = probability(f, f.load(VEC, s, o), scale, row_lse, mask)
                    ds = p * (f.load(VEC, dp, o) - row_delta)
                    if mask is not None:  # a masked pair contributes nothing even if its dp is no number
                        ds = f.select(from_bits(f, mask, LANES), ds, 0.0)
                    ps[half].append(rounded(f, p))
                    grads[half].append(rounded(f, ds))
            for v in range(VECTORS):
                f.store(pack(ps[0][v], ps[1][v]), p_out, i * ROW + v * VEC.bytes)
                f.store(pack(grads[0][v], grads[1][v]), ds_out, i * ROW + v * VEC.bytes)
            for half in (0, 1):
                for n in (0, 1):
                    pair = pack(grads[half][2 * n], grads[half][2 * n + 1])
                    f.store(pair, rows_out, (i + 16 * half) * HALF_ROW + n * 64)
    return f


def build_add_block(m: Module) -> Function:
    """add_rows_to(src, src_pitch, dst, dst_pitch, rows, bytes): dst[r] += src[r], float32 rows of whole vectors."""
    with m.function("add_rows_to", [PTR, I64, PTR, I64, I64, I64]) as f:
        src, src_pitch, dst, dst_pitch, rows, size = f.args
        with f.range(0, rows) as r, f.range(0, size, VEC.bytes) as o:
            to = dst.at(r * dst_pitch)
            f.store(f.load(VEC, to, o) + f.load(VEC, src.at(r * src_pitch), o), to, o)
    return f


@dataclass(frozen=True)
class HalfParts:
    """The emitted functions."""

    load: Function
    columns: Function
    transpose_words: Function
    pairs: Function
    gradient: Function
    gradient_masked: Function
    add_block: Function


def build_half_parts(m: Module, run_job: RunJob) -> HalfParts:
    """All of them; `run_job` writes the code that does a job."""
    return HalfParts(
        load=build_load_half(m),
        columns=build_columns(m),
        transpose_words=build_transpose(m, I32, LANES, "transpose_words"),
        pairs=build_pairs(m),
        gradient=build_gradient(m, masked=False, run_job=run_job),
        gradient_masked=build_gradient(m, masked=True, run_job=run_job),
        add_block=build_add_block(m),
    )
