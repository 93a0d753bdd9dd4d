"""Moving tiles between the caller's tensors and scratch: conversion, padding, transposition.

Scratch tiles are compute type, rows padded with zeros to a multiple of the lanes, so that no kernel behind them knows
about head sizes, strides, page tables or storage types.
"""

from __future__ import annotations

from kilat.backends.cpu.emit import BF16, F16, F32, F64, I16, I32, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import DTYPE_CODES
from kilat.backends.cpu.math import narrow, transpose, widen

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


def build_load_row(m: Module, compute: Type, lanes: int, isa: Isa) -> dict[str, Function]:
    """load_row_<type>(src, dst, dim, scale) -> vector that is NaN somewhere iff the row holds a non-finite number.

    dst[0 : round_up(dim, lanes)] = scale * src[0 : dim], zero behind dim.
    """
    out = {}
    vec = compute.vec(lanes)
    for name in stored_types(compute):
        elem = _ELEM[name]
        with m.function(f"load_row_{name}", [PTR, PTR, I64, compute], vec) as f:
            src, dst, dim, scale = f.args
            bad = f.var(vec, 0.0)
            whole = dim - dim % lanes
            factor = f.splat(scale, lanes)

            def put(d: Value, x: Value, name: str = name, f: Function = f) -> None:
                x = _widen(f, x, name, compute, isa)
                bad.set(f.fma(x, 0.0, bad.get()))
                f.store(x * factor, dst, d * compute.bytes)

            with f.range(0, whole, lanes) as d:
                put(d, f.load(elem.vec(lanes), src, d * elem.bytes))
            with f.when(whole < dim):
                live = lane_mask(f, lanes, dim - whole)
                put(whole, f.masked_load(elem.vec(lanes), src.at(whole * elem.bytes), live))
            f.ret_value(bad.get())
        out[name] = f
    return out


def build_load_rows(m: Module, compute: Type, lanes: int, isa: Isa) -> Function:
    """load_rows(base, stride, pages, page_size, page_stride, first, rows, pad, dst, dim, scale, code) -> 1 if non-finite.

    Row r comes from base + (first + r) * stride, or, with pages (int32 table of this sequence) not null, from
    base + pages[(first + r) / page_size] * page_stride + ((first + r) % page_size) * stride.
    Rows from `rows` up to `pad` are zeroed.
    """
    load_row = build_load_row(m, compute, lanes, isa)
    args = [PTR, I64, PTR, I64, I64, I64, I64, I64, PTR, I64, compute, I64]
    with m.function("load_rows", args, I64) as f:
        base, stride, pages, page_size, page_stride, first, rows, pad, dst, dim, scale, code = f.args
        pitch = (dim + (lanes - 1)) // lanes * lanes * compute.bytes
        bad = f.var(compute.vec(lanes), 0.0)
        paged = f.cast("ptrtoint", pages, I64).ne(0)
        offset = f.var(I64, 0)
        with f.range(0, rows) as r:
            with f.unless(paged):
                offset.set((first + r) * stride)
            with f.when(paged):
                j = first + r
                page = f.cast("sext", f.load(I32, pages, j // page_size * 4), I64)
                offset.set(page * page_stride + j % page_size * stride)
            src = base.at(offset.get())
            for name, callee in load_row.items():
                with f.when(code.eq(DTYPE_CODES[name])):
                    bad.set(bad.get() + f.call(callee, src, dst.at(r * pitch), dim, scale))
        with f.range(rows * pitch, pad * pitch, lanes * compute.bytes) as o:
            f.store(f.const(0.0, compute.vec(lanes)), dst, o)
        x = bad.get()
        any_bad = f.reduce(f.cast("zext", x.ne(x), I32.vec(lanes)), "or")
        f.ret_value(f.cast("zext", any_bad, I64))
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


def build_transpose(m: Module, compute: Type, lanes: int) -> Function:
    """transpose(src, src_pitch, dst, dst_pitch, rows, cols): dst[c][r] = src[r][c]; rows, cols multiples of lanes."""
    with m.function("transpose", [PTR, I64, PTR, I64, I64, I64]) as f:
        src, src_pitch, dst, dst_pitch, rows, cols = f.args
        with f.range(0, rows, lanes) as r, f.range(0, cols, lanes) as c:
            tile = [f.load(compute.vec(lanes), src.at((r + i) * src_pitch), c * compute.bytes) for i in range(lanes)]
            for i, row in enumerate(transpose(f, tile)):
                f.store(row, dst.at((c + i) * dst_pitch), r * compute.bytes)
    return f


