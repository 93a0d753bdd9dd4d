"""The forward kernel for bfloat16 with hardware pair products (AMX tiles, or the AVX-512 dot instruction).

The same tasks, masks, scores and epilogue as `forward`; what differs is how tiles are packed and multiplied. The score
tile goes through memory (AMX tiles can't be computed on), so the softmax is a pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilat.backends.cpu import dots
from kilat.backends.cpu import forward_half_tiles as tiles
from kilat.backends.cpu.emit import F32, I1, I32, I64, PTR, Function, Module, Value
from kilat.backends.cpu.forward import BLOCK_KV, FORWARD, MAX_BLOCKS, WARY_TILES, Worker
from kilat.backends.cpu.forward_tiles import build_epilogue, build_hide, geometry
from kilat.backends.cpu.gemm import Blocking
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.rows import build_store_rows, build_transpose
from kilat.backends.cpu.tiles_dropout import build_dropout_bits
from kilat.backends.cpu.tiles_mask import build_mask_bits
from kilat.backends.cpu.tiles_scores import build_scores_forward

BLOCK = Blocking(F32, tiles.LANES, 4, tiles.VECTORS, tiles.VECTORS)


def scratch_layout(head_dim: int, head_dim_v: int) -> tuple[dict[str, int], int]:
    """Byte offsets of a thread's buffers, and the size of all of them."""
    pad, pad_v = (-(-d // 32) * 32 for d in (head_dim, head_dim_v))
    sizes = {
        "at_q": MAX_BLOCKS * pad // 2 * tiles.ROW,
        "at_out": MAX_BLOCKS * pad_v * tiles.ROW,
        "at_max": MAX_BLOCKS * tiles.ROW,
        "at_sum": MAX_BLOCKS * 2 * tiles.ROW,
        "at_calm": MAX_BLOCKS * 64,
        "at_k": BLOCK_KV * pad * 2,
        "at_v": BLOCK_KV * pad_v * 2,
        "at_vt": pad_v * BLOCK_KV * 2,
        "at_s": BLOCK_KV * tiles.ROW,
        "at_p": BLOCK_KV // 2 * tiles.ROW,
        "at_bits": BLOCK_KV * tiles.VECTORS * 2 + 64,
        "at_drop": BLOCK_KV * tiles.VECTORS * 2 + 64,
        "at_rows": tiles.WIDTH * max(pad, pad_v) * 4,
    }
    offsets, total = {}, 0
    for name, n in sizes.items():
        offsets[name] = total
        total += -(-n // 64) * 64
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
    """One key tile for one query block; arguments as in `forward`."""
    with m.function("tile", [PTR, PTR] + [I64] * 7 + [PTR, I64] + [PTR] * 6) as f:
        p, seq, b, h, i0, nr, j0, nb, kind, bits, bad, qt, ot, mp, lp, calm, scratch = f.args

        def at(name: str) -> Value:
            return scratch.at(FORWARD.read(f, p, name))

        dim, dim_v = (_round(FORWARD.read(f, p, n)) for n in ("head_dim", "head_dim_v"))
        k, vt, s, pairs, drop = at("at_k"), at("at_vt"), at("at_s"), at("at_p"), at("at_drop")
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
        pitch, careful = f.const(BLOCK_KV * 2, I64), partial.get() & bad.ne(0)
        with f.when(careful):
            f.call(parts.product_select, pairs, vt, pitch, ot, nb, FORWARD.read(f, p, "head_dim_v"), bits)
        with f.unless(careful):
            f.call(parts.product, vt, pitch, pairs, row, ot, row, dim_v, row >> 2, padded)
    return f


def _round(x: Value) -> Value:
    """Up to a multiple of 32."""
    return (x + 31) & -32


class HalfWorker(Worker):
    """The worker with bfloat16 tiles."""

    def _strides(self) -> tuple[Value, Value]:
        return (_round(self.dim) >> 1) * tiles.ROW, _round(self.dim_v) * tiles.ROW

    def _first_state(self) -> Value:
        return self.f.const(1, I64)

    def _load_query(self, s: Value, head: Value, i0: Value, nr: Value) -> None:
        """Q block as pairs: int32 [head_dim / 2, queries]."""
        f, rows, pitch = self.f, self.scratch.at(self.read("at_rows")), _round(self.dim) * 2
        null, zero = f.const(0, PTR), f.const(0, I64)
        source = self._base("q", head, self.q_token + i0)
        f.call(self.parts.load_raw, source, self.read("q_n"), null, zero, zero, zero, nr, self.width, rows, pitch,
               self.dim)  # fmt: skip
        qt, row = self._buffer("at_q", s, self.pad_q), f.const(tiles.ROW, I64)
        f.call(self.parts.transpose, rows, pitch, qt, row, f.const(self.width, I64), pitch >> 2)

    def _load(self, name: str, j0: Value, nb: Value) -> Value:
        f, dim = self.f, self.dim if name == "k" else self.dim_v
        pitch, to, padded = _round(dim) * 2, self.scratch.at(self.read("at_" + name)), _round(nb)
        bad = f.call(self.parts.load_raw, *self._source(name), j0, nb, padded, to, pitch, dim)
        if name == "v":
            vt, keys = self.scratch.at(self.read("at_vt")), f.const(BLOCK_KV * 2, I64)
            f.call(self.parts.transpose_pairs, to, pitch, vt, keys, padded, _round(dim))
        return bad
