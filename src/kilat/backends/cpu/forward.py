"""The forward kernel: exact attention tile by tile with an online softmax, for one instruction set and compute type.

A task is a block of queries of one sequence for a few query heads of one kv head, and the key ranges that it sees.
It holds up to `max_blocks` query blocks ("sub-blocks"), which share every K/V tile that is brought in.
FlashAttention-2 (Dao 2023), algorithm 1; everything about masks, scores and dropout is in the tile functions.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass

from kilat.backends.cpu.emit import I1, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.forward_tiles import Steps, build_steps, geometry
from kilat.backends.cpu.gemm import Blocking, blocking
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import CACHE, COMMON, SEQ
from kilat.backends.cpu.params import Params
from kilat.backends.cpu.rows import build_load_rows, build_store_rows, build_transpose, place_of
from kilat.backends.cpu.tiles_dropout import build_dropout_bits
from kilat.backends.cpu.tiles_mask import build_mask_bits
from kilat.backends.cpu.tiles_scores import build_scores_forward

BLOCK_KV = 64
MAX_BLOCKS = 4
# After a tile had to be redone, this many are done step by step: large logits cost one extra product in five.
WARY_TILES = 4
FIRST = 99  # the state of a row block before its first tile

FORWARD = Params(
    *COMMON,
    *("q", "q_b", "q_n", "q_h", "k", "k_b", "k_n", "k_h", "v", "v_b", "v_n", "v_h"),
    *("out", "out_b", "out_n", "out_h", "out_dtype"),
    *("lse", "lse_b", "lse_n", "lse_h"),  # lse_n: bytes from query to query, always the element size
    *("sink", "pages", "pages_b", "page_size", "k_page", "v_page"),
    *CACHE,
    *("at_q", "at_out", "at_max", "at_sum", "at_calm", "at_k", "at_v", "at_s", "at_bits", "at_drop", "at_rows"),
    *("at_p", "at_vt", "at_kinds", "at_strips", "at_jobs"),  # bfloat16 kernel only
)

# head0 .. head0 + heads: query heads; first, count: queries; two key ranges [lo, hi)
TASK = Params("seq", "head0", "heads", "first", "count", "lo0", "hi0", "lo1", "hi1")


def scratch_layout(block: Blocking, head_dim: int, head_dim_v: int) -> tuple[dict[str, int], int]:
    """Byte offsets of a thread's buffers, and the size of all of them."""
    size, lanes, width = block.compute.bytes, block.lanes, block.lanes * block.vectors
    pad = -(-head_dim // lanes) * lanes
    pad_v = -(-head_dim_v // lanes) * lanes + block.mr
    keys = BLOCK_KV + block.mr
    sizes = {
        "at_q": MAX_BLOCKS * pad * width * size,
        "at_out": MAX_BLOCKS * pad_v * width * size,
        "at_max": MAX_BLOCKS * width * size,
        "at_sum": MAX_BLOCKS * 2 * width * size,  # sums, and behind them the sums of a tile not yet committed
        "at_calm": MAX_BLOCKS * 64,
        "at_k": keys * pad * size,
        "at_v": keys * pad_v * size,
        "at_s": keys * width * size,
        "at_bits": keys * block.vectors * 2 + 64,
        "at_drop": keys * block.vectors * 2 + 64,
        "at_rows": width * max(pad, pad_v) * size,
    }
    offsets, total = {}, 0
    for name, n in sizes.items():
        offsets[name] = total
        total += -(-n // 64) * 64
    return offsets, -(-total // 4096) * 4096 + 64


@dataclass(frozen=True)
class Parts:
    """Everything that the worker calls."""

    block: Blocking
    steps: Steps
    load_rows: Function
    load_keys: Function
    transpose: Function
    mask_bits: Function
    dropout_bits: Function
    scores_forward: Function

    @property
    def epilogue(self) -> Function:
        return self.steps.epilogue


def build(isa: Isa, compute: Type) -> str:
    """IR of the module; exports `worker(params)`."""
    m = Module()
    block = blocking(isa.lanes32, compute)
    transpose = build_transpose(m, compute, block.lanes)
    store_rows = build_store_rows(m, compute, block.lanes, isa)
    parts = Parts(
        block,
        build_steps(m, block, transpose, store_rows),
        build_load_rows(m, compute, block.lanes, isa),
        build_load_rows(m, compute, block.lanes, isa, cached=True),
        transpose,
        build_mask_bits(m, geometry(block)),
        build_dropout_bits(m, geometry(block)),
        build_scores_forward(m, geometry(block)),
    )
    tile = _build_tile(m, parts)
    with m.function("worker", [PTR], exported=True) as f:
        Worker(f, parts, tile).run()
    return m.text()


def _build_tile(m: Module, parts: Parts) -> Function:
    """tile(P, seq, b, h, i0, nr, j0, nb, kind, bits, bad, QT, OT, max, sum, calm, scratch).

    One key tile for one query block. kind: the class of mask_bits (1 partial, 2 all visible); bad: the V tile holds
    NaN or inf.
    """
    block, steps = parts.block, parts.steps
    pitch = block.lanes * block.compute.bytes
    with m.function("tile", [PTR, PTR] + [I64] * 7 + [PTR, I64] + [PTR] * 6) as f:
        p, seq, b, h, i0, nr, j0, nb, kind, bits, bad, qt, ot, mp, lp, calm, scratch = f.args

        def at(name: str) -> Value:
            return scratch.at(FORWARD.read(f, p, name))

        dim, dim_v = FORWARD.read(f, p, "head_dim"), FORWARD.read(f, p, "head_dim_v")
        pitch_k, pitch_v = ((d + (block.lanes - 1)) // block.lanes * pitch for d in (dim, dim_v))
        k, v, s, drop = at("at_k"), at("at_v"), at("at_s"), at("at_drop")
        where = (p, seq, b, h, i0, nr, j0, nb)
        has_scores = FORWARD.read(f, p, "has_scores").ne(0)
        partial = f.var(I1, kind.eq(1))
        with f.when(f.load(I64, calm).eq(FIRST)):  # a few keys give the row maxima to begin with
            few = f.minimum(nb, block.mr)
            f.call(steps.scores, qt, k, pitch_k, s, few, dim, bits)
            f.call(steps.begin, s, bits, f.cast("zext", partial.get(), I64), few, mp)
            f.store(f.const(0, I64), calm)
        # Tiles in one pass, unless scores are modified or lately a maximum jumped.
        todo = f.var(I1, has_scores | f.load(I64, calm).ne(0))
        for masked, callee in ((True, steps.fused_masked), (False, steps.fused)):
            with f.when(~todo.get() & (partial.get() if masked else ~partial.get())):
                redo = f.call(callee, qt, k, pitch_k, s, nb, dim, bits, mp, lp)
                todo.set(redo.ne(0))
                with f.when(redo.ne(0)):
                    f.store(f.const(WARY_TILES, I64), calm)
        with f.when(todo.get()):
            f.store(f.maximum(f.load(I64, calm) - 1, 0), calm)
            with f.when(partial.get()):
                f.call(steps.scores_live, qt, k, pitch_k, s, nb, dim, bits)
            with f.unless(partial.get()):
                f.call(steps.scores, qt, k, pitch_k, s, nb, dim, bits)
            with f.when(has_scores):
                f.call(parts.scores_forward, *where, s)
                with f.when(bad.ne(0)):  # a bias of -inf hides a key, so it also hides the key's NaN
                    f.call(steps.hide, s, bits, f.cast("zext", ~partial.get(), I64), nb)
                    partial.set(f.const(1, I1))
            for masked, callee in ((True, steps.softmax_masked), (False, steps.softmax)):
                with f.when(partial.get() if masked else ~partial.get()):
                    f.call(callee, s, bits, nb, mp, lp, ot, dim_v)
        with f.when(FORWARD.read(f, p, "dropout").ne(0)):
            f.call(parts.dropout_bits, *where, drop)
            f.call(steps.drop, s, drop, nb)
        careful = partial.get() & bad.ne(0)
        with f.when(careful):
            f.call(steps.product_select, s, v, pitch_v, ot, nb, dim_v, bits)
        with f.when(partial.get() & ~careful):
            f.call(steps.product_live, s, v, pitch_v, ot, nb, dim_v, bits)
        with f.unless(partial.get()):
            f.call(steps.product, s, v, pitch_v, ot, nb, dim_v, bits)
    return f


class Worker:
    """Writes the body of `worker`: take tasks until none is left."""

    def __init__(self, f: Function, parts: Parts, tile: Function) -> None:
        self.f, self.parts, self.tile, self.p = f, parts, tile, f.args[0]
        block = parts.block
        self.size, self.width = block.compute.bytes, block.lanes * block.vectors
        self.row = self.width * self.size

    def read(self, name: str) -> Value:
        return FORWARD.read(self.f, self.p, name)

    def pointer(self, name: str) -> Value:
        return FORWARD.pointer(self.f, self.p, name)

    def run(self) -> None:
        f = self.f
        counter, ntasks = self.pointer("counter"), self.read("ntasks")
        thread = f.atomic_add(counter.at(64), 1)
        self.scratch = self.pointer("scratch").at(thread * self.read("scratch_stride"))
        self.dim, self.dim_v = self.read("head_dim"), self.read("head_dim_v")
        self.pad_q, self.pad_o = self._strides()
        with f.forever() as end:
            t = f.atomic_add(counter, 1)
            f.leave(end, t >= ntasks)
            self._task(self.pointer("tasks").at(t * (8 * TASK.size)))

    def _strides(self) -> tuple[Value, Value]:
        """Bytes of one Q block and of one accumulator."""
        return self._pad(self.dim) * self.row, (self._pad(self.dim_v) + self.parts.block.mr) * self.row

    def _pad(self, dim: Value) -> Value:
        lanes = self.parts.block.lanes
        return (dim + (lanes - 1)) // lanes * lanes

    def _task(self, task: Value) -> None:
        f, get = self.f, {n: TASK.read(self.f, task, n) for n in TASK.names}
        self.get, self.b = get, get["seq"]
        self.seq = self.pointer("seqs").at(self.b * (8 * len(SEQ)))
        self.q_token, self.kv_token = (f.load(I64, self.seq, 8 * SEQ.index(n)) for n in ("q_token", "kv_token"))
        self.kv_head = get["head0"] // self.read("group")
        self.per_head = (get["count"] + (self.width - 1)) // self.width
        self.blocks = self.per_head * get["heads"]
        with f.range(0, self.blocks) as s:
            self._start(s)
        self._all_keys(task)
        with f.range(0, self.blocks) as s:
            self._store(s)

    def _all_keys(self, task: Value) -> None:
        """All key tiles of the task's two ranges."""
        f, get = self.f, self.get
        for r in ("0", "1"):
            with f.range(get["lo" + r], get["hi" + r], BLOCK_KV) as j0:
                self._keys(j0, f.minimum(get["hi" + r] - j0, f.const(BLOCK_KV, I64)))

    def _sub(self, s: Value) -> tuple[Value, Value, Value]:
        """(query head, first query, number of queries) of sub-block s."""
        first = s % self.per_head * self.width
        rows = self.f.minimum(self.get["count"] - first, self.f.const(self.width, I64))
        return self.get["head0"] + s // self.per_head, self.get["first"] + first, rows

    def _base(self, name: str, head: Value, token: Value) -> Value:
        b, n, h = (self.read(f"{name}_{axis}") for axis in "bnh")
        return self.pointer(name).at(self.b * b + token * n + head * h)

    def _buffer(self, name: str, s: Value, stride: Value | int) -> Value:
        return self.scratch.at(self.read(name)).at(s * stride)

    def _start(self, s: Value) -> None:
        """Bring the Q block in; empty accumulators."""
        f, t = self.f, self.parts.block.compute
        self._load_query(s, *self._sub(s))
        vec = t.vec(self.parts.block.lanes)
        for name, value, stride in (("at_max", -math.inf, self.row), ("at_sum", 0.0, 2 * self.row)):
            with f.range(0, self.row, vec.bytes) as o:
                f.store(f.const(value, vec), self._buffer(name, s, stride), o)
        f.store(self._first_state(), self._buffer("at_calm", s, 64))
        with f.range(0, self.pad_o, vec.bytes) as o:
            f.store(f.const(0.0, vec), self._buffer("at_out", s, self.pad_o), o)

    def _first_state(self) -> Value:
        """What a row block's `calm` is before its first tile."""
        return self.f.select(self.read("has_scores").ne(0), self.f.const(0, I64), FIRST)

    def _load_query(self, s: Value, head: Value, i0: Value, nr: Value) -> None:
        """Q block, scaled and transposed: [head_dim, queries]."""
        f = self.f
        rows = self.scratch.at(self.read("at_rows"))
        null, zero = f.const(0, PTR), f.const(0, I64)
        scale = FORWARD.floating(f, self.p, "scale", self.parts.block.compute)
        source = self._base("q", head, self.q_token + i0)
        f.call(self.parts.load_rows, source, self.read("q_n"), null, zero, zero, zero, nr, self.width, rows, self.dim,
               scale, self.read("dtype"))  # fmt: skip
        pad = self._pad(self.dim)
        qt = self._buffer("at_q", s, self.pad_q)
        f.call(self.parts.transpose, rows, pad * self.size, qt, self.row, self.width, pad)

    def _keys(self, j0: Value, nb: Value) -> None:
        """One key tile for all sub-blocks; K and V are brought in when the first one needs them."""
        f = self.f
        loaded, bad = f.var(I64, 0), f.var(I64, 0)
        bits = self.scratch.at(self.read("at_bits"))
        with f.range(0, self.blocks) as s:
            head, i0, nr = self._sub(s)
            kind = f.call(self.parts.mask_bits, self.p, self.seq, self.b, head, i0, nr, j0, nb, bits)
            with f.when(kind.ne(0)):
                with f.when(loaded.get().eq(0)):
                    self._load("k", j0, nb)
                    bad.set(self._load("v", j0, nb))
                    loaded.set(1)
                buffers = (("at_q", self.pad_q), ("at_out", self.pad_o), ("at_max", self.row),
                           ("at_sum", 2 * self.row), ("at_calm", 64))  # fmt: skip
                per_block = [self._buffer(name, s, stride) for name, stride in buffers]
                f.call(self.tile, self.p, self.seq, self.b, head, i0, nr, j0, nb, kind, bits, bad.get(), *per_block,
                       self.scratch)  # fmt: skip

    def _load(self, name: str, j0: Value, nb: Value) -> Value:
        """Bring a tile of K or V into scratch; 1 if it holds a non-finite number."""
        f = self.f
        dim = self.dim if name == "k" else self.dim_v
        one, to = f.const(1.0, self.parts.block.compute), self.scratch.at(self.read("at_" + name))
        return f.call(self.parts.load_keys, *self._source(name), j0, nb, nb, to, dim, one, self.read("kv_dtype"),
                      *place_of(f, FORWARD, self.p, name, self.b, self.kv_head))  # fmt: skip

    def _source(self, name: str) -> tuple[Value, Value, Value, Value, Value]:
        """Where rows of K or V lie: base, stride, page table, page size, page stride."""
        f = self.f
        pages = f.var(PTR, self.pointer("pages"))
        with f.when(f.cast("ptrtoint", pages.get(), I64).ne(0)):
            pages.set(pages.get().at(self.b * self.read("pages_b")))
        base = self._base(name, self.kv_head, self.kv_token)
        return base, self.read(f"{name}_n"), pages.get(), self.read("page_size"), self.read(f"{name}_page")

    def _store(self, s: Value) -> None:
        f, t = self.f, self.parts.block.compute
        head, i0, nr = self._sub(s)
        out = self._base("out", head, self.q_token + i0)
        lse = self._base("lse", head, self.q_token + i0)
        has_sink, sink = f.cast("ptrtoint", self.pointer("sink"), I64).ne(0), f.var(t, 0.0)
        with ExitStack() as stack:
            stack.enter_context(f.when(has_sink))
            sink.set(f.load(t, self.pointer("sink"), head * t.bytes))
        ot, mp = self._buffer("at_out", s, self.pad_o), self._buffer("at_max", s, self.row)
        lp, rows = self._buffer("at_sum", s, 2 * self.row), self.scratch.at(self.read("at_rows"))
        factor = FORWARD.floating(f, self.p, "dropout_scale", t)
        f.call(self.parts.epilogue, ot, mp, lp, rows, nr, self.dim_v, out, self.read("out_n"),
               self.read("out_dtype"), lse, factor, f.cast("zext", has_sink, I64), sink.get())  # fmt: skip
