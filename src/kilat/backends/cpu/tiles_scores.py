"""scores_forward and scores_backward: softcap, ALiBi, bias and user scores on a score tile, in natural units.

    s0 = scale q.k    s1 = cap tanh(s0/cap)    s2 = s1 - slope |q_pos - j|    s3 = s2 + bias    s4 = user(s3) ...

Pairs outside nr x nb and pairs that the mask hides may hold anything before and after: the caller selects them away.
"""

from __future__ import annotations

import math

from kilat.backends.cpu.emit import BF16, F16, F32, F64, I16, I64, PTR, VOID, Function, Module, Operand, Type, Value
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import DTYPE_CODES, Geometry
from kilat.backends.cpu.math import absolute, tanh, widen
from kilat.backends.cpu.tiles import (
    TILE_ARGS,
    Cell,
    Tile,
    View,
    build_reader,
    check_geometry,
    for_each,
    for_each_vector,
    is_null,
    narrow,
    score_offset,
)

USER, SOFTCAP, USER_TENSORS = 1, 2, 3
"""Stages of scores_backward: the user scores; the softcap; the user scores and the gradients of their tensors."""

_SCORE_RECORD = 3 * 8  # forward function, backward function, environment pointer
_STORED = {"float32": F32, "float64": F64, "bfloat16": I16, "float16": I16}
_FLOAT_MAX = float.fromhex("0x1.fffffep+127")
# Conversions that need no float16 instruction, for callers that do not say what the machine has.
_PORTABLE = Isa("generic", "", "", 4, False, False)


def build_scores_forward(m: Module, geo: Geometry, isa: Isa = _PORTABLE) -> Function:
    """scores_forward(tile, S): apply every score modifier of the call in place, built-in ones first.

    S: compute type [outer][width]. isa: lets a float16 bias convert by instruction.
    """
    apply = _build_apply(m, geo, isa)
    with m.function("scores_forward", [*TILE_ARGS, PTR], VOID) as f:
        tile, s = Tile(f, geo), f.args[-1]
        f.call(apply, *tile.args, s, tile.read("n_scores"))
    return f


def build_scores_backward(m: Module, geo: Geometry, isa: Isa = _PORTABLE) -> Function:
    """scores_backward(tile, S_raw, dS, tmp, stage): the chain rule in place on dS.

    S_raw: scaled scores before any modifier; tmp: scratch of one tile. Stage USER turns the gradient of the last
    score into that of s3, so of the bias and of s1; stage SOFTCAP turns that into the gradient of S_raw. USER_TENSORS
    does what USER does and adds to the gradients of tensors of user scores on the way (not safe for two threads at a
    time). A dS that is zero stays zero whatever its score is, so hidden pairs stay out.
    """
    apply, users, softcap = _build_apply(m, geo, isa), _build_users_backward(m, geo), _build_softcap_backward(m, geo)
    with m.function("scores_backward", [*TILE_ARGS, PTR, PTR, PTR, I64], VOID) as f:
        tile = Tile(f, geo)
        raw, ds, tmp, stage = f.args[8:]
        n = tile.read("n_scores")
        with f.when(stage.ne(SOFTCAP)), f.range(0, n) as done:
            k = n - 1 - done
            _copy_tile(tile, raw, tmp)
            f.call(apply, *tile.args, tmp, k)
            f.call(users, *tile.args, tmp, ds, k, stage)
        with f.when(stage.eq(SOFTCAP) & tile.floating("softcap").ne(0.0)):
            f.call(softcap, *tile.args, raw, ds)
    return f


def _build_apply(m: Module, geo: Geometry, isa: Isa) -> Function:
    """scores_apply(tile, S, users): the built-in modifiers and the first `users` user scores, in place."""
    check_geometry(geo)
    for known in m.functions:
        if known.name == "scores_apply":
            return known
    softcap, alibi, bias = _build_softcap(m, geo), _build_alibi(m, geo), _build_bias(m, geo, isa)
    with m.function("scores_apply", [*TILE_ARGS, PTR, I64], VOID) as f:
        tile, s, users = Tile(f, geo), f.args[-2], f.args[-1]
        with f.when(tile.floating("softcap").ne(0.0)):
            f.call(softcap, *tile.args, s)
        with f.unless(is_null(f, tile.pointer("alibi"))):
            f.call(alibi, *tile.args, s)
        with f.unless(is_null(f, tile.pointer("bias"))):
            f.call(bias, *tile.args, s)
        with f.range(0, users) as k:
            record = tile.pointer("scores").at(k * _SCORE_RECORD)
            f.call_pointer(f.load(PTR, record), VOID, *tile.args, s, f.load(PTR, record, 16))
    return f


def _copy_tile(tile: Tile, source: Value, to: Value) -> None:
    f, geo = tile.f, tile.geo
    with f.range(0, tile.rows * geo.row_bytes, geo.vector.bytes) as o:
        f.store(f.load(geo.vector, source, o), to, o)


# ---- softcap ---------------------------------------------------------------------------------------------------------
def _cap(tile: Tile) -> tuple[Value, Value]:
    """The cap and its inverse in all lanes; the inverse of a tiny cap stays finite, so that 0 maps to 0."""
    f, lanes = tile.f, tile.geo.lanes
    cap = tile.floating("softcap")
    return f.splat(cap, lanes), f.splat(f.minimum(1.0 / cap, _FLOAT_MAX), lanes)


def _build_softcap(m: Module, geo: Geometry) -> Function:
    """softcap(tile, S): s = cap tanh(s / cap)."""
    with m.function("softcap", [*TILE_ARGS, PTR], VOID) as f:
        tile, s = Tile(f, geo), f.args[-1]
        cap, inverse = _cap(tile)

        def body(cell: Cell) -> None:
            at = s.at(score_offset(geo, cell.row, cell.column))
            f.store(tanh(f, f.load(geo.vector, at) * inverse) * cap, at)

        for_each(tile, body)
    return f


def _build_softcap_backward(m: Module, geo: Geometry) -> Function:
    """softcap_backward(tile, S_raw, dS): ds = ds (1 - tanh(s / cap)^2)."""
    with m.function("softcap_backward", [*TILE_ARGS, PTR, PTR], VOID) as f:
        tile, raw, ds = Tile(f, geo), f.args[-2], f.args[-1]
        _, inverse = _cap(tile)

        def body(cell: Cell) -> None:
            offset = score_offset(geo, cell.row, cell.column)
            t = tanh(f, f.load(geo.vector, raw, offset) * inverse)
            scale_gradient(f, ds.at(offset), (1.0 - t) * (1.0 + t))

        for_each(tile, body)
    return f


def scale_gradient(f: Function, at: Value, factor: Value) -> None:
    """The vector at `at` times factor; zeros stay zeros, for a hidden pair's score may be infinite or NaN."""
    ds = f.load(factor.type, at)
    f.store(f.select(ds.eq(0.0), ds, ds * factor), at)


# ---- ALiBi -----------------------------------------------------------------------------------------------------------
def _build_alibi(m: Module, geo: Geometry) -> Function:
    """alibi(tile, S): s = s - slope[b, h] |q_pos - j|, q_pos = i + kv_len - q_len."""
    with m.function("alibi", [*TILE_ARGS, PTR], VOID) as f:
        tile, s = Tile(f, geo), f.args[-1]
        at = tile.pointer("alibi").at(tile.b * tile.read("alibi_b") + tile.h * tile.read("alibi_h"))
        slope = f.splat(f.load(geo.compute, at), geo.lanes)
        shift = f.splat(narrow(f, tile.kv_len - tile.q_len), geo.lanes)

        def body(cell: Cell) -> None:
            distance = f.cast("sitofp", absolute(f, cell.i + shift - cell.j), geo.vector)
            at = s.at(score_offset(geo, cell.row, cell.column))
            f.store(f.fma(-slope, distance, f.load(geo.vector, at)), at)

        for_each(tile, body)
    return f


# ---- bias ------------------------------------------------------------------------------------------------------------
def _build_bias(m: Module, geo: Geometry, isa: Isa) -> Function:
    """bias(tile, S): s = s + bias[b, h, i, j], of any storage type and strides."""
    readers = {dtype: _build_bias_reader(m, geo, dtype, isa) for dtype in DTYPE_CODES}
    with m.function("bias", [*TILE_ARGS, PTR], VOID) as f:
        tile, s = Tile(f, geo), f.args[-1]
        stored = tile.read("bias_dtype")
        size, reader = f.const(0, I64), f.const(0, PTR)
        for dtype, code in DTYPE_CODES.items():
            this = stored.eq(code)
            size = f.select(this, f.const(_STORED[dtype].bytes, I64), size)
            reader = f.select(this, Value(f, f"@{readers[dtype].name}", PTR), reader)
        sb, sh, si, sj = (tile.read(f"bias_{axis}") for axis in "bhij")
        start = tile.offset(tile.pointer("bias"), (sb, sh, si, sj))
        row_stride, lane_stride = tile.by_row(si, sj)

        def read(p: Value, stride: Operand, count: Value) -> Value:
            return f.call_pointer(reader, geo.vector, p, f.coerce(stride, I64), count)

        def add(row: Value, column: Value, x: Value) -> None:
            at = s.at(score_offset(geo, row, column))
            f.store(f.load(geo.vector, at) + x, at)

        for_each_vector(tile, View(start, row_stride, lane_stride, size, read), add)
    return f


def _build_bias_reader(m: Module, geo: Geometry, dtype: str, isa: Isa) -> Function:
    """read_bias_<dtype>(p, stride, count) -> elements in the compute type."""

    def convert(f: Function, x: Value) -> Value:
        return to_compute(f, x, dtype, geo.compute, isa)

    return build_reader(m, f"read_bias_{dtype}", _STORED[dtype], geo.lanes, geo.compute, convert)


def to_compute(f: Function, x: Value, dtype: str, compute: Type, isa: Isa) -> Value:
    """Elements as loaded (halves as I16) in the compute type; a finite number stays finite."""
    if dtype in ("bfloat16", "float16"):
        x = widen(f, x, BF16 if dtype == "bfloat16" else F16, isa)
    t = x.type.like(compute)
    if x.type == t:
        return x
    if compute == F64:
        return f.cast("fpext", x, t)
    # The lowest float64 is a number, and must not become the -inf that hides a key.
    clamped = f.minimum(f.const(_FLOAT_MAX, x.type), f.maximum(f.const(-_FLOAT_MAX, x.type), x))
    return f.cast("fptrunc", f.select(absolute(f, x).eq(math.inf), x, clamped), t)


# ---- user scores -----------------------------------------------------------------------------------------------------
def _build_users_backward(m: Module, geo: Geometry) -> Function:
    """user_backward(tile, S, dS, k, stage): user score k, where S is its input and dS the gradient of its output.

    Its functions are called with (tile, S, dS, environment); the one for tensors stands first in the environment.
    """
    with m.function("user_backward", [*TILE_ARGS, PTR, PTR, I64, I64], VOID) as f:
        tile = Tile(f, geo)
        s, ds, k, stage = f.args[8:]
        record = tile.pointer("scores").at(k * _SCORE_RECORD)
        environment = f.load(PTR, record, 16)
        with f.when(stage.eq(USER_TENSORS)):
            tensors = f.load(PTR, environment)
            with f.unless(is_null(f, tensors)):
                f.call_pointer(tensors, VOID, *tile.args, s, ds, environment)
        f.call_pointer(f.load(PTR, record, 8), VOID, *tile.args, s, ds, environment)
    return f
