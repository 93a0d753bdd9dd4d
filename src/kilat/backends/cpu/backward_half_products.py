"""Products of the bfloat16 backward, by AMX tiles or by the AVX-512 dot instruction: the one thing that differs.

A product C (+)= A B is cut into jobs of 32 x 32 numbers of C, records that a loop or the softmax gradient works off.
A is bfloat16 [rows][k], B holds pairs along the reduction, int32 [k / 2][columns], C is float32; which pairs, says
backward_half_tiles. Extents are multiples of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kilat.backends.cpu.backward_half_tiles import BLOCK, HALF_ROW, JOB_BYTES, ROW, VEC, RunJob
from kilat.backends.cpu.dots import dot_steps
from kilat.backends.cpu.emit import I8, I64, PTR, VOID, Function, Module, Value, Var
from kilat.backends.cpu.params import Params

JOB = Params("a", "a_pitch", "b", "c", "k", "add")
_TILE_BYTES = 64 * HALF_ROW  # of dS_n of a key tile
# Rows of C that the dot instruction sums at a time: 8 x 2 vectors hide its latency and leave room for B.
_ROWS, _COLUMNS = 8, 2


@dataclass(frozen=True)
class Engine:
    """How to multiply: `run_job` writes the code for one job, the others are emitted functions."""

    amx: bool
    run_job: RunJob
    put_jobs: Function
    drain: Function
    dq: Function


def build_engine(m: Module, amx: bool) -> Engine:
    """The products of one module."""
    run_job = _run_job_amx if amx else _calls(_build_job_dots(m))
    dq = _build_dq_amx(m) if amx else _build_dq_dots(m)
    return Engine(amx, run_job, build_put_jobs(m), build_drain(m, run_job), dq)


def _calls(job: Function) -> RunJob:
    """Does a job by calling a function, where the code is too long to stand in every loop."""

    def run_job(f: Function, record: Value) -> None:
        f.call(job, record)

    return run_job


def build_drain(m: Module, run_job: RunJob) -> Function:
    """drain(jobs, count): do jobs at once."""
    with m.function("drain", [PTR, I64]) as f:
        jobs, count = f.args
        with f.range(0, count * JOB_BYTES, JOB_BYTES) as o:
            run_job(f, jobs.at(o))
    return f


def build_put_jobs(m: Module) -> Function:
    """put_jobs(jobs, A, a_pitch, B, C, rows, k, add): jobs of C[rows][64] (+)= A B, rows / 16 of them.

    A: bfloat16 [rows][k], B: int32 pairs [k / 2][64], C: float32 [rows][64]; rows and k are multiples of 32.
    """
    with m.function("put_jobs", [PTR, PTR, I64, PTR, PTR, I64, I64, I64]) as f:
        jobs, a, pitch, b, c, rows, k, add = f.args
        with f.range(0, rows, BLOCK) as i, f.range(0, 2) as j:
            job = jobs.at(((i >> 4) + j) * JOB_BYTES)
            values = (a.at(i * pitch), pitch, b.at(j * 128), c.at(i * ROW + j * 128), k, add)
            for name, x in zip(JOB.names, values, strict=True):
                f.store(x, job, 8 * JOB.index[name])
    return f


# ---- AMX -------------------------------------------------------------------------------------------------------------
def _number(f: Function, n: int) -> Value:
    return f.const(n, I8)


def _corners(c: Value, pitch: Value) -> list[Value]:
    """Tiles 0 to 3 of a 32 x 32 block of C."""
    below = c.at(pitch * 16)
    return [c, c.at(64), below, below.at(64)]


def _run_job_amx(f: Function, job: Value) -> None:
    """C (+)= A B for one 32 x 32 block of C; rows of B and C are ROW bytes apart."""
    a, b, c = (JOB.pointer(f, job, n) for n in "abc")
    pitch, row = JOB.read(f, job, "a_pitch"), f.const(ROW, I64)
    _block_load(f, c, row, JOB.read(f, job, "add"))
    with f.range(0, JOB.read(f, job, "k"), BLOCK) as kk:
        _product_step(f, a.at(kk * 2), pitch, b.at((kk >> 1) * ROW), row)
    _block_store(f, c, row)


def _block_load(f: Function, c: Value, pitch: Value, add: Value) -> None:
    """Tiles 0 to 3 become a 32 x 32 block of C if `add` is not 0, else 0."""
    with f.when(add.ne(0)):
        for t, place in enumerate(_corners(c, pitch)):
            f.intrinsic("llvm.x86.tileloadd64", VOID, _number(f, t), place, pitch)
    with f.when(add.eq(0)):
        for t in range(4):
            f.intrinsic("llvm.x86.tilezero", VOID, _number(f, t))


def _block_store(f: Function, c: Value, pitch: Value) -> None:
    """Tiles 0 to 3 go to a 32 x 32 block of C."""
    for t, place in enumerate(_corners(c, pitch)):
        f.intrinsic("llvm.x86.tilestored64", VOID, _number(f, t), place, pitch)


def _product_step(f: Function, a: Value, a_pitch: Value, b: Value, b_pitch: Value) -> None:
    """Tiles 0 to 3 += A B for 32 rows of A, 32 numbers along the reduction and 32 columns of B."""
    for t, place, pitch in ((4, a, a_pitch), (6, b, b_pitch), (7, b.at(64), b_pitch), (5, a.at(a_pitch * 16), a_pitch)):
        f.intrinsic("llvm.x86.tileloadd64", VOID, _number(f, t), place, pitch)
    for t, x, y in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
        f.intrinsic("llvm.x86.tdpbf16ps", VOID, _number(f, t), _number(f, x), _number(f, y))


def _build_dq_amx(m: Module) -> Function:
    """dq(slots, table, dS_n, K, dim, C, c_pitch, rows, add): C[rows][dim] (+)= sum over slots of dS_n K.

    Slot n holds dS_n of key tile table[n]; dim and rows are multiples of 32, `add` is 1 or 0.
    """
    with m.function("dq", _DQ_ARGS) as f:
        slots, table, ds, k, dim, c, c_pitch, rows, add = f.args
        half, k_pitch, k_tile = f.const(HALF_ROW, I64), dim * 4, dim * HALF_ROW
        with f.range(0, dim, BLOCK) as j, f.range(0, rows, BLOCK) as i:
            corner = c.at(i * c_pitch + j * 4)
            _block_load(f, corner, c_pitch, add)
            with f.range(0, slots) as n:
                left = ds.at(n * _TILE_BYTES + i * HALF_ROW)
                right = k.at(f.load(I64, table, n * 8) * k_tile + j * 4)
                for step in (0, 1):
                    _product_step(f, left.at(64 * step), half, right.at(k_pitch * (16 * step)), k_pitch)
            _block_store(f, corner, c_pitch)
    return f


_DQ_ARGS = [I64, PTR, PTR, PTR, I64, PTR, I64, I64, I64]


# ---- the AVX-512 dot instruction -------------------------------------------------------------------------------------
def _dot_block(f: Function, c: Value, c_pitch: Value, add: Value, products: Callable[[list[list[Var]]], None]) -> None:
    """8 rows x 2 vectors of C (+)= what `products` sums up from zero: sums on two levels keep errors small."""
    acc = [[f.var(VEC, 0.0) for _ in range(_COLUMNS)] for _ in range(_ROWS)]
    products(acc)
    with f.when(add.ne(0)):
        for r, row in enumerate(acc):
            for v, x in enumerate(row):
                x.set(f.load(VEC, c.at(r * c_pitch), v * VEC.bytes) + x.get())
    for r, row in enumerate(acc):
        for v, x in enumerate(row):
            f.store(x.get(), c.at(r * c_pitch), v * VEC.bytes)


def _build_job_dots(m: Module) -> Function:
    """job(record): C (+)= A B for one 32 x 32 block of C; rows of B and C are ROW bytes apart."""
    with m.function("job", [PTR]) as f:
        (job,) = f.args
        a, b, c = (JOB.pointer(f, job, n) for n in "abc")
        pitch, row = JOB.read(f, job, "a_pitch"), f.const(ROW, I64)
        pairs, add = JOB.read(f, job, "k") >> 1, JOB.read(f, job, "add")
        with f.range(0, BLOCK, _ROWS) as i:
            _dot_block(
                f, c.at(i * row), row, add, lambda acc: dot_steps(f, acc, a.at(i * pitch), pitch, b, row, pairs, 2)
            )
    return f


def _build_dq_dots(m: Module) -> Function:
    """The same as `_build_dq_amx`."""
    with m.function("dq", _DQ_ARGS) as f:
        slots, table, ds, k, dim, c, c_pitch, rows, add = f.args
        half, k_pitch, k_tile = f.const(HALF_ROW, I64), dim * 4, dim * HALF_ROW
        with f.range(0, dim, 16 * _COLUMNS) as j, f.range(0, rows, _ROWS) as i:

            def products(acc: list[list[Var]]) -> None:
                with f.range(0, slots) as n:
                    left = ds.at(n * _TILE_BYTES + i * HALF_ROW)
                    right = k.at(f.load(I64, table, n * 8) * k_tile + j * 4)
                    dot_steps(f, acc, left, half, right, k_pitch, BLOCK, 2)

            _dot_block(f, c.at(i * c_pitch + j * 4), c_pitch, add, products)
    return f
