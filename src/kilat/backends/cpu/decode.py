"""The kernel for few queries: decoding, and any call whose query rows do not fill a block of the forward.

A task is a range of keys of one (sequence, kv head) for up to MAX_ROWS rows: all query heads of the group times some
queries. The partial results (max, sum, O) of a row block's tasks are combined, in order, by the task that finishes
last (FlashDecoding), so the result does not depend on which thread did what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kilat.backends.cpu.decode_tiles import (
    KEYS,
    build_drop,
    build_hide,
    build_product,
    build_product_select,
    build_scores,
    build_softmax,
    decode_geometry,
)
from kilat.backends.cpu.emit import I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.forward_tiles import finite_or_zero
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import CACHE, COMMON, SEQ, Geometry
from kilat.backends.cpu.math import exp, log
from kilat.backends.cpu.params import Params
from kilat.backends.cpu.rows import build_load_rows, build_store_rows, place_of
from kilat.backends.cpu.tiles_dropout import build_dropout_bits
from kilat.backends.cpu.tiles_mask import build_mask_bits
from kilat.backends.cpu.tiles_scores import build_scores_forward

MAX_ROWS = 64

DECODE = Params(
    *COMMON,
    *("q", "q_b", "q_n", "q_h", "k", "k_b", "k_n", "k_h", "v", "v_b", "v_n", "v_h"),
    *("out", "out_b", "out_n", "out_h", "out_dtype", "lse", "lse_b", "lse_n", "lse_h"),
    *("sink", "pages", "pages_b", "page_size", "k_page", "v_page"),
    *CACHE,
    *("parts", "part_stride", "done"),  # parts: one partial result a task; done: finished tasks of a row block
    *("at_q", "at_k", "at_v", "at_s", "at_bits", "at_drop", "at_row"),
)

# first, count: queries of the row block; lo, hi: keys; part: index of this task's partial result; part0 and parts: the
# first one and the number of those of its row block; block: index of the row block
TASK = Params("seq", "kv_head", "first", "count", "lo", "hi", "part", "part0", "parts", "block")


def scratch_layout(geo: Geometry, head_dim: int, head_dim_v: int) -> tuple[dict[str, int], int]:
    """Byte offsets of a thread's buffers, and the size of all of them."""
    size, pad, pad_v = geo.compute.bytes, *(-(-d // geo.lanes) * geo.lanes for d in (head_dim, head_dim_v))
    sizes = {
        "at_q": (MAX_ROWS + 4) * pad * size,
        "at_k": KEYS * pad * size,
        "at_v": KEYS * pad_v * size,
        "at_s": (MAX_ROWS + 4) * geo.row_bytes,
        "at_bits": KEYS * geo.bits_row_bytes + 64,
        "at_drop": KEYS * geo.bits_row_bytes + 64,
        "at_row": pad_v * size,
    }
    offsets, total = {}, 0
    for name, n in sizes.items():
        offsets[name] = total
        total += -(-n // 64) * 64 + 64
    return offsets, -(-total // 4096) * 4096 + 64


def part_bytes(geo: Geometry, rows: int, head_dim_v: int) -> int:
    """Size of one partial result: max [MAX_ROWS], sum [MAX_ROWS], O [rows][head_dim_v], rows and dims padded."""
    pad_v = -(-head_dim_v // geo.lanes) * geo.lanes
    return 2 * MAX_ROWS * geo.compute.bytes + (rows + 4) * pad_v * geo.compute.bytes


@dataclass(frozen=True)
class _Parts:
    geo: Geometry
    load_rows: Function
    load_keys: Function
    store_rows: Function
    scores: Function
    softmax: Function
    product: Function
    product_select: Function
    hide: Function
    drop: Function
    mask_bits: Function
    dropout_bits: Function
    scores_forward: Function


def build(isa: Isa, compute: Type) -> str:
    """IR of the module; exports `worker(params)`."""
    m = Module()
    lanes = isa.lanes32 * 4 // compute.bytes
    geo = decode_geometry(compute, lanes)
    parts = _Parts(
        geo,
        build_load_rows(m, compute, lanes, isa),
        build_load_rows(m, compute, lanes, isa, cached=True),
        build_store_rows(m, compute, lanes, isa),
        build_scores(m, geo),
        build_softmax(m, geo),
        build_product(m, geo),
        build_product_select(m, geo),
        build_hide(m, geo),
        build_drop(m, geo),
        build_mask_bits(m, geo),
        build_dropout_bits(m, geo),
        build_scores_forward(m, geo, isa),
    )
    combine = _build_combine(m, geo)
    with m.function("worker", [PTR], exported=True) as f:
        _Worker(f, parts, combine).run()
    return m.text()


def _build_combine(m: Module, geo: Geometry) -> Function:
    """combine(parts, stride, count, r, width, has_sink, sink, factor, row) -> lse of row r; row = its output.

    M = max over parts (and the sink); weights exp(m_p - M); out = sum w_p O_p / sum w_p l_p, in the order of the parts.
    """
    vec, t = geo.vector, geo.compute
    with m.function("combine", [PTR, I64, I64, I64, I64, I64, t, t, PTR], t) as f:
        parts, stride, count, r, width, has_sink, sink, factor, row = f.args
        top, total = f.var(t, -math.inf), f.var(t, 0.0)
        at_max, at_sum = r * t.bytes, r * t.bytes + MAX_ROWS * t.bytes
        at_out = r * (width * vec.bytes) + 2 * MAX_ROWS * t.bytes

        def weight(x: Value) -> Value:
            return exp(f, f.splat(x - finite_or_zero(f, top.get()), geo.lanes))

        with f.range(0, count) as p:
            top.set(f.maximum(f.load(t, parts.at(p * stride), at_max), top.get()))
        with f.when(has_sink.ne(0)):
            top.set(f.maximum(sink, top.get()))
            total.set(f.extract(weight(sink), 0))
        with f.range(0, width) as d:
            f.store(f.const(0.0, vec), row, d * vec.bytes)
        with f.range(0, count) as p:
            part = parts.at(p * stride)
            w = weight(f.load(t, part, at_max))
            total.set(f.fma(f.extract(w, 0), f.load(t, part, at_sum), total.get()))
            with f.when(f.extract(w, 0).ne(0.0)), f.range(0, width) as d:
                y = f.load(vec, part.at(at_out), d * vec.bytes)
                f.store(f.fma(w, y, f.load(vec, row, d * vec.bytes)), row, d * vec.bytes)
        dead = total.get().eq(0.0)
        inverse = f.splat(f.select(dead, f.const(0.0, t), factor / total.get()), geo.lanes)
        with f.range(0, width) as d:
            f.store(f.load(vec, row, d * vec.bytes) * inverse, row, d * vec.bytes)
        sums = f.splat(f.select(dead, f.const(1.0, t), total.get()), geo.lanes)
        f.ret_value(f.select(dead, f.const(-math.inf, t), top.get() + f.extract(log(f, sums), 0)))
    return f


class _Worker:
    """Writes the body of `worker`: take tasks until none is left."""

    def __init__(self, f: Function, parts: _Parts, combine: Function) -> None:
        self.f, self.parts, self.combine, self.p, self.geo = f, parts, combine, f.args[0], parts.geo

    def read(self, name: str) -> Value:
        return DECODE.read(self.f, self.p, name)

    def pointer(self, name: str) -> Value:
        return DECODE.pointer(self.f, self.p, name)

    def run(self) -> None:
        f, counter = self.f, self.pointer("counter")
        thread = f.atomic_add(counter.at(64), 1)
        self.scratch = self.pointer("scratch").at(thread * self.read("scratch_stride"))
        self.dim, self.dim_v, self.group = self.read("head_dim"), self.read("head_dim_v"), self.read("group")
        lanes = self.geo.lanes
        self.pitch = (self.dim + (lanes - 1)) // lanes * self.geo.vector.bytes
        self.width = (self.dim_v + (lanes - 1)) // lanes
        ntasks = self.read("ntasks")
        with f.forever() as end:
            t = f.atomic_add(counter, 1)
            f.leave(end, t >= ntasks)
            self._task(self.pointer("tasks").at(t * (8 * TASK.size)))

    def at(self, name: str) -> Value:
        return self.scratch.at(self.read(name))

    def _base(self, name: str, head: Value, token: Value) -> Value:
        b, n, h = (self.read(f"{name}_{axis}") for axis in "bnh")
        return self.pointer(name).at(self.b * b + token * n + head * h)

    def _task(self, task: Value) -> None:
        f, t, vec = self.f, self.geo.compute, self.geo.vector
        self.get = get = {n: TASK.read(f, task, n) for n in TASK.names}
        self.b = get["seq"]
        self.seq = self.pointer("seqs").at(self.b * (8 * len(SEQ)))
        self.q_token, self.kv_token = (f.load(I64, self.seq, 8 * SEQ.index(n)) for n in ("q_token", "kv_token"))
        self.rows = self.group * get["count"]
        part = self.pointer("parts").at(get["part"] * self.read("part_stride"))
        self.mp, self.lp, self.o = (part.at(k * MAX_ROWS * t.bytes) for k in range(3))
        with f.range(0, self.rows) as r:
            f.store(f.const(-math.inf, t), self.mp, r * t.bytes)
            f.store(f.const(0.0, t), self.lp, r * t.bytes)
        with f.range(0, (self.rows + 3) * self.width) as d:
            f.store(f.const(0.0, vec), self.o, d * vec.bytes)
        self._load_queries()
        with f.range(get["lo"], get["hi"], KEYS) as j0:
            self._tile(j0, f.minimum(get["hi"] - j0, f.const(KEYS, I64)))
        done = f.atomic_add(self.pointer("done").at(get["block"] * 8), 1, "acq_rel")
        with f.when(done.eq(get["parts"] - 1)):
            self._finish()

    def _load_queries(self) -> None:
        """Rows head by head, scaled; three rows of zeros behind them for the last row group."""
        f, null, zero = self.f, self.f.const(0, PTR), self.f.const(0, I64)
        scale, count = DECODE.floating(f, self.p, "scale", self.geo.compute), self.get["count"]
        with f.range(0, self.group) as g:
            head = self.get["kv_head"] * self.group + g
            pad = f.select((g + 1).eq(self.group), count + 3, count)
            to = self.at("at_q").at(g * count * self.pitch)
            f.call(self.parts.load_rows, self._base("q", head, self.q_token + self.get["first"]), self.read("q_n"),
                   null, zero, zero, zero, count, pad, to, self.dim, scale, self.read("dtype"))  # fmt: skip

    def _load(self, name: str, j0: Value, nb: Value) -> Value:
        f = self.f
        pages = f.var(PTR, self.pointer("pages"))
        with f.when(f.cast("ptrtoint", pages.get(), I64).ne(0)):
            pages.set(pages.get().at(self.b * self.read("pages_b")))
        base = self._base(name, self.get["kv_head"], self.kv_token)
        one, dim = f.const(1.0, self.geo.compute), self.dim if name == "k" else self.dim_v
        return f.call(self.parts.load_keys, base, self.read(f"{name}_n"), pages.get(), self.read("page_size"),
                      self.read(f"{name}_page"), j0, nb, f.const(KEYS, I64), self.at("at_" + name), dim, one,
                      self.read("kv_dtype"),
                      *place_of(f, DECODE, self.p, name, self.b, self.get["kv_head"]))  # fmt: skip

    def _tile(self, j0: Value, nb: Value) -> None:
        """One key tile for all rows: scores, then head by head masks and softmax, then the product."""
        f, count, s = self.f, self.get["count"], self.at("at_s")
        self._load("k", j0, nb)
        bad = self._load("v", j0, nb)
        f.call(self.parts.scores, self.at("at_q"), self.at("at_k"), self.pitch, s, self.rows)
        with f.range(0, self.group) as g:
            head = self.get["kv_head"] * self.group + g
            where = (self.p, self.seq, self.b, head, self.get["first"], count, j0, nb)
            kind = f.call(self.parts.mask_bits, *where, self.at("at_bits"))
            tile = s.at(g * count * self.geo.row_bytes)
            unseen = f.select(kind.eq(0), count * self.geo.row_bytes, 0)  # nobody sees it: P is 0
            with f.range(0, unseen, self.geo.vector.bytes) as o:
                f.store(f.const(0.0, self.geo.vector), tile, o)
            with f.when(kind.ne(0)):
                self._head(g, where, kind, bad, tile)
        with f.when(bad.eq(0)):
            f.call(self.parts.product, s, self.at("at_v"), self.o, self.width, self.rows, nb)

    def _head(self, g: Value, where: tuple[Value, ...], kind: Value, bad: Value, tile: Value) -> None:
        """Softmax of one head's rows of the tile; with a V tile that is not finite, their product as well."""
        f, t, count, nb = self.f, self.geo.compute, self.get["count"], where[-1]
        has_scores, dropout = self.read("has_scores").ne(0), self.read("dropout").ne(0)
        with f.when(has_scores):
            f.call(self.parts.scores_forward, *where, tile)
        with f.when(dropout):
            f.call(self.parts.dropout_bits, *where, self.at("at_drop"))
        masked = f.cast("zext", kind.eq(1), I64)
        with f.range(0, count) as i:
            row, r = tile.at(i * self.geo.row_bytes), g * count + i
            bits, drop = (self.at(n).at(i * self.geo.bits_row_bytes) for n in ("at_bits", "at_drop"))
            with f.when(bad.ne(0)):
                f.call(self.parts.hide, row, bits, masked)
            mp, lp, o = (
                self.mp.at(r * t.bytes),
                self.lp.at(r * t.bytes),
                self.o.at(r * self.width * self.geo.vector.bytes),
            )
            f.call(self.parts.softmax, row, bits, masked, nb, mp, lp, o, self.width)
            with f.when(dropout):
                f.call(self.parts.drop, row, drop)
            with f.when(bad.ne(0)):
                f.call(self.parts.product_select, row, self.at("at_v"), o, self.width, nb, bits)

    def _finish(self) -> None:
        """Combine the parts of this row block and write out and lse."""
        f, t, count = self.f, self.geo.compute, self.get["count"]
        stride, row = self.read("part_stride"), self.at("at_row")
        parts = self.pointer("parts").at(self.get["part0"] * stride)
        factor = DECODE.floating(f, self.p, "dropout_scale", t)
        has_sink = f.cast("ptrtoint", self.pointer("sink"), I64).ne(0)
        with f.range(0, self.group) as g, f.range(0, count) as i:
            head, token, sink = (
                self.get["kv_head"] * self.group + g,
                self.q_token + self.get["first"] + i,
                f.var(t, 0.0),
            )
            with f.when(has_sink):
                sink.set(f.load(t, self.pointer("sink"), head * t.bytes))
            lse = f.call(self.combine, parts, stride, self.get["parts"], g * count + i, self.width,
                         f.cast("zext", has_sink, I64), sink.get(), factor, row)  # fmt: skip
            f.store(lse, self._base("lse", head, token))
            f.call(self.parts.store_rows, row, f.const(1, I64), self._base("out", head, token), f.const(0, I64),
                   self.dim_v, f.const(1.0, t), self.read("out_dtype"))  # fmt: skip
