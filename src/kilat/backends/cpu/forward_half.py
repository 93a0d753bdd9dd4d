"""The forward kernel for bfloat16 with hardware pair products (AMX tiles, or the AVX-512 dot instruction).

The same tasks, masks, scores and epilogue as `forward`; what differs is how tiles are packed and multiplied. The score
tile goes through memory (AMX tiles can't be computed on), so the softmax is a pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from kilat.backends.cpu import dots
from kilat.backends.cpu import forward_half_stream as streams
from kilat.backends.cpu import forward_half_tiles as tiles
from kilat.backends.cpu.emit import F32, I1, I32, I64, PTR, Function, Module, Value, Var
from kilat.backends.cpu.forward import BLOCK_KV, FIRST, FORWARD, MAX_BLOCKS, TASK, WARY_TILES, Parts, Worker
from kilat.backends.cpu.forward_tiles import build_epilogue, build_hide, geometry
from kilat.backends.cpu.gemm import Blocking
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.rows import build_store_rows, build_transpose
from kilat.backends.cpu.tiles_dropout import build_dropout_bits
from kilat.backends.cpu.tiles_mask import build_mask_bits
from kilat.backends.cpu.tiles_scores import build_scores_forward

BLOCK = Blocking(F32, tiles.LANES, 4, tiles.VECTORS, tiles.VECTORS)
# K and V come in by groups of two key tiles, at multiples of GROUP: that P V runs over so many keys at once saves loads
# and stores of the accumulator.
GROUP = streams.UNIT_KEYS
# Buffers at equal addresses modulo 4096 look like the same to the load unit, which then waits for stores for nothing.
SKEW = 192
VT_BYTES = streams.VT_PITCH  # of a row of V^T
P_BYTES = GROUP // 2 * tiles.ROW + SKEW
TILE_BITS = BLOCK_KV * tiles.VECTORS * 2
GROUP_BITS = 2 * TILE_BITS


def scratch_layout(head_dim: int, head_dim_v: int) -> tuple[dict[str, int], int]:
    """Byte offsets of a thread's buffers, and the size of all of them."""
    pad, pad_v = (-(-d // 32) * 32 for d in (head_dim, head_dim_v))
    sizes = {
        "at_q": MAX_BLOCKS * pad // 2 * tiles.ROW,
        "at_out": MAX_BLOCKS * pad_v * tiles.ROW,
        "at_max": MAX_BLOCKS * tiles.ROW,
        "at_sum": MAX_BLOCKS * 2 * tiles.ROW,
        "at_calm": MAX_BLOCKS * 64,
        "at_kinds": MAX_BLOCKS * 16,
        "at_k": GROUP * pad * 2,
        "at_v": GROUP * pad_v * 2,
        "at_vt": 2 * (VT_BYTES * pad_v + SKEW),
        "at_s": BLOCK_KV * tiles.ROW,
        "at_strips": 2 * streams.STRIP_BYTES,
        "at_p": 2 * P_BYTES,
        "at_jobs": streams.jobs_bytes(pad, pad_v),
        "at_bits": MAX_BLOCKS * GROUP_BITS + 64,
        "at_drop": BLOCK_KV * tiles.VECTORS * 2 + 64,
        "at_rows": tiles.WIDTH * max(pad, pad_v) * 4,
    }
    offsets, total = {}, 0
    for name, n in sizes.items():
        offsets[name] = total
        total += -(-n // 64) * 64 + SKEW
    return offsets, -(-total // 4096) * 4096 + 64


@dataclass(frozen=True)
class HalfParts:
    """Everything that the worker calls."""

    block: Blocking
    load_raw: Function
    transpose: Function  # of 32-bit pairs
    transpose_pairs: Function
    scores: Function
    product: Function
    product_select: Function
    softmax: dict[tuple[bool, bool], Function]  # by (masked, lazy)
    scale: Function
    hide: Function
    drop: Function
    epilogue: Function
    mask_bits: Function
    dropout_bits: Function
    scores_forward: Function
    stream: streams.Stream | None  # AMX only


def build(isa: Isa, amx: bool) -> str:
    """IR of the module; exports `worker(params)`."""
    m = Module()
    dot = dots.build_dot_amx if amx else dots.build_dot_avx512
    back = build_transpose(m, F32, tiles.LANES)
    parts = HalfParts(
        block=BLOCK,
        load_raw=tiles.build_load_raw(m),
        transpose=build_transpose(m, I32, tiles.LANES, "transpose_words"),
        transpose_pairs=tiles.build_transpose_pairs(m),
        scores=dot(m, "dot", accumulate=False),
        product=dot(m, "dot_add", accumulate=True),
        product_select=tiles.build_product_select_pairs(m),
        softmax={(x, y): tiles.build_softmax_pairs(m, x, y) for x in (False, True) for y in (False, True)},
        scale=tiles.build_scale(m),
        hide=build_hide(m, BLOCK),
        drop=tiles.build_drop_pairs(m),
        epilogue=build_epilogue(m, BLOCK, back, build_store_rows(m, F32, tiles.LANES, isa)),
        mask_bits=build_mask_bits(m, geometry(BLOCK)),
        dropout_bits=build_dropout_bits(m, geometry(BLOCK)),
        scores_forward=build_scores_forward(m, geometry(BLOCK)),
        stream=streams.build_stream(m) if amx else None,
    )
    tile = _build_tile(m, parts)
    with m.function("worker", [PTR], exported=True) as f:
        if amx:
            dots.configure_tiles(f)
        HalfWorker(f, parts, tile).run()
        if amx:
            dots.release_tiles(f)
    return m.text()


def _build_tile(m: Module, parts: HalfParts) -> Function:
    """One key tile for one query block, step by step; arguments as in `forward`, and where K and V^T lie."""
    with m.function("tile", [PTR, PTR] + [I64] * 7 + [PTR, I64] + [PTR] * 8) as f:
        p, seq, b, h, i0, nr, j0, nb, kind, bits, bad, k, vt, qt, ot, mp, lp, calm, scratch = f.args

        def at(name: str) -> Value:
            return scratch.at(FORWARD.read(f, p, name))

        dim, dim_v = (_round(FORWARD.read(f, p, n)) for n in ("head_dim", "head_dim_v"))
        s, pairs, drop = at("at_s"), at("at_p"), at("at_drop")
        where, padded, row = (p, seq, b, h, i0, nr, j0, nb), _round(nb), f.const(tiles.ROW, I64)
        has_scores, partial = FORWARD.read(f, p, "has_scores").ne(0), f.var(I1, kind.eq(1))
        factor = f.var(F32, FORWARD.floating(f, p, "scale", F32))
        f.call(parts.scores, k, dim * 2, qt, row, s, row, padded, row >> 2, dim)
        with f.when(has_scores):
            f.call(parts.scale, s, nb, factor.get())
            factor.set(1.0)
            f.call(parts.scores_forward, *where, s)
            with f.when(bad.ne(0)):  # a bias of -inf hides a key, so it also hides the key's NaN
                f.call(parts.hide, s, bits, f.cast("zext", ~partial.get(), I64), nb)
                partial.set(f.const(1, I1))
        # P in one pass with the maximum that stands, unless lately (or at first) that was of no use.
        todo = f.var(I1, f.load(I64, calm).ne(0))
        for masked in (False, True):
            here = partial.get() if masked else ~partial.get()
            args = (s, pairs, bits, nb, mp, lp, ot, dim_v, factor.get())
            with f.when(here & ~todo.get()):
                redo = f.call(parts.softmax[masked, True], *args)
                todo.set(redo.ne(0))
                with f.when(redo.ne(0)):
                    f.store(f.const(WARY_TILES, I64), calm)
            with f.when(here & todo.get()):
                f.store(f.maximum(f.load(I64, calm) - 1, 0), calm)
                f.call(parts.softmax[masked, False], *args)
        with f.when(FORWARD.read(f, p, "dropout").ne(0)):
            f.call(parts.dropout_bits, *where, drop)
            f.call(parts.drop, pairs, drop, nb)
        pitch, careful = f.const(VT_BYTES, I64), partial.get() & bad.ne(0)
        with f.when(careful):
            f.call(parts.product_select, pairs, vt, pitch, ot, nb, FORWARD.read(f, p, "head_dim_v"), bits)
        with f.unless(careful):
            f.call(parts.product, vt, pitch, pairs, row, ot, row, dim_v, row >> 2, padded)
    return f


def _round(x: Value) -> Value:
    """Up to a multiple of 32."""
    return (x + 31) & -32


class HalfWorker(Worker):
    """The worker with bfloat16 tiles.

    A unit is a query block and the visible tiles of a group of keys. With AMX, units run through `Stream`, each doing
    the P V products of the one before (they are "due"); what that can't do goes tile by tile.
    """

    def __init__(self, f: Function, parts: HalfParts, tile: Function) -> None:
        # The base class takes no more of them than the block, mask_bits and the epilogue: the rest is overridden here.
        super().__init__(f, cast("Parts", parts), tile)
        self.half, self.stream = parts, parts.stream
        # Which of two buffers is next: strips, P, V^T.
        self.turn, self.p_turn, self.v_turn = (f.var(I64, 0) for _ in range(3))
        # Whether the first strip's scores are there already: the next unit's, and this unit's.
        self.primed, self.ready = f.var(I64, 0), f.var(I64, 0)
        self.due, self.due_blocks, self.due_steps = f.var(PTR, 0), f.var(I64, 0), f.var(I64, 0)

    def _strides(self) -> tuple[Value, Value]:
        dim, dim_v = _round(self.dim), _round(self.dim_v)
        if self.stream is not None:
            self.f.call(self.stream.prepare, self.scratch.at(self.read("at_jobs")), dim, dim_v)
        return (dim >> 1) * tiles.ROW, dim_v * tiles.ROW

    def _first_state(self) -> Value:
        return self.f.const(FIRST, I64)

    def _load_query(self, s: Value, head: Value, i0: Value, nr: Value) -> None:
        """Q block as pairs: int32 [head_dim / 2, queries]."""
        f, rows, pitch = self.f, self.scratch.at(self.read("at_rows")), _round(self.dim) * 2
        null, zero = f.const(0, PTR), f.const(0, I64)
        source = self._base("q", head, self.q_token + i0)
        f.call(self.half.load_raw, source, self.read("q_n"), null, zero, zero, zero, nr, self.width, rows, pitch,
               self.dim)  # fmt: skip
        qt, row = self._buffer("at_q", s, self.pad_q), f.const(tiles.ROW, I64)
        f.call(self.half.transpose, rows, pitch, qt, row, f.const(self.width, I64), pitch >> 2)

    def _all_keys(self, task: Value) -> None:
        f = self.f
        with f.range(0, 2) as r:
            lo, hi = (f.load(I64, task, r * 16 + 8 * TASK.index[n]) for n in ("lo0", "hi0"))
            with f.range(lo // GROUP, f.select(lo < hi, (hi + (GROUP - 1)) // GROUP, 0)) as g:
                j0, self.last_key = f.maximum(lo, g * GROUP), hi
                self._group(j0, f.minimum(hi, g * GROUP + GROUP) - j0)
        if self.stream is not None:
            self._finish()

    def _group(self, j0: Value, nb: Value) -> None:
        """A group of keys for all query blocks: look at the mask, bring K and V in if they are seen, do the units."""
        f, seen, kinds = self.f, self.f.var(I64, 0), self.scratch.at(self.read("at_kinds"))
        nbs = (f.minimum(nb, BLOCK_KV), f.maximum(nb - BLOCK_KV, 0))
        with f.range(0, self.blocks) as s:
            head, i0, nr = self._sub(s)
            bits = self._buffer("at_bits", s, GROUP_BITS)
            for n in (0, 1):
                kind = f.var(I64, 0)
                with f.when(nbs[n] > 0):
                    where = (head, i0, nr, j0 + n * BLOCK_KV, nbs[n], bits.at(n * TILE_BITS))
                    kind.set(f.call(self.half.mask_bits, self.p, self.seq, self.b, *where))
                f.store(kind.get(), kinds.at(s * 16), 8 * n)
                seen.set(seen.get() | kind.get())
        with f.when(seen.get().ne(0)):
            self.v_turn.set(self.v_turn.get() ^ 1)
            self.k = self.scratch.at(self.read("at_k"))
            self.vt = self._buffer("at_vt", self.v_turn.get(), _round(self.dim_v) * VT_BYTES + SKEW)
            bads = self._load_group(j0, nb, nbs)
            with f.range(0, self.blocks) as s:
                both = [f.load(I64, kinds.at(s * 16), 8 * n) for n in (0, 1)]
                with f.when((both[0] | both[1]).ne(0)):
                    self._unit(s, j0, both, nbs, bads)

    def _load_group(self, j0: Value, nb: Value, nbs: tuple[Value, Value]) -> list[Value]:
        """Bring K and V^T in; for both tiles 1 if V holds a number that is not finite."""
        f, pitch, pitch_v = self.f, _round(self.dim) * 2, _round(self.dim_v) * 2
        f.call(self.half.load_raw, *self._source("k"), j0, nb, _round(nb), self.k, pitch, self.dim)
        source, to, bads = self._source("v"), self.scratch.at(self.read("at_v")), []
        for n in (0, 1):
            at = to.at(pitch_v * (n * BLOCK_KV))
            where = (j0 + n * BLOCK_KV, nbs[n], _round(nbs[n]), at, pitch_v, self.dim_v)
            bads.append(f.call(self.half.load_raw, *source, *where))
        f.call(self.half.transpose_pairs, to, pitch_v, self.vt, f.const(VT_BYTES, I64), _round(nb), _round(self.dim_v))
        return bads

    def _unit(self, s: Value, j0: Value, kinds: list[Value], nbs: tuple[Value, Value], bads: list[Value]) -> None:
        f = self.f
        calm = self._buffer("at_calm", s, 64)
        slow = f.var(I1, 1)
        self.ready.set(self.primed.get())
        self.primed.set(0)
        if self.stream is not None:
            partial, bad = f.const(0, I1), f.const(0, I1)
            for kind, b in zip(kinds, bads, strict=True):
                partial, bad = partial | kind.eq(1), bad | (kind.ne(0) & b.ne(0))
            state = f.load(I64, calm)
            other = (self.read("has_scores") | self.read("dropout")).ne(0)
            slow.set(other | (partial & bad) | (state.ne(0) & state.ne(FIRST)))
            with f.unless(slow.get()):
                self._fast(s, j0, kinds, nbs, partial, slow)
        with f.when(slow.get()):
            if self.stream is not None:
                self._finish()
            with f.when(f.load(I64, calm).eq(FIRST)):
                f.store(f.const(1, I64), calm)
            head, i0, nr = self._sub(s)
            bits, pitch = self._buffer("at_bits", s, GROUP_BITS), _round(self.dim) * 2
            for n in (0, 1):
                with f.when(kinds[n].ne(0)):
                    f.call(self.tile, self.p, self.seq, self.b, head, i0, nr, j0 + n * BLOCK_KV, nbs[n], kinds[n],
                           bits.at(n * TILE_BITS), bads[n], self.k.at(pitch * (n * BLOCK_KV)),
                           self.vt.at(n * BLOCK_KV * 2), *self._block_buffers(s), self.scratch)  # fmt: skip

    def _block_buffers(self, s: Value) -> list[Value]:
        """Q^T, O^T, max, sum and state of a query block."""
        buffers = (("at_q", self.pad_q), ("at_out", self.pad_o), ("at_max", self.row), ("at_sum", 2 * self.row),
                   ("at_calm", 64))  # fmt: skip
        return [self._buffer(name, s, stride) for name, stride in buffers]

    def _fast(
        self, s: Value, j0: Value, kinds: list[Value], nbs: tuple[Value, Value], partial: Value, slow: object
    ) -> None:
        """The unit through `Stream`; `slow` is set if it must be done again."""
        f, stream = self.f, self.stream
        if stream is None or not isinstance(slow, Var):
            raise TypeError("a unit needs the stream functions and a variable")
        jobs, pitch, strips = (self.scratch.at(self.read("at_jobs")), _round(self.dim) * 2,
                               self._buffer("at_strips", f.const(0, I64), 0))  # fmt: skip
        qt, ot, mp, lp, calm = self._block_buffers(s)
        start = f.select(kinds[0].eq(0), f.const(BLOCK_KV, I64), 0)
        keys = f.select(kinds[1].eq(0), nbs[0], nbs[0] + nbs[1]) - start
        count, k = _round(keys) >> 5, self.k.at(start * pitch)
        bits = self._buffer("at_bits", s, GROUP_BITS)
        n_scores = streams.score_count(_round(self.dim))
        with f.when(self.ready.get().eq(0)):
            here = strips.at(self.turn.get() * streams.STRIP_BYTES)
            streams.set_bases(f, jobs, False, k, pitch, qt, here)
            f.call(stream.drain, jobs, streams.score_jobs(jobs), n_scores)
        k_next, qt_next = self._next(s, pitch)
        first = f.cast("zext", f.load(I64, calm).eq(FIRST), I64)
        p = self._buffer("at_p", self.p_turn.get(), P_BYTES)
        redo, masked = f.var(I64, 0), partial | (keys % 32).ne(0)
        with f.when(masked):
            for n in (0, 1):
                with f.when(kinds[n].eq(2)), f.range(0, BLOCK_KV) as row:
                    f.store(f.select(row < nbs[n], f.const(-1, I64), 0), bits, row * 8 + n * TILE_BITS)
        for x in (True, False):
            with f.when(masked if x else ~masked):
                redo.set(f.call(stream.unit[x], jobs, strips, self.turn.get(), count, p,
                                bits.at(start * (2 * tiles.VECTORS)), mp, lp, first,
                                FORWARD.floating(f, self.p, "scale", F32), n_scores, k, k_next, qt_next,
                                self.due.get(), self.due_blocks.get(), self.due_steps.get(),
                                *self._far(s, j0)))  # fmt: skip
        self.turn.set((self.turn.get() + count) & 1)
        self.primed.set(f.cast("ptrtoint", k_next, I64))
        self.due_blocks.set(0)
        with f.when(redo.get().ne(0)):
            f.store(f.const(WARY_TILES, I64), calm)
            slow.set(f.const(1, I1))
        with f.when(redo.get().eq(0)):
            f.store(f.const(0, I64), calm)
            dim, dim_v = _round(self.dim), _round(self.dim_v)
            streams.set_bases(f, jobs, True, self.vt.at(start * 2), VT_BYTES, p, ot)
            self.due.set(streams.product_jobs(f, jobs, dim, dim_v, count))
            self.due_blocks.set(streams.product_blocks(dim_v))
            self.due_steps.set(count)
            self.p_turn.set(self.p_turn.get() ^ 1)

    def _next(self, s: Value, pitch: Value) -> tuple[Value, Value]:
        """K and Q^T of the next block's unit, whose first scores can be formed already; null if there is none."""
        f, kinds = self.f, self.scratch.at(self.read("at_kinds"))
        k_next, qt_next = f.var(PTR, 0), f.var(PTR, 0)
        with f.when(s + 1 < self.blocks):
            a, b = (f.load(I64, kinds.at(s * 16), 16 + 8 * n) for n in (0, 1))
            state = f.load(I64, self._buffer("at_calm", s + 1, 64))
            with f.when((a | b).ne(0) & (state.eq(0) | state.eq(FIRST))):
                k_next.set(self.k.at(f.select(a.eq(0), pitch * BLOCK_KV, 0)))
                qt_next.set(self._buffer("at_q", s + 1, self.pad_q))
        return k_next.get(), qt_next.get()

    def _far(self, s: Value, j0: Value) -> list[Value]:
        """What to prefetch meanwhile: the first units bring rows of the next group's K and V nearer."""
        f, key = self.f, j0 + GROUP + s * (GROUP // 2)
        base_k, stride_k, pages, *_ = self._source("k")
        base_v, stride_v, *_ = self._source("v")
        useful = (s < 2) & (j0 + GROUP < self.last_key) & f.cast("ptrtoint", pages, I64).eq(0)
        size = f.select(useful, f.minimum(self.dim, self.dim_v) * 2, 0)
        return [base_k.at(key * stride_k), stride_k, base_v.at(key * stride_v), stride_v, size]

    def _finish(self) -> None:
        """Do the products that are due; scores that nobody has asked for are forgotten."""
        if self.stream is None:
            return
        f = self.f
        with f.when(self.due_blocks.get().ne(0)):
            jobs = self.scratch.at(self.read("at_jobs"))
            f.call(self.stream.drain, jobs, self.due.get(), self.due_blocks.get() * self.due_steps.get())
            self.due_blocks.set(0)
