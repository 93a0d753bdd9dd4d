"""Moving tiles between the caller's tensors and scratch: conversion, padding, transposition.

Scratch tiles are compute type, rows padded with zeros to a multiple of the lanes, so that no kernel behind them knows
about head sizes, strides, page tables or storage types.
"""

from __future__ import annotations

from kilat.backends.cpu.emit import BF16, F16, F32, F64, I8, I16, I32, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import DTYPE_CODES, QUANTISED_CODES
from kilat.backends.cpu.math import narrow, transpose, widen, widen_fp8
from kilat.backends.cpu.params import Params

# Rows of one head lie heads * dim apart, often a page, where hardware prefetchers stop.
PREFETCH_ROWS = 64

_HALF = {"bfloat16": BF16, "float16": F16}
_ELEM = {"float32": F32, "bfloat16": I16, "float16": I16, "float64": F64, "float8_e4m3fn": I8, "int8": I8}
_CODES = DTYPE_CODES | QUANTISED_CODES


def stored_types(compute: Type) -> tuple[str, ...]:
    """Storage types that a kernel computing in `compute` reads and writes."""
    return ("float64", "float32") if compute == F64 else ("float32", "bfloat16", "float16", "float64")


def _widen(f: Function, x: Value, name: str, compute: Type, isa: Isa) -> Value:
    if name in _HALF:
        x = widen(f, x, _HALF[name], isa)
    elif name == "float8_e4m3fn":
        x = widen_fp8(f, x)
    elif name == "int8":
        x = f.cast("sitofp", f.cast("sext", x, x.type.like(I32)), x.type.like(F32))
    if x.type.scalar == compute:
        return x
    return f.cast("fpext" if compute == F64 else "fptrunc", x, x.type.like(compute))


def _narrow(f: Function, x: Value, name: str, isa: Isa) -> Value:
    if name in _HALF:
        return narrow(f, x, _HALF[name], isa)
    want = _ELEM[name]
    if x.type.scalar == want:
        return x
    return f.cast("fpext" if want == F64 else "fptrunc", x, x.type.like(want))


def lane_mask(f: Function, lanes: int, live: Value) -> Value:
    """The first `live` lanes."""
    n = f.splat(f.cast("trunc", live, I32), lanes)
    return f.iota(I32.vec(lanes)) < n


def ring_row(f: Function, j: Value, first: Value, ring: Value) -> Value:
    """The row of token j: the first ones stay, the others go round in `ring` rows behind them; 0: no ring."""
    row = f.var(I64, j)
    with f.when(ring.ne(0) & (j >= first)):
        row.set(first + (j - first) % ring)
    return row.get()


def row_place(f: Function, j: Value, pages: Value, page_size: Value) -> tuple[Value, Value]:
    """(page, row in it) of row j by `pages` (int32 table of a sequence); (0, j) where that is null."""
    page, row = f.var(I64, 0), f.var(I64, j)
    with f.unless(f.cast("ptrtoint", pages, I64).eq(0)):
        page.set(f.cast("sext", f.load(I32, pages, j // page_size * 4), I64))
        row.set(j % page_size)
    return page.get(), row.get()


def row_offset(f: Function, j: Value, stride: Value, pages: Value, page_size: Value, page_stride: Value) -> Value:
    """Bytes from the base to row j, wherever its page lies."""
    page, row = row_place(f, j, pages, page_size)
    return page * page_stride + row * stride


def build_load_rows(m: Module, compute: Type, lanes: int, isa: Isa, *, cached: bool = False) -> Function:
    """load_rows(base, stride, pages, page_size, page_stride, first, rows, pad, dst, dim, scale, code).

    dst[r][0 : round_up(dim, lanes)] = scale * row r, zero behind dim; rows from `rows` up to `pad` are zeroed. Returns
    1 if some number is not finite. Row r comes from base + (first + r) * stride, or, with pages (int32 table of this
    sequence) not null, from base + pages[(first + r) / page_size] * page_stride + ((first + r) % page_size) * stride.

    cached: further arguments (ring_first, ring, scales, scale_stride, scale_page), see `ring_row`. The last three say
    in the same way where the float32 lies that a row of float8_e4m3fn or int8 is multiplied by; other types read none.
    """
    args = [PTR, I64, PTR, I64, I64, I64, I64, I64, PTR, I64, compute, I64]
    vec = compute.vec(lanes)
    name = "load_cached_rows" if cached else "load_rows"
    with m.function(name, [*args, I64, I64, PTR, I64, I64] if cached else args, I64) as f:
        base, stride, pages, page_size, page_stride, first, rows, pad, dst, dim, scale, code, *more = f.args
        whole, pitch = dim - dim % lanes, (dim + (lanes - 1)) // lanes * vec.bytes
        factor = f.splat(scale, lanes)
        tail = lane_mask(f, lanes, dim - whole)
        bits = (I64 if compute == F64 else I32).vec(lanes)
        bad = f.var(bits, 0)

        def put(x: Value, to: Value, name: str, step: Value | None) -> None:
            x = _widen(f, x, name, compute, isa)
            x = x if step is None else x * step
            bad.set(bad.get() | f.bitcast(x - x, bits))  # x - x is +0, or NaN for inf and NaN
            f.store(x * factor, to)

        for name in (*stored_types(compute), *(QUANTISED_CODES if cached else ())):
            elem = _ELEM[name]
            with f.when(code.eq(_CODES[name])), f.range(0, rows) as r:
                j = ring_row(f, first + r, *more[:2]) if cached else first + r
                page, row = row_place(f, j, pages, page_size)
                src, to, step = base.at(page * page_stride + row * stride), dst.at(r * pitch), None
                if name in QUANTISED_CODES:
                    step = _step(f, more[2].at(page * more[4] + row * more[3]), vec)
                ahead = src.at(stride * PREFETCH_ROWS)
                with f.range(0, whole, lanes) as d:
                    f.prefetch(ahead.at(d * elem.bytes))
                    put(f.load(elem.vec(lanes), src, d * elem.bytes), to.at(d * compute.bytes), name, step)
                with f.when(whole < dim):
                    x = f.masked_load(elem.vec(lanes), src.at(whole * elem.bytes), tail)
                    put(x, to.at(whole * compute.bytes), name, step)
        with f.range(rows * pitch, pad * pitch, vec.bytes) as o:
            f.store(f.const(0.0, vec), dst, o)
        f.ret_value(f.cast("zext", f.bitcast(bad.get().ne(0), Type(f"i{lanes}")).ne(0), I64))
    return f


def place_of(f: Function, names: Params, p: Value, name: str, b: Value, kv_head: Value) -> tuple[Value, ...]:
    """The last arguments of a cached `load_rows` for k or v of sequence b, from the slots `CACHE`."""
    per_b, per_h, stride, page = (names.read(f, p, f"{name}_scale_{axis}") for axis in ("b", "h", "n", "page"))
    ring = (names.read(f, p, "ring_first"), names.read(f, p, "ring"))
    return *ring, names.pointer(f, p, f"{name}_scale").at(b * per_b + kv_head * per_h), stride, page


def _step(f: Function, at: Value, vec: Type) -> Value:
    """The float32 scale of a row, in every lane."""
    x = f.load(F32, at)
    return f.splat(x if vec.scalar == F32 else f.cast("fpext", x, vec.scalar), vec.lanes)


def build_store_rows(m: Module, compute: Type, lanes: int, isa: Isa) -> Function:
    """store_rows(src, rows, dst, stride, dim, scale, code): dst[r * stride][0 : dim] = scale * src[r], converted."""
    with m.function("store_rows", [PTR, I64, PTR, I64, I64, compute, I64]) as f:
        src, rows, dst, stride, dim, scale, code = f.args
        whole = dim - dim % lanes
        pitch = (dim + (lanes - 1)) // lanes * lanes * compute.bytes
        factor = f.splat(scale, lanes)
        for name in stored_types(compute):
            size = _ELEM[name].bytes
            with f.when(code.eq(DTYPE_CODES[name])), f.range(0, rows) as r:
                row, to = src.at(r * pitch), dst.at(r * stride)
                with f.range(0, whole, lanes) as d:
                    x = f.load(compute.vec(lanes), row, d * compute.bytes) * factor
                    f.store(_narrow(f, x, name, isa), to, d * size)
                with f.when(whole < dim):
                    x = f.load(compute.vec(lanes), row, whole * compute.bytes) * factor
                    f.masked_store(_narrow(f, x, name, isa), to.at(whole * size), lane_mask(f, lanes, dim - whole))
    return f


def build_transpose(m: Module, compute: Type, lanes: int, name: str = "transpose") -> Function:
    """transpose(src, src_pitch, dst, dst_pitch, rows, cols): dst[c][r] = src[r][c]; rows, cols multiples of lanes."""
    with m.function(name, [PTR, I64, PTR, I64, I64, I64]) as f:
        src, src_pitch, dst, dst_pitch, rows, cols = f.args
        with f.range(0, rows, lanes) as r, f.range(0, cols, lanes) as c:
            tile = [f.load(compute.vec(lanes), src.at((r + i) * src_pitch), c * compute.bytes) for i in range(lanes)]
            for i, row in enumerate(transpose(f, tile)):
                f.store(row, dst.at((c + i) * dst_pitch), r * compute.bytes)
    return f
