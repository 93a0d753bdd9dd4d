"""What the backward kernels share: the functions they call, the loop over tasks, and bringing tiles into scratch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kilat.backends.cpu.backward_products import (
    BLOCK_Q,
    Products,
    build_products,
    geometry,
    padded,
    row_bytes,
    vector_type,
)
from kilat.backends.cpu.backward_tile import BACKWARD, Scope, build_tile
from kilat.backends.cpu.emit import I32, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.gemm import Blocking, blocking
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.params import Params
from kilat.backends.cpu.rows import build_load_rows, build_store_rows, build_transpose, lane_mask
from kilat.backends.cpu.tiles_mask import build_mask_bits


@dataclass(frozen=True)
class Parts:
    """The internal functions of a backward module."""

    block: Blocking
    products: Products
    tile: Function
    load_rows: Function
    store_rows: Function
    transpose: Function
    mask_bits: Function
    load_statistics: Function
    first_above: Function


def build_parts(m: Module, isa: Isa, compute: Type) -> Parts:
    """Emit them all."""
    block = blocking(isa.lanes32, compute)
    products = build_products(m, block)
    return Parts(
        block,
        products,
        build_tile(m, block, products, isa),
        build_load_rows(m, compute, block.lanes, isa),
        build_store_rows(m, compute, block.lanes, isa),
        build_transpose(m, compute, block.lanes),
        build_mask_bits(m, geometry(block)),
        build_load_statistics(m, block),
        build_first_above(m),
    )


def build_load_statistics(m: Module, block: Blocking) -> Function:
    """load_statistics(lse, delta, nr, to_lse, to_delta): 64 rows of each, lse +inf in rows whose p must be 0.

    Those are the rows behind nr, and rows whose lse is -inf, which saw nothing.
    """
    vec, size = vector_type(block), block.compute.bytes
    with m.function("load_statistics", [PTR, PTR, I64, PTR, PTR]) as f:
        lse, delta, nr, to_lse, to_delta = f.args
        with f.range(0, BLOCK_Q, block.lanes) as r:
            live = lane_mask(f, block.lanes, nr - r)
            x = f.masked_load(vec, lse.at(r * size), live, math.inf)
            f.store(f.select(x.eq(-math.inf), math.inf, x), to_lse, r * size)
            f.store(f.masked_load(vec, delta.at(r * size), live, 0.0), to_delta, r * size)
    return f


def build_first_above(m: Module) -> Function:
    """first_above(a, n, x) -> the first i with a[i] > x in non-decreasing int32 a[0 : n], else n."""
    with m.function("first_above", [PTR, I64, I64], I64) as f:
        a, n, x = f.args
        lo, hi = f.var(I64, 0), f.var(I64, n)
        with f.forever() as end:
            low, high = lo.get(), hi.get()
            f.leave(end, low >= high)
            middle = (low + high) >> 1
            above = f.cast("sext", f.load(I32, a, middle * 4), I64) > x
            hi.set(f.select(above, middle, high))
            lo.set(f.select(above, low, middle + 1))
        f.ret_value(lo.get())
    return f


class Tiles(Scope):
    """Brings tiles into scratch."""

    def __init__(self, f: Function, parts: Parts, p: Value, scratch: Value) -> None:
        super().__init__(f, parts.block, p, scratch)
        block, self.parts = parts.block, parts
        self.vec, self.size = vector_type(block), block.compute.bytes
        self.width = block.lanes * block.vectors
        self.dim, self.dim_v = self.read("head_dim"), self.read("head_dim_v")
        self.pitch, self.pitch_v = row_bytes(self.dim, block), row_bytes(self.dim_v, block)

    def load(
        self, name: str, source: Value, rows: Value, pad: Value | int, to: Value, scale: Value | float = 1.0
    ) -> Value:
        """Rows of q, k, v, out or do from `source`, converted and zero-padded to `pad` rows; 1 if any is not finite."""
        f, zero = self.f, self.f.const(0, I64)
        dim = self.dim if name in ("q", "k") else self.dim_v
        code = self.read("out_dtype" if name in ("out", "do") else "dtype")
        not_paged = (f.const(0, PTR), zero, zero)
        return f.call(
            self.parts.load_rows, source, self.read(f"{name}_n"), *not_paged, zero, rows, pad, to, dim, scale, code
        )

    def load_queries(self, at: dict[str, Value], b: Value, head: Value, i0: Value, nr: Value) -> tuple[Value, Value]:
        """Q (scaled), dO, lse and delta of nr queries; flags of Q and dO that say whether one is not finite."""
        token, pad = at["q_token"] + i0, (nr + 15) & -16
        bad_q = self.load("q", self.base("q", b, head, token), nr, pad, self.buffer("at_q"), self.floating("scale"))
        bad_do = self.load("do", self.base("do", b, head, token), nr, pad, self.buffer("at_do"))
        statistics = (self.per_query(n, b, head, token) for n in ("lse", "delta"))
        self.f.call(self.parts.load_statistics, *statistics, nr, self.buffer("at_lse"), self.buffer("at_delta"))
        return bad_q, bad_do

    def load_keys(self, at: dict[str, Value], b: Value, kv_head: Value, j0: Value, nb: Value, slot: Value) -> None:
        """K, K^T and V^T of one key tile into slot `slot` of the chunk, and whether K or V hold a non-finite number."""
        f, row, token = self.f, self.vec.bytes * self.block.vectors, at["kv_token"] + j0
        live = padded(nb, self.block)  # lanes behind are never used
        k, v = self.slot("at_k", slot, self.pitch), self.slot("at_dv", slot, self.pitch_v)  # V only passes through
        bad_k = self.load("k", self.base("k", b, kv_head, token), nb, live, k)
        bad_v = self.load("v", self.base("v", b, kv_head, token), nb, live, v)
        f.store(bad_k, self.buffer("at_bad"), slot * 16)
        f.store(bad_v, self.buffer("at_bad"), slot * 16 + 8)
        for source, name, pitch, dim in ((k, "at_kt", self.pitch, self.dim), (v, "at_vt", self.pitch_v, self.dim_v)):
            to = self.slot(name, slot, pitch)
            f.call(self.parts.transpose, source, pitch, to, row, live, padded(dim, self.block))

    def slot(self, name: str, slot: Value, pitch: Value) -> Value:
        """Slot `slot` of a per-chunk buffer with `width` rows a slot."""
        return self.buffer(name).at(slot * self.width * pitch)


class Worker(Tiles):
    """Writes the body of a kernel: take a scratch slot, then tasks until none is left."""

    def __init__(self, f: Function, parts: Parts) -> None:
        p = f.args[0]
        thread = f.atomic_add(BACKWARD.pointer(f, p, "counter").at(64), 1)
        scratch = BACKWARD.pointer(f, p, "scratch").at(thread * BACKWARD.read(f, p, "scratch_stride"))
        super().__init__(f, parts, p, scratch)

    def each_task(self, record: Params, body: Callable[[dict[str, Value]], None]) -> None:
        """body(fields of the task's record) for every task that this thread gets."""
        f, counter, ntasks = self.f, self.pointer("counter"), self.read("ntasks")
        with f.forever() as end:
            t = f.atomic_add(counter, 1)
            f.leave(end, t >= ntasks)
            task = self.pointer("tasks").at(t * (8 * record.size))
            body({n: record.read(f, task, n) for n in record.names})
