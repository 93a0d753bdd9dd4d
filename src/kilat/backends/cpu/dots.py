"""Products of bfloat16 tiles with float32 sums, by AMX tiles or by the AVX-512 dot instruction.

Both read a pair of neighbours along the reduction as one 32-bit lane:

    C[m][n] += sum_k A[m][2k] B[k][n].low + A[m][2k + 1] B[k][n].high

A is row-major bfloat16, B holds pairs (int32 [k / 2][n]), C is float32 [m][n]. The caller pads every extent with zeros
to whole blocks of BLOCK rows and columns and STEP numbers along the reduction.
"""

from __future__ import annotations

from kilat.backends.cpu.emit import BF16, F32, I8, I16, I32, I64, PTR, VOID, Function, Module, Value

BLOCK = 32  # rows and columns of a block of C: 2 x 2 AMX tiles
STEP = 32  # bfloat16 numbers along the reduction: one row of a tile
_ROWS = 16
_LANES = 16
_TILE_BYTES = 64


def configure_tiles(f: Function) -> None:
    """Eight tiles of 16 rows by 64 bytes each; to be undone by `release_tiles` on the same thread."""
    config = f.var(I8.vec(64), 0)
    values = [1, 0] + [0] * 14 + [_TILE_BYTES, 0] * 8 + [0] * 16 + [_ROWS] * 8 + [0] * 8
    config.set(f.const_vector(values, I8))
    f.intrinsic("llvm.x86.ldtilecfg", VOID, Value(f, config.name, PTR))


def release_tiles(f: Function) -> None:
    """Give the tile state back, so that the thread's later context switches stay cheap."""
    f.intrinsic("llvm.x86.tilerelease", VOID)


def _tile(f: Function, number: int) -> Value:
    return f.const(number, I8)


def _place(c: Value, pitch: Value, t: int) -> Value:
    """Tile t, of four, of a 32 x 32 block of C."""
    below = c.at(pitch * _ROWS) if t // 2 else c
    return below.at(_TILE_BYTES) if t % 2 else below


def tile_zero(f: Function, t: int) -> None:
    """Tile t of C becomes 0."""
    f.intrinsic("llvm.x86.tilezero", VOID, _tile(f, t))


def tile_load(f: Function, t: int, c: Value, pitch: Value) -> None:
    """Load tile t of a block of C."""
    f.intrinsic("llvm.x86.tileloadd64", VOID, _tile(f, t), _place(c, pitch, t), pitch)


def tile_store(f: Function, t: int, c: Value, pitch: Value) -> None:
    """Store tile t of a block of C."""
    f.intrinsic("llvm.x86.tilestored64", VOID, _tile(f, t), _place(c, pitch, t), pitch)


def tile_product(f: Function, t: int, a: Value, a_pitch: Value, b: Value, b_pitch: Value) -> None:
    """Tile t of C += A B for A[32][STEP] and B[STEP / 2 pairs][32]; to be called for t = 0, 1, 2, 3.

    Tiles 4 and 5 hold A[16 rows][32], 6 and 7 B[16 pairs][16 columns], each loaded when first needed.
    """
    for first, register, place, pitch in (
        (0, 4, a, a_pitch),
        (0, 6, b, b_pitch),
        (1, 7, b.at(_TILE_BYTES), b_pitch),
        (2, 5, a.at(a_pitch * _ROWS), a_pitch),
    ):
        if t == first:
            f.intrinsic("llvm.x86.tileloadd64", VOID, _tile(f, register), place, pitch)
    f.intrinsic("llvm.x86.tdpbf16ps", VOID, _tile(f, t), _tile(f, 4 + t // 2), _tile(f, 6 + t % 2))


def build_dot_amx(m: Module, name: str, accumulate: bool) -> Function:
    """dot(A, a_pitch, B, b_pitch, C, c_pitch, rows, columns, k): C (+)= A B, by 32 x 32 blocks; pitches in bytes."""
    with m.function(name, [PTR, I64, PTR, I64, PTR, I64, I64, I64, I64]) as f:
        a, a_pitch, b, b_pitch, c, c_pitch, rows, columns, k = f.args
        with f.range(0, rows, BLOCK) as i, f.range(0, columns, BLOCK) as j:
            corner = c.at(i * c_pitch + j * 4)
            for t in range(4):
                if accumulate:
                    tile_load(f, t, corner, c_pitch)
                else:
                    tile_zero(f, t)
            with f.range(0, k, STEP) as kk:
                left, right = a.at(i * a_pitch + kk * 2), b.at((kk >> 1) * b_pitch + j * 4)
                for t in range(4):
                    tile_product(f, t, left, a_pitch, right, b_pitch)
            for t in range(4):
                tile_store(f, t, corner, c_pitch)
    return f


def build_dot_avx512(m: Module, name: str, accumulate: bool) -> Function:
    """The same as `build_dot_amx` by vdpbf16ps, 4 rows x 4 vectors (2 vectors where 64 columns are not left)."""
    vec, pairs = F32.vec(_LANES), I32.vec(_LANES)
    half = BF16.vec(2 * _LANES)
    with m.function(name, [PTR, I64, PTR, I64, PTR, I64, I64, I64, I64]) as f:
        a, a_pitch, b, b_pitch, c, c_pitch, rows, columns, k = f.args
        wide = columns - columns % 64

        def block(i: Value, j: Value, vectors: int) -> None:
            acc = [[f.var(vec, 0.0) for _ in range(vectors)] for _ in range(4)]
            with f.range(0, k >> 1) as kk:
                right = b.at(kk * b_pitch + j * 4)
                ys = [f.bitcast(f.load(pairs, right, v * vec.bytes), half) for v in range(vectors)]
                for r in range(4):
                    x = f.bitcast(f.splat(f.load(I32, a.at((i + r) * a_pitch), kk * 4, 2), _LANES), half)
                    for v, y in enumerate(ys):
                        dot = f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", vec, acc[r][v].get(), x, y)
                        acc[r][v].set(dot)
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
