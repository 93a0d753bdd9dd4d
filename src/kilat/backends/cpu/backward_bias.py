"""Gradients that are sums over tiles of dS or over rows: of the bias, of tensors of user scores, and of the sink.

The bias kernel computes dS a second time, in an order that lets one task own one part of the bias, so that broadcast
axes are summed in a fixed order without a buffer per thread. For tensors of user scores it runs as one single task.
"""

from __future__ import annotations

import math

from kilat.backends.cpu.backward_parts import Parts, Worker
from kilat.backends.cpu.backward_products import BLOCK_Q
from kilat.backends.cpu.emit import F64, I64, PTR, Module, Value
from kilat.backends.cpu.math import exp
from kilat.backends.cpu.params import Params
from kilat.backends.cpu.rows import lane_mask
from kilat.backends.cpu.tiles_mask import NONE

# Ranges over batch entries, query heads, queries and keys; clipped to each sequence.
BOX = Params("b0", "b1", "h0", "h1", "i0", "i1", "j0", "j1")
HEAD = Params("head")


def build_bias(m: Module, parts: Parts) -> None:
    """The exported kernel `run_bias`; tasks are `BOX`, disjoint in the bias."""
    with m.function("run_bias", [PTR], exported=True) as f:
        worker = _Bias(f, parts)
        worker.each_task(BOX, worker.task)


def build_sink(m: Module, parts: Parts) -> None:
    """The exported kernel `run_sink`; one task a query head."""
    with m.function("run_sink", [PTR], exported=True) as f:
        worker = _Sink(f, parts)
        worker.each_task(HEAD, worker.task)


class _Bias(Worker):
    """dbias[b, h, i, j] += ds_ij, strides 0 where the bias is broadcast."""

    def task(self, get: dict[str, Value]) -> None:
        f = self.f
        with f.range(get["b0"], get["b1"]) as b, f.range(get["h0"], get["h1"]) as head:
            at = self.sequence(b)
            stop_i, stop_j = f.minimum(get["i1"], at["q_len"]), f.minimum(get["j1"], at["kv_len"])
            with f.range(get["j0"], stop_j, self.width) as j0:
                nb = f.minimum(stop_j - j0, self.width)
                zero = f.const(0, I64)
                with f.when(get["i0"] < stop_i):
                    self.load_keys(at, b, head // self.read("group"), j0, nb, zero)
                with f.range(get["i0"], stop_i, BLOCK_Q) as i0:
                    self._tile(at, b, head, (i0, f.minimum(stop_i - i0, BLOCK_Q), j0, nb))

    def _tile(self, at: dict[str, Value], b: Value, head: Value, place: tuple[Value, Value, Value, Value]) -> None:
        f, (i0, nr, j0, nb) = self.f, place
        where = (self.p, at["seq"], b, head, *place)
        kind = f.call(self.parts.mask_bits, *where, self.buffer("at_bits"))
        with f.when(kind.ne(NONE)):
            bad_q, bad_do = self.load_queries(at, b, head, i0, nr)
            bad_k, bad_v = (f.load(I64, self.buffer("at_bad"), o) for o in (0, 8))
            f.call(
                self.parts.tile,
                *where,
                kind,
                bad_q | bad_do | bad_k | bad_v,
                self.buffer("at_kt"),
                self.buffer("at_vt"),
                self.scratch,
            )
            strides = {axis: self.read(f"dbias_{axis}") for axis in "bhij"}
            offset = b * strides["b"] + head * strides["h"] + i0 * strides["i"] + j0 * strides["j"]
            to = self.pointer("dbias").at(offset)
            wanted = self.read("dbias").ne(0)
            with f.when(wanted & strides["j"].ne(0)):
                self._add_vectors(to, strides["i"], nr, nb)
            with f.when(wanted & strides["j"].eq(0)):
                self._add_row_sums(to, strides["i"], nr, nb)

    def _add_vectors(self, to: Value, row_stride: Value, nr: Value, nb: Value) -> None:
        f, ds, row = self.f, self.buffer("at_ds"), self.block.vectors * self.vec.bytes
        for v in range(self.block.vectors):
            live = lane_mask(f, self.block.lanes, nb - v * self.block.lanes)
            with f.range(0, nr) as r:
                p = to.at(r * row_stride + v * self.vec.bytes)
                f.masked_store(
                    f.masked_load(self.vec, p, live) + f.load(self.vec, ds, r * row + v * self.vec.bytes), p, live
                )

    def _add_row_sums(self, to: Value, row_stride: Value, nr: Value, nb: Value) -> None:
        f, ds, row = self.f, self.buffer("at_ds"), self.block.vectors * self.vec.bytes
        live = [lane_mask(f, self.block.lanes, nb - v * self.block.lanes) for v in range(self.block.vectors)]
        with f.range(0, nr) as r:
            total = f.const(0.0, self.vec)
            for v, mask in enumerate(live):
                total = total + f.select(mask, f.load(self.vec, ds, r * row + v * self.vec.bytes), 0.0)
            p = to.at(r * row_stride)
            f.store(f.load(self.block.compute, p) + f.reduce(total, "add"), p)


class _Sink(Worker):
    """dsink_h = -sum_i exp(sink_h - lse_i) delta_i, in float64, over all rows of all sequences."""

    def task(self, get: dict[str, Value]) -> None:
        f, head, lanes = self.f, get["head"], self.block.lanes
        sink = f.splat(f.load(self.block.compute, self.pointer("sink"), head * self.size), lanes)
        total = f.var(F64.vec(lanes), 0.0)
        with f.range(0, self.read("nseqs")) as b:
            at = self.sequence(b)
            lse, delta = (self.per_query(n, b, head, at["q_token"]) for n in ("lse", "delta"))
            with f.range(0, at["q_len"], lanes) as i:
                live = lane_mask(f, lanes, at["q_len"] - i)
                x = f.masked_load(self.vec, lse.at(i * self.size), live)
                # A sink of -inf has no share, also where lse is -inf with it.
                p = f.select(live & x.ne(-math.inf), exp(f, sink - x), 0.0)
                y = p * f.masked_load(self.vec, delta.at(i * self.size), live)
                total.set(total.get() - f.cast("fpext", f.select(p.ne(0.0), y, 0.0), F64.vec(lanes)))
        f.store(f.reduce(total.get(), "add"), self.pointer("dsink"), head * 8)
