"""Softmax and AMX products of the bfloat16 forward woven into one instruction stream.

A unit is one query block and up to four strips of 32 keys. While the vector ports turn a strip's scores into P, the
tile unit works on jobs: the scores of the next strip, and the product P V of the unit before. A job is one step along
the reduction, a 16 x 32 block of C by 32 numbers: three tile loads and two tile products. They are spread between the
exponentials one by one, since a tile product keeps a vector port busy for 16 cycles, and a burst of them stalls what
follows (measured: 180 cycles for four products and then 16 vectors of exponentials, 138 interleaved).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kilat.backends.cpu.dots import TILES, pack_pairs, tile_load, tile_product, tile_store, tile_zero
from kilat.backends.cpu.emit import F32, I16, I32, I64, PTR, Function, Module, Type, Value, Var
from kilat.backends.cpu.forward_half_tiles import LANES, ROW, VEC, VECTORS
from kilat.backends.cpu.forward_tiles import LAZY_RISE, lane_bits
from kilat.backends.cpu.math import LOG2_E, polynomial
from kilat.backends.cpu.params import Params

STRIP = 32  # keys of a strip
STRIPS = 4  # of a unit
UNIT_KEYS = STRIP * STRIPS
_PAIRS = STRIP // 2
STRIP_BYTES = STRIP * ROW + 320  # a strip's scores, and a skew against equal addresses modulo 4096
VT_PITCH = UNIT_KEYS * 2

# 2^r = 1 + c1 r + ... on 0 <= r < 1, fitted as the coefficients in `math`: relative error 8e-8
_EXP2_FLOOR = (0.693151311807122, 0.24016445013634966, 0.05579991315014488, 0.009017030275293736, 0.0018671300868336837)
# Above this the rounding of the maximum would show beside the fused scores; such tiles are done step by step.
_LARGEST_MAXIMUM = 1e6

# What a job adds to: pointers to A, B and C and the pitch of A; one record for scores, one for P V.
_BASES = Params("a", "a_pitch", "b", "c")
_JOB = Params("a", "b", "c", "flags")
_ZERO, _LOAD, _STORE, _PRODUCT = 1, 2, 4, 8 * _BASES.size
_HEADER = 128  # bytes in front of the jobs
_JOB_BYTES = 8 * _JOB.size


def jobs_bytes(pad: int, pad_v: int) -> int:
    """Bytes of the job lists: scores of a strip, then P V over 1 to STRIPS strips."""
    product = pad_v // 16 * 2 * sum(range(1, STRIPS + 1))
    return _HEADER + (pad // 32 * 4 + product) * _JOB_BYTES


@dataclass(frozen=True)
class Stream:
    """The emitted functions."""

    prepare: Function
    drain: Function
    unit: dict[bool, Function]  # by masked


def build_stream(m: Module) -> Stream:
    """All functions of this module."""
    return Stream(_build_prepare(m), _build_drain(m), {x: _build_unit(m, x) for x in (False, True)})


def score_count(dim: Value) -> Value:
    """Number of jobs of a strip's scores: 2 x 2 blocks, dim / 32 steps."""
    return dim >> 3


def product_blocks(dim_v: Value) -> Value:
    """Number of blocks of P V, each of as many jobs as there are strips."""
    return dim_v >> 3


def score_jobs(jobs: Value) -> Value:
    """Where the jobs of a strip's scores stand."""
    return jobs.at(_HEADER)


def product_jobs(f: Function, jobs: Value, dim: Value, dim_v: Value, strips: Value) -> Value:
    """Where the jobs of P V over `strips` strips stand; dim and dim_v are multiples of 32."""
    before = score_count(dim) + product_blocks(dim_v) * ((strips * (strips - 1)) >> 1)
    return jobs.at(before * _JOB_BYTES + _HEADER)


def set_bases(f: Function, jobs: Value, product: bool, a: Value, a_pitch: Value | int, b: Value, c: Value) -> None:
    """Where A, B and C of the score jobs, or of the P V jobs, lie from now on."""
    record = jobs.at(_PRODUCT if product else 0)
    for name, x in zip(_BASES.names, (a, f.coerce(a_pitch, I64), b, c), strict=True):
        f.store(x, record, 8 * _BASES.index[name])


def _build_prepare(m: Module) -> Function:
    """prepare_jobs(jobs, dim, dim_v): write the job lists; dim and dim_v are multiples of 32."""
    with m.function("prepare_jobs", [PTR, I64, I64]) as f:
        jobs, dim, dim_v = f.args
        at = f.var(I64, _HEADER)

        def job(a: Value, b: Value, c: Value, flags: Value) -> None:
            for name, x in zip(_JOB.names, (a, b, c, flags), strict=True):
                f.store(x, jobs, at.get() + 8 * _JOB.index[name])
            at.set(at.get() + _JOB_BYTES)

        def marks(step: Value, steps: Value, begin: int, more: int) -> Value:
            zero = f.const(0, I64)
            first = f.select(step.eq(0), f.const(begin, I64), zero)
            return first | f.select(step.eq(steps - 1), f.const(_STORE, I64), zero) | more

        steps = dim >> 5
        with f.range(0, STRIP, 16) as i, f.range(0, 2) as j, f.range(0, steps) as k:
            job(i * dim * 2 + k * 64, k * (16 * ROW) + j * 128, i * ROW + j * 128, marks(k, steps, _ZERO, 0))
        with f.range(1, STRIPS + 1) as n, f.range(0, dim_v, 16) as d, f.range(0, 2) as j, f.range(0, n) as k:
            job(d * VT_PITCH + k * 64, k * (16 * ROW) + j * 128, d * ROW + j * 128, marks(k, n, _LOAD, _PRODUCT))
    return f


class _Job:
    """One step of a 16 x 32 block of C, written tile by tile."""

    def __init__(self, f: Function, jobs: Value, job: Value) -> None:
        self.f, self.flags, self.row = f, _JOB.read(f, job, "flags"), f.const(ROW, I64)
        record = jobs.at(self.flags & _PRODUCT)
        self.pitch = _BASES.read(f, record, "a_pitch")
        self.a, self.b, self.c = (_BASES.pointer(f, record, n).at(_JOB.read(f, job, n)) for n in "abc")

    def has(self, flag: int) -> Value:
        return (self.flags & flag).ne(0)

    def work(self, t: int) -> None:
        """Tile t's part, all but the store."""
        f = self.f
        with f.when(self.has(_ZERO)):
            tile_zero(f, t)
        with f.when(self.has(_LOAD)):
            tile_load(f, t, self.c, self.row)
        tile_product(f, t, self.a, self.pitch, self.b, self.row)

    def run(self) -> None:
        """All of it."""
        for t in range(TILES):
            self.work(t)
        with self.f.when(self.has(_STORE)):
            for t in range(TILES):
                tile_store(self.f, t, self.c, self.row)


def _build_drain(m: Module) -> Function:
    """run_jobs(jobs, first, count): do these jobs at once."""
    with m.function("run_jobs", [PTR, PTR, I64]) as f:
        jobs, first, count = f.args
        with f.range(0, count * _JOB_BYTES, _JOB_BYTES) as o:
            _Job(f, jobs, first.at(o)).run()
    return f


def exp2_floor(f: Function, x: Value, mask: Value | None = None) -> Value:
    """2^x by AVX-512's own split, 2^floor(x) p(x - floor(x)): 0 and inf come out where they should, NaN stays NaN.

    Lanes whose mask bit (int16) is clear become 0.
    """
    everything, rounding = f.const(-1, I16), f.const(4, I32)
    floor = f.const(9, I32)  # round down, no exception
    r = f.intrinsic("llvm.x86.avx512.mask.reduce.ps.512", VEC, x, floor, x, everything, rounding)
    p = polynomial(f, r, [1.0, *_EXP2_FLOOR])
    kept = everything if mask is None else mask
    return f.intrinsic("llvm.x86.avx512.mask.scalef.ps.512", VEC, p, x, f.const(0.0, VEC), kept, rounding)


def _build_unit(m: Module, masked: bool) -> Function:
    """unit(jobs, S, turn, strips, P, bits, max, sum, first, factor, score_jobs, K, K_next, QT_next, PV, blocks, steps,
    far_k, far_k_stride, far_v, far_v_stride, dim_bytes) -> redo.

    S[turn] holds the first strip's scores. P = exp(factor * S - max) as pairs, sums are added to `sum`; the score jobs
    of the next strips run meanwhile and, if K_next is not null, those of the next unit's first strip; so do the P V
    jobs of the unit before: `blocks` blocks of `steps` jobs. Rows of K and V from far_k and far_v on are prefetched,
    `dim_bytes` of each (0 for none), one for every two keys. first: max is taken from the first strip. Returns 1 if
    some score exceeds max by so much that P must be formed again (nothing is committed then), else 0.
    """
    args = [PTR, PTR, I64, I64, PTR, PTR, PTR, PTR, I64, F32, I64, PTR, PTR, PTR, PTR, I64, I64]
    args += [PTR, I64, PTR, I64, I64]
    with m.function("unit_masked" if masked else "unit", args, I64) as f:
        jobs, s, turn, strips, p, bits, mp, lp, first, factor, n_scores, k, k_next, qt_next, pv, blocks, steps = f.args[
            :-5
        ]
        far_k, far_k_stride, far_v, far_v_stride, dim_bytes = f.args[-5:]
        vs = range(VECTORS)
        with f.when(first.ne(0)):
            _first_maximum(f, s.at(turn * STRIP_BYTES), bits if masked else None, mp, factor)
        scale = f.splat(factor * LOG2_E, LANES)
        minus = [f.var(VEC, f.load(VEC, mp, v * VEC.bytes) * -LOG2_E) for v in vs]
        sums = [f.var(VEC, 0.0) for _ in vs]
        pitch = _BASES.read(f, jobs, "a_pitch")
        per_strip = (blocks + (strips - 1)) // strips
        done = f.var(I64, 0)  # blocks of P V
        with f.range(0, strips) as t:
            here, there = (s.at(((turn + t + i) & 1) * STRIP_BYTES) for i in (0, 1))
            a, scores = f.var(PTR, k.at((t + 1) * STRIP * pitch)), f.var(I64, n_scores)
            with f.when(t.eq(strips - 1)):
                a.set(k_next)
                f.store(qt_next, jobs, 8 * _BASES.index["b"])
                scores.set(f.select(f.cast("ptrtoint", k_next, I64).ne(0), n_scores, 0))
            f.store(a.get(), jobs, 8 * _BASES.index["a"])
            f.store(there, jobs, 8 * _BASES.index["c"])
            part = f.maximum(f.minimum(blocks - done.get(), per_strip), 0) * steps
            start = pv.at(done.get() * steps * _JOB_BYTES - scores.get() * _JOB_BYTES)
            done.set(done.get() + per_strip)
            total, to_do = scores.get() + part, score_jobs(jobs)

            def put(row: Value, v: int, here: Value = here, t: Value = t) -> None:
                exps = []
                for half in (0, 1):
                    mask = None
                    if masked:
                        slot = (t * STRIP + row * 2 + half) * VECTORS + v
                        mask = f.load(I16, bits, slot * 2)
                    x = f.load(VEC, here, row * (2 * ROW) + half * ROW + v * VEC.bytes)
                    exps.append(exp2_floor(f, f.fma(x, scale, minus[v].get()), mask))
                    sums[v].add(exps[-1])
                f.store(pack_pairs(f, *exps), p, (t * _PAIRS + row) * ROW + v * VEC.bytes)

            def job_at(n: Value, scores: Var = scores, to_do: Value = to_do, start: Value = start) -> _Job:
                return _Job(f, jobs, f.select(n < scores.get(), to_do, start).at(n * _JOB_BYTES))

            late = f.var(PTR, 0)  # the block of C whose tiles wait to be stored

            def store_late(tiles: Iterable[int], late: Var = late) -> None:
                with f.when(f.cast("ptrtoint", late.get(), I64).ne(0)):
                    for n in tiles:
                        tile_store(f, n, late.get(), f.const(ROW, I64))

            with f.range(0, _PAIRS) as row:
                key = t * _PAIRS + row
                with f.range(0, dim_bytes, 64) as o:
                    f.prefetch(far_k.at(key * far_k_stride + o))
                    f.prefetch(far_v.at(key * far_v_stride + o))
                for side in range(VECTORS // TILES):
                    turn_of = row * (VECTORS // TILES) + side
                    n, stop = f.var(I64, (turn_of * total) >> 5), ((turn_of + 1) * total) >> 5
                    busy, mine = n.get() < stop, [side * TILES + x for x in range(TILES)]
                    with f.when(busy):
                        with f.range(n.get() + 1, stop) as _:
                            store_late(range(TILES))
                            late.set(f.const(0, PTR))
                            job_at(n.get()).run()
                            n.set(n.get() + 1)
                        job = job_at(n.get())
                        for tile, v in enumerate(mine):
                            store_late([tile])
                            job.work(tile)
                            put(row, v)
                        late.set(f.select(job.has(_STORE), job.c, f.const(0, PTR)))
                    with f.unless(busy):
                        for tile, v in enumerate(mine):
                            store_late([tile])
                            put(row, v)
                        late.set(f.const(0, PTR))
            store_late(range(TILES))
        f.ret_value(_commit(f, mp, lp, [x.get() for x in sums]))
    return f


def _first_maximum(f: Function, s: Value, bits: Value | None, mp: Value, factor: Value) -> None:
    """max = the largest visible score of a strip."""
    scale = f.splat(factor, LANES)
    tops = [f.var(VEC, -math.inf) for _ in range(VECTORS)]
    with f.range(0, STRIP) as n:
        for v, top in enumerate(tops):
            x = f.load(VEC, s, n * ROW + v * VEC.bytes) * scale
            if bits is not None:
                x = f.select(lane_bits(f, bits, n * VECTORS + v, LANES), x, -math.inf)
            top.set(f.maximum(x, top.get()))
    for v, top in enumerate(tops):
        f.store(top.get(), mp, v * VEC.bytes)


def _commit(f: Function, mp: Value, lp: Value, sums: list[Value]) -> Value:
    """Add the unit's sums; or return 1 if some p is too large, or max is no number that can be worked with.

    p above e^LAZY_RISE shows in the sum: all terms are positive. Rows that have seen nothing have max -inf, so that
    p = inf for any visible key.
    """
    redo = None
    for v, total in enumerate(sums):
        top = f.load(VEC, mp, v * VEC.bytes)
        unseen = (top < -_LARGEST_MAXIMUM) & total.ne(0.0)
        bad = (total > math.exp(LAZY_RISE)) | unseen | (top > _LARGEST_MAXIMUM)
        redo = bad if redo is None else redo | bad
    if redo is None:
        raise ValueError("sums must not be empty")
    any_redo = f.bitcast(redo, Type(f"i{LANES}")).ne(0)
    with f.unless(any_redo):
        for v, total in enumerate(sums):
            f.store(f.load(VEC, lp, v * VEC.bytes) + total, lp, v * VEC.bytes)
    return f.cast("zext", any_redo, I64)
