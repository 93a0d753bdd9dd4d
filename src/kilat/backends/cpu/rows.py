"""Moving tiles between the caller's tensors and scratch: conversion, padding, transposition.

Scratch tiles are compute type, rows padded with zeros to a multiple of the lanes, so that no kernel behind them knows
about head sizes, strides, page tables or storage types.
"""

from __future__ import annotations

from kilat.backends.cpu.emit import BF16, F16, F32, F64, I16, I32, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import DTYPE_CODES
from kilat.backends.cpu.math import narrow, transpose, widen

# Rows of one head lie heads * dim apart, often a page, where hardware prefetchers stop.
PREFETCH_ROWS = 64

_HALF = {"bfloat16": BF16, "float16": F16}
_ELEM = {"float32": F32, "bfloat16": I16, "float16": I16, "float64": F64}


def stored_types(compute: Type) -> tuple[str, ...]:
    """Storage types that a kernel computing in `compute` reads and writes."""
    return ("float64", "float32") if compute == F64 else ("float32", "bfloat16", "float16", "float64")


def _widen(f: Function, x: Value, name: str, compute: Type, isa: Isa) -> Value:
    if name in _HALF:
        x = widen(f, x, _HALF[name], isa)
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


def row_offset(f: Function, j: Value, stride: Value, pages: Value, page_size: Value, page_stride: Value) -> Value:
    """Bytes from the base to row j: j * stride, or in its page if `pages` (int32 table of a sequence) is not null."""
    offset = f.var(I64, j * stride)
    with f.unless(f.cast("ptrtoint", pages, I64).eq(0)):
        page = f.cast("sext", f.load(I32, pages, j // page_size * 4), I64)
        offset.set(page * page_stride + j % page_size * stride)
    return offset.get()


def build_load_rows(m: Module, compute: Type, lanes: int, isa: Isa) -> Function:
    """load_rows(base, stride, pages, page_size, page_stride, first, rows, pad, dst, dim, scale, code).

    dst[r][0 : round_up(dim, lanes)] = scale * row r, zero behind dim; rows from `rows` up to `pad` are zeroed. Returns
    1 if some number is not finite. Row r comes from base + (first + r) * stride, or, with pages (int32 table of this
    sequence) not null, from base + pages[(first + r) / page_size] * page_stride + ((first + r) % page_size) * stride.
    """
    args = [PTR, I64, PTR, I64, I64, I64, I64, I64, PTR, I64, compute, I64]
    vec = compute.vec(lanes)
    with m.function("load_rows", args, I64) as f:
        base, stride, pages, page_size, page_stride, first, rows, pad, dst, dim, scale, code = f.args
        whole, pitch = dim - dim % lanes, (dim + (lanes - 1)) // lanes * vec.bytes
        factor = f.splat(scale, lanes)
        tail = lane_mask(f, lanes, dim - whole)
        bits = (I64 if compute == F64 else I32).vec(lanes)
        bad = f.var(bits, 0)

        def put(x: Value, to: Value, name: str) -> None:
            x = _widen(f, x, name, compute, isa)
            bad.set(bad.get() | f.bitcast(x - x, bits))  # x - x is +0, or NaN for inf and NaN
            f.store(x * factor, to)

        for name in stored_types(compute):
            elem = _ELEM[name]
            with f.when(code.eq(DTYPE_CODES[name])), f.range(0, rows) as r:
                src, to = base.at(row_offset(f, first + r, stride, pages, page_size, page_stride)), dst.at(r * pitch)
                ahead = src.at(stride * PREFETCH_ROWS)
                with f.range(0, whole, lanes) as d:
                    f.prefetch(ahead.at(d * elem.bytes))
                    put(f.load(elem.vec(lanes), src, d * elem.bytes), to.at(d * compute.bytes), name)
                with f.when(whole < dim):
                    x = f.masked_load(elem.vec(lanes), src.at(whole * elem.bytes), tail)
                    put(x, to.at(whole * compute.bytes), name)
        with f.range(rows * pitch, pad * pitch, vec.bytes) as o:
            f.store(f.const(0.0, vec), dst, o)
        f.ret_value(f.cast("zext", f.bitcast(bad.get().ne(0), Type(f"i{lanes}")).ne(0), I64))
    return f


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
