"""Products of bfloat16 tiles with float32 sums, by AMX tiles or by the AVX-512 dot instruction.

Both read a pair of neighbours along the reduction as one 32-bit lane:

    C[m][n] += sum_k A[m][2k] B[k][n].low + A[m][2k + 1] B[k][n].high

A is row-major bfloat16, B holds pairs (int32 [k / 2][n]), C is float32 [m][n]. The caller pads every extent with zeros
to whole blocks of BLOCK rows and columns and STEP numbers along the reduction.
"""

from __future__ import annotations

from kilat.backends.cpu.emit import BF16, F32, I8, I16, I32, I64, PTR, VOID, Function, Module, Value, Var

BLOCK = 32  # multiple of rows and of columns of C
STEP = 32  # bfloat16 numbers along the reduction: one row of a tile
TILES = 2  # of C side by side, a block of 16 rows and 32 columns
_ROWS = 16
_LANES = 16
_TILE_BYTES = 64
# Only four of the eight tile registers are used: C, C, A, B. Two hardware threads of a core share the registers behind
# them, and with all eight in use by both nothing is left to rename to: a tile product then takes 70 cycles instead of
# 16. With four it takes 31 at worst (measured on Emerald Rapids).
_A, _B = 2, 3


def configure_tiles(f: Function, used: int = _B + 1) -> None:
    """The first `used` tiles of 16 rows by 64 bytes each; to be undone by `release_tiles` on the same thread."""
    config = f.var(I8.vec(64), 0)
    widths, rows = [_TILE_BYTES, 0] * used, [_ROWS] * used
    values = [1, 0] + [0] * 14 + widths + [0] * (32 - 2 * used) + rows + [0] * (16 - used)
    config.set(f.const_vector(values, I8))
    f.intrinsic("llvm.x86.ldtilecfg", VOID, Value(f, config.name, PTR))


def release_tiles(f: Function) -> None:
    """Give the tile state back, so that the thread's later context switches stay cheap."""
    f.intrinsic("llvm.x86.tilerelease", VOID)


def _tile(f: Function, number: int) -> Value:
    return f.const(number, I8)


def tile_zero(f: Function, t: int) -> None:
    """Tile t of C becomes 0."""
    f.intrinsic("llvm.x86.tilezero", VOID, _tile(f, t))


def tile_load(f: Function, t: int, c: Value, pitch: Value) -> None:
    """Load tile t of a block of C."""
    f.intrinsic("llvm.x86.tileloadd64", VOID, _tile(f, t), c.at(t * _TILE_BYTES), pitch)


def tile_store(f: Function, t: int, c: Value, pitch: Value) -> None:
    """Store tile t of a block of C."""
    f.intrinsic("llvm.x86.tilestored64", VOID, _tile(f, t), c.at(t * _TILE_BYTES), pitch)


def tile_product(f: Function, t: int, a: Value, a_pitch: Value, b: Value, b_pitch: Value) -> None:
    """Tile t of C += A B for A[16][STEP] and B[STEP / 2 pairs][32]; to be called for t = 0 and then 1."""
    if t == 0:
        f.intrinsic("llvm.x86.tileloadd64", VOID, _tile(f, _A), a, a_pitch)
    f.intrinsic("llvm.x86.tileloadd64", VOID, _tile(f, _B), b.at(t * _TILE_BYTES), b_pitch)
    f.intrinsic("llvm.x86.tdpbf16ps", VOID, _tile(f, t), _tile(f, _A), _tile(f, _B))


def build_dot_amx(m: Module, name: str, accumulate: bool) -> Function:
    """dot(A, a_pitch, B, b_pitch, C, c_pitch, rows, columns, k): C (+)= A B, by blocks of 16 x 32; pitches in bytes."""
    with m.function(name, [PTR, I64, PTR, I64, PTR, I64, I64, I64, I64]) as f:
        a, a_pitch, b, b_pitch, c, c_pitch, rows, columns, k = f.args
        with f.range(0, rows, _ROWS) as i, f.range(0, columns, BLOCK) as j:
            corner = c.at(i * c_pitch + j * 4)
            for t in range(TILES):
                if accumulate:
                    tile_load(f, t, corner, c_pitch)
                else:
                    tile_zero(f, t)
            with f.range(0, k, STEP) as kk:
                left, right = a.at(i * a_pitch + kk * 2), b.at((kk >> 1) * b_pitch + j * 4)
                for t in range(TILES):
                    tile_product(f, t, left, a_pitch, right, b_pitch)
            for t in range(TILES):
                tile_store(f, t, corner, c_pitch)
    return f


def dot_steps(
    f: Function,
    acc: list[list[Var]],
    a: Value,
    a_pitch: Value,
    b: Value,
    b_pitch: Value,
    pairs: Value | int,
    unroll: int,
) -> None:
    """acc[r][v] += sum over pairs of A[r][pair] . B[pair][v], by vdpbf16ps; pairs is a multiple of `unroll`."""
    vec, half = F32.vec(_LANES), BF16.vec(2 * _LANES)
    rows = [a.at(r * a_pitch) for r in range(len(acc))]
    with f.range(0, pairs, unroll) as n:
        for u in range(unroll):
            right = b.at((n + u) * b_pitch)
            ys = [f.bitcast(f.load(I32.vec(_LANES), right, v * vec.bytes), half) for v in range(len(acc[0]))]
            for r, row in enumerate(rows):
                x = f.bitcast(f.splat(f.load(I32, row, n * 4 + 4 * u), _LANES), half)
                for v, y in enumerate(ys):
                    acc[r][v].set(f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", vec, acc[r][v].get(), x, y))


def build_dot_avx512(m: Module, name: str, accumulate: bool) -> Function:
    """The same as `build_dot_amx` by vdpbf16ps, 4 rows x 4 vectors (2 vectors where 64 columns are not left)."""
    vec = F32.vec(_LANES)
    with m.function(name, [PTR, I64, PTR, I64, PTR, I64, I64, I64, I64]) as f:
        a, a_pitch, b, b_pitch, c, c_pitch, rows, columns, k = f.args
        wide = columns - columns % 64

        def block(i: Value, j: Value, vectors: int) -> None:
            acc = [[f.var(vec, 0.0) for _ in range(vectors)] for _ in range(4)]
            dot_steps(f, acc, a.at(i * a_pitch), a_pitch, b.at(j * 4), b_pitch, k >> 1, unroll=1)
            for r in range(4):
                for v in range(vectors):
                    at = (i + r) * c_pitch + j * 4 + v * vec.bytes
                    new = acc[r][v].get()
                    f.store(f.load(vec, c, at) + new if accumulate else new, c, at)

        with f.range(0, rows, 4) as i:
            with f.range(0, wide, 64) as j:
                block(i, j, 4)
            with f.range(wide, columns, BLOCK) as j:
                block(i, j, 2)
    return f


def pack_pairs(f: Function, low: Value, high: Value) -> Value:
    """Two float32 vectors rounded to bfloat16 and interleaved: int32 lanes, `low` in the low halves.

    Adds half a unit and cuts: rounds to nearest, ties away from zero, one instruction less than to even; NaN with its
    low bits clear stays NaN.
    """
    t = low.type.like(I32)
    halves = [f.bitcast(f.bitcast(x, t) + 0x8000, I16.vec(2 * t.lanes)) for x in (low, high)]
    lanes = [n for i in range(t.lanes) for n in (2 * i + 1, 2 * t.lanes + 2 * i + 1)]
    return f.bitcast(f.shuffle(halves[0], halves[1], lanes), t)
