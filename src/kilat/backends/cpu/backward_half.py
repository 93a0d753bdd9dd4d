"""The backward kernels for bfloat16 with products of pairs (AMX tiles or the AVX-512 dot instruction), any options.

The same tasks, masks, delta, dQ buffers and determinism as `backward`; what differs is how a chunk of keys meets a
tile of queries. Q, K, V, dO, P and dS are bfloat16, all sums float32. Per tile S and dP go through scratch in strips
of 32 queries, dK^T and dV^T are summed a tile at a time, dQ over all the chunk's keys that these queries see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilat.backends.cpu.backward import CHUNKS, Main, Rows, build_delta_rows, build_finish_rows
from kilat.backends.cpu.backward_bias import build_bias, build_sink
from kilat.backends.cpu.backward_half_products import Engine, build_engine
from kilat.backends.cpu.backward_half_steps import STEPS_BYTES, StepParts, build_step_parts
from kilat.backends.cpu.backward_half_tiles import (
    BLOCK,
    HALF_ROW,
    INF,
    JOB_BYTES,
    ROW,
    STRIP,
    WIDTH,
    HalfParts,
    build_half_parts,
)
from kilat.backends.cpu.backward_parts import Parts, build_parts
from kilat.backends.cpu.dots import configure_tiles, release_tiles
from kilat.backends.cpu.emit import F32, I64, PTR, Function, Module, Value
from kilat.backends.cpu.tiles_mask import ALL, NONE, PARTIAL

if TYPE_CHECKING:
    from kilat.backends.cpu.isa import Isa
    from kilat.problem import Problem

EXPORTS = ("run_deltas", "run_chunks", "run_finish", "run_bias", "run_sink")

# Keys whose K, V, dK and dV a task holds at a time, by the larger head size: what leaves room in the L2 cache, which
# has 2 MiB on processors with AMX and 1 MiB on the others.
_CHUNK_KEYS = {True: ((128, 512), (256, 256), (512, 128)), False: ((64, 512), (128, 256), (512, 128))}
_TILE_BYTES = WIDTH * HALF_ROW
_BITS = WIDTH * 8  # bytes of bits of a tile
SCORE_JOBS = 4  # of a strip


def supports(problem: Problem, isa: Isa) -> bool:
    """Whether these kernels do this problem on this machine."""
    return isa.has_dot_bf16 and problem.dtype == "bfloat16" and problem.out_dtype == "bfloat16"


def chunk_tiles(isa: Isa, head_dim: int, longest: int) -> int:
    """Key tiles a chunk, for sequences of at most `longest` keys."""
    keys = next((n for d, n in _CHUNK_KEYS[isa.has_amx] if head_dim <= d), WIDTH)
    return max(1, min(keys // WIDTH, -(-longest // WIDTH)))


def build(isa: Isa) -> str:
    """IR of the module; exports `EXPORTS`, each `void name(params)`."""
    m = Module()
    parts = build_parts(m, isa, F32)
    rows = (build_delta_rows(m, parts), build_finish_rows(m, parts))
    for name, callee in zip(("run_deltas", "run_finish"), rows, strict=True):
        with m.function(name, [PTR], exported=True) as f:
            Rows(f, parts).run(callee)
    engine = build_engine(m, isa.has_amx)
    half, steps = build_half_parts(m, engine.run_job), build_step_parts(m, parts.block)
    with m.function("run_chunks", [PTR], exported=True) as f:
        if engine.amx:
            configure_tiles(f, 8)
        worker = HalfMain(f, parts, rows, (half, steps, engine))
        worker.each_task(CHUNKS, worker.task)
        if engine.amx:
            release_tiles(f)
    build_bias(m, parts)
    build_sink(m, parts)
    return m.text()


def scratch_layout(head_dim: int, head_dim_v: int, sub: int) -> tuple[dict[str, int], int]:
    """Byte offsets of a thread's buffers, and the size of all of them; `sub` key tiles a chunk.

    Large enough for the float tile that the bias kernel works on, too.
    """
    pad, pad_v = (-(-d // BLOCK) * BLOCK for d in (head_dim, head_dim_v))
    sizes = {"at_q": WIDTH * pad * 4, "at_do": WIDTH * pad_v * 4, "at_out": max(WIDTH * pad_v * 4, STEPS_BYTES)}
    sizes |= {"at_qt": pad * HALF_ROW, "at_dot": pad_v * HALF_ROW, "at_rows": WIDTH * max(pad, pad_v) * 4}
    sizes |= dict.fromkeys(("at_lse", "at_delta"), WIDTH * 4)
    sizes |= dict.fromkeys(("at_p", "at_ds", "at_raw", "at_tmp"), 2 * STRIP * ROW)
    sizes |= {"at_bits": sub * _BITS, "at_table": max(16 * sub, 512), "at_bad": 16 * sub, "at_dq": WIDTH * pad * 4}
    sizes |= {"at_keys": sub * _TILE_BYTES}
    sizes |= dict.fromkeys(("at_k", "at_kt"), max(sub, 2) * pad * HALF_ROW)
    sizes |= {"at_vt": max(sub, 2) * pad_v * HALF_ROW, "at_dk": sub * pad * ROW, "at_dv": sub * pad_v * ROW}
    sizes |= {"at_drop": (SCORE_JOBS + (pad + pad_v) // 16) * JOB_BYTES}  # jobs
    offsets, total = {}, 0
    for name, n in sizes.items():
        offsets[name] = total
        total += -(-n // 64) * 64
    return offsets, -(-total // 4096) * 4096 + 64


class HalfMain(Main):
    """dK and dV of a range of keys, and its part of dQ, by products of pairs."""

    def __init__(
        self, f: Function, parts: Parts, rows: tuple[Function, Function], own: tuple[HalfParts, StepParts, Engine]
    ) -> None:
        super().__init__(f, parts, rows)
        self.half, self.steps, self.engine = own
        self.modified = (self.read("has_scores") | self.read("dropout")).ne(0)
        self.pad, self.pad_v = ((x + (BLOCK - 1)) & -BLOCK for x in (self.dim, self.dim_v))
        self.scale = self.floating("scale")

    def _tile(self, name: str, s: Value, rows: Value, pitch: int) -> Value:
        """Tile s of a buffer of `rows` rows of `pitch` bytes a tile."""
        return self.buffer(name).at(s * rows * pitch)

    def _load(self, name: str, source: Value, rows: Value, to: Value) -> Value:
        """Rows of q, k, v or do as they are, padded to 64; its flags NAN and INF."""
        dim, pad = (self.dim, self.pad) if name in ("q", "k") else (self.dim_v, self.pad_v)
        return self.f.call(self.half.load, source, self.read(f"{name}_n"), rows, to, pad * 2, dim)

    def _chunk(self, chunk: Value) -> None:
        f, at, kv_head = self.f, self.at, self.get["kv_head"]
        per_chunk = self.sub * WIDTH
        self.k0 = chunk * per_chunk
        self.keys = f.minimum(at["kv_len"] - self.k0, per_chunk)
        self.tiles = (self.keys + (WIDTH - 1)) // WIDTH
        with f.range(0, self.tiles) as s:
            self._load_tile(kv_head, s)
        for name, pad in (("at_dk", self.pad), ("at_dv", self.pad_v)):
            with f.range(0, self.tiles * pad * ROW, self.vec.bytes) as o:
                f.store(f.const(0.0, self.vec), self.buffer(name), o)
        first, stop = self._queries_of_chunk()
        with f.range(0, self.group) as g, f.range(first & -WIDTH, stop, WIDTH) as i0:
            self._queries(kv_head * self.group + g, i0)
        with f.range(0, self.tiles) as s:
            self._store_tile("dk", kv_head, s, self.dim, self.pitch, self.scale)
            self._store_tile("dv", kv_head, s, self.dim_v, self.pitch_v, f.const(1.0, F32))

    def _load_tile(self, kv_head: Value, s: Value) -> None:
        """K^T, V^T and K of a key tile, as pairs."""
        f, rows, nb = self.f, self.buffer("at_rows"), self._tile_keys(s)
        token = self.at["kv_token"] + self.k0 + s * WIDTH
        for n, (name, pad) in enumerate((("k", self.pad), ("v", self.pad_v))):
            bad = self._load(name, self.base(name, self.b, kv_head, token), nb, rows)
            f.store(bad, self.buffer("at_bad"), s * 16 + 8 * n)
            to = self._tile(f"at_{name}t", s, pad, HALF_ROW)
            f.call(self.half.transpose_words, rows, pad * 2, to, ROW, WIDTH, pad >> 1)
            if name == "k":
                f.call(self.half.pairs, rows, pad * 2, self._tile("at_k", s, pad, HALF_ROW))

    def _store_tile(self, name: str, kv_head: Value, s: Value, dim: Value, pitch: Value, scale: Value) -> None:
        """dK or dV of a key tile: transposed, scaled, converted."""
        f, rows = self.f, self.buffer("at_rows")
        pad = self.pad if name == "dk" else self.pad_v
        with f.when(self.need[name[1]]):
            source = self._tile("at_" + name, s, pad, ROW)
            f.call(self.parts.transpose, source, ROW, rows, pitch, pitch >> 2, WIDTH)
            to = self.base(name, self.b, kv_head, self.at["kv_token"] + self.k0 + s * WIDTH)
            f.call(self.parts.store_rows, rows, self._tile_keys(s), to, self.read(f"{name}_n"), dim, scale,
                   self.read("dtype"))  # fmt: skip

    def _queries(self, head: Value, i0: Value) -> None:
        """All key tiles of the chunk for up to 64 queries, which are brought in when the first one needs them."""
        f = self.f
        nr = f.minimum(self.at["q_len"] - i0, WIDTH)
        loaded, bad_rows, slots = f.var(I64, 0), f.var(I64, 0), f.var(I64, 0)
        table = self.buffer("at_table")
        kinds = table.at(self.sub * 8)
        with f.range(0, self.tiles) as s:
            where = (self.p, self.at["seq"], self.b, head, i0, nr, self.k0 + s * WIDTH, self._tile_keys(s))
            bits = self.buffer("at_bits").at(s * _BITS)
            kind = f.call(self.parts.mask_bits, *where, bits)
            with f.when(kind.ne(NONE)):
                with f.when(loaded.get().eq(0)):
                    bad_rows.set(self._load_queries(head, i0, nr))
                    loaded.set(1)
                bads = [f.load(I64, self.buffer("at_bad"), s * 16 + o) for o in (0, 8)]
                bad = bad_rows.get() | bads[0] | bads[1]
                partial = kind.eq(PARTIAL) | (nr < WIDTH) | (where[-1] < WIDTH)
                careful = bad.ne(0) & (partial | self.modified | (bad & INF).ne(0))
                with f.when(careful | self.modified):
                    self._step_by_step(head, i0, s, (nr, kind, bad), (careful, slots.get()))
                with f.unless(careful):
                    f.store(s, table, slots.get() * 8)
                    f.store(kind, kinds, slots.get() * 8)
                    slots.set(slots.get() + 1)
        with f.when(slots.get().ne(0)):
            with f.unless(self.modified):
                self._seen_tiles(nr, slots.get())
            with f.when(self.need["q"]):
                self._add_dq(self._acc(head, i0), nr, slots.get())

    def _load_queries(self, head: Value, i0: Value, nr: Value) -> Value:
        """Q, dO, both transposed, lse and delta; the flags of Q and dO."""
        f, token = self.f, self.at["q_token"] + i0
        bad = f.const(0, I64)
        for name, pad in (("q", self.pad), ("do", self.pad_v)):
            rows = self.buffer("at_" + name)
            bad = bad | self._load(name, self.base(name, self.b, head, token), nr, rows)
            f.call(self.half.columns, rows, pad * 2, self.buffer(f"at_{name}t"), pad >> 1)
        statistics = (self.per_query(n, self.b, head, token) for n in ("lse", "delta"))
        f.call(self.parts.load_statistics, *statistics, nr, self.buffer("at_lse"), self.buffer("at_delta"))
        return bad

    def _seen_tiles(self, nr: Value, slots: Value) -> None:
        """dV and dK of all tiles in the table, and their dS_n.

        While a strip's P and dS are formed, the scores of the next strip and the sums of the tile before are jobs.
        """
        f, jobs = self.f, self.buffer("at_drop")
        more, strips = jobs.at(SCORE_JOBS * JOB_BYTES), (nr + (STRIP - 1)) >> 5
        waiting, turn = f.var(I64, 0), f.var(I64, 0)
        zero = f.const(0, I64)
        self._score_jobs(jobs, self._seen(zero), zero, zero)
        f.call(self.engine.drain, jobs, SCORE_JOBS)
        with f.range(0, slots) as n:
            done = f.var(I64, 0)
            with f.range(0, strips) as r:
                last = r.eq(strips - 1)
                ahead = f.select(last & n.eq(slots - 1), zero, f.const(SCORE_JOBS, I64))
                with f.when(ahead.ne(0)):
                    self._score_jobs(
                        jobs, self._seen(f.select(last, n + 1, n)), f.select(last, zero, r + 1), turn.get() ^ 1
                    )
                share = f.select(last, waiting.get() - done.get(), waiting.get() >> 1)
                self._gradient(n, r, turn.get(), (jobs, ahead, more.at(done.get() * JOB_BYTES), share))
                done.set(done.get() + share)
                turn.set(turn.get() ^ 1)
            waiting.set(self._sum_jobs(more, self._seen(n), n, strips << 5))
        f.call(self.engine.drain, more, waiting.get())

    def _turn(self, name: str, turn: Value) -> Value:
        """One of two buffers."""
        return self.buffer(name).at((turn & 1) * (STRIP * ROW))

    def _seen(self, n: Value) -> Value:
        """Number n of the table: a key tile."""
        return self.f.load(I64, self.buffer("at_table"), n * 8)

    def _score_jobs(self, jobs: Value, s: Value, r: Value, turn: Value) -> None:
        """Jobs of S and dP of strip r of key tile s."""
        f = self.f
        for at, (name, right, pad, to) in enumerate((("q", "kt", self.pad, "raw"), ("do", "vt", self.pad_v, "tmp"))):
            left = self.buffer("at_" + name).at(r * STRIP * pad * 2)
            right_tile = self._tile("at_" + right, s, pad, HALF_ROW)
            f.call(self.engine.put_jobs, jobs.at(2 * at * JOB_BYTES), left, pad * 2, right_tile,
                   self._turn("at_" + to, turn), STRIP, pad, 0)  # fmt: skip

    def _gradient(self, n: Value, r: Value, turn: Value, jobs: tuple[Value, Value, Value, Value]) -> None:
        """P and dS of strip r of tile n of the table."""
        f, row = self.f, r * STRIP
        s, kind = self._seen(n), self._seen(self.sub + n)
        args = (self._turn("at_raw", turn), self._turn("at_tmp", turn), self.buffer("at_lse").at(row * 4),
                self.buffer("at_delta").at(row * 4), self.buffer("at_bits").at(s * _BITS + row * 8), self.scale,
                self._turn("at_p", n).at(r * (STRIP // 2 * ROW)), self._turn("at_ds", n).at(r * (STRIP // 2 * ROW)),
                self.buffer("at_keys").at(n * _TILE_BYTES + row * HALF_ROW), *jobs)  # fmt: skip
        with f.when(kind.eq(PARTIAL)):
            f.call(self.half.gradient_masked, *args)
        with f.unless(kind.eq(PARTIAL)):
            f.call(self.half.gradient, *args)

    def _sum_jobs(self, jobs: Value, s: Value, n: Value, queries: Value) -> Value:
        """Jobs of dV^T += dO^T P and dK^T += Q^T dS of key tile s, number n of the table; returns how many."""
        f, count = self.f, self.f.var(I64, 0)
        for name, left, right, pad in (("v", "dot", "p", self.pad_v), ("k", "qt", "ds", self.pad)):
            with f.when(self.need[name]):
                to = jobs.at(count.get() * JOB_BYTES)
                f.call(self.engine.put_jobs, to, self.buffer("at_" + left), HALF_ROW, self._turn("at_" + right, n),
                       self._tile("at_d" + name, s, pad, ROW), pad, queries, 1)  # fmt: skip
                count.set(count.get() + (pad >> 4))
        return count.get()

    def _add_dq(self, acc: Value, nr: Value, slots: Value) -> None:
        """dQ += dS K; by way of scratch where rows behind nr belong to others."""
        f, acc_pitch, own = self.f, self.read("acc_n"), self.buffer("at_dq")
        args = (slots, self.buffer("at_table"), self.buffer("at_keys"), self.buffer("at_k"), self.pad)
        with f.when(nr.eq(WIDTH)):
            f.call(self.engine.dq, *args, acc, acc_pitch, WIDTH, 1)
        with f.unless(nr.eq(WIDTH)):
            f.call(self.engine.dq, *args, own, self.pad * 4, (nr + (BLOCK - 1)) & -BLOCK, 0)
            f.call(self.half.add_block, own, self.pad * 4, acc, acc_pitch, nr, self.pitch)

    def _step_by_step(
        self, head: Value, i0: Value, s: Value, tile: tuple[Value, Value, Value], how: tuple[Value, Value]
    ) -> None:
        """All of a tile but dQ, left to `_add_dq`; if `careful`, dQ too, and only visible pairs are touched."""
        f, steps, (nr, kind, bad), (careful, n) = self.f, self.steps, tile, how
        jobs, queries = self.buffer("at_drop"), (nr + (STRIP - 1)) & -STRIP
        bits, p, ds = self.buffer("at_bits").at(s * _BITS), self.buffer("at_raw"), self.buffer("at_tmp")
        j0, nb, shown = self.k0 + s * WIDTH, self._tile_keys(s), f.var(I64, kind)
        kt, vt = (self._tile(x, s, pad, HALF_ROW) for x, pad in (("at_kt", self.pad), ("at_vt", self.pad_v)))
        with f.when(careful):
            with f.when(kind.eq(ALL)):
                f.call(steps.all_bits, bits, nr, nb)
                shown.set(PARTIAL)
            f.call(steps.exact_scores, self.buffer("at_q"), self.dim, kt, nr, p)
            f.call(steps.exact_scores, self.buffer("at_do"), self.dim_v, vt, nr, ds)
        with f.unless(careful), f.range(0, queries >> 5) as r:
            self._score_jobs(jobs, s, r, r)
            f.call(self.engine.drain, jobs, SCORE_JOBS)
        where = (self.p, self.at["seq"], self.b, head, i0, nr, j0, nb)
        f.call(steps.steps, *where, shown.get(), bad, bits, self.scratch)
        with f.when(careful):
            for name, t, left, dim, pad in (("v", p, "do", self.dim_v, self.pad_v), ("k", ds, "q", self.dim, self.pad)):
                to = self._tile("at_d" + name, s, pad, ROW)
                f.call(steps.exact_sums, bits, nr, t, self.buffer("at_" + left), dim, to)
            with f.when(self.need["q"]):
                f.call(steps.exact_dq, bits, nr, ds, kt, self.dim, self._acc(head, i0), self.read("acc_n"))
        with f.unless(careful):
            f.call(steps.pack_tile, p, ds, nr, self._turn("at_p", n), self._turn("at_ds", n),
                   self.buffer("at_keys").at(n * _TILE_BYTES))  # fmt: skip
            f.call(self.engine.drain, jobs, self._sum_jobs(jobs, s, n, queries))
