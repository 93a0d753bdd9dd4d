"""The backward kernels for one instruction set and compute type.

    delta_i = sum_d do_id o_id - dlse_i
    p_ij = exp(s_ij - lse_i)    dp_ij = do_i . v_j    ds_ij = p_ij (dp_ij - delta_i)
    dv_j += p_ij do_i    dk_j += ds_ij scale q_i    dq_i += scale ds_ij k_j

FlashAttention-2 (Dao 2023), algorithm 2. Three kernels run one after the other: `run_deltas`; `run_chunks`, in which a
task owns the dK and dV of a range of keys of one kv head (all its query heads, all queries that see it) and adds dQ
into a buffer of its own; `run_finish`, which sums those buffers in a fixed order. So no bit depends on the number of
threads. Where no kv head's keys are split, `run_chunks` does all three.
"""

from __future__ import annotations

from kilat.backends.cpu.backward_bias import build_bias, build_sink
from kilat.backends.cpu.backward_parts import Parts, Tiles, Worker, build_parts
from kilat.backends.cpu.backward_products import BLOCK_Q, extents_size, padded
from kilat.backends.cpu.emit import I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.gemm import Blocking
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.params import Params
from kilat.backends.cpu.tiles_mask import NONE, PARTIAL

# A range of chunks of keys of one kv head; `split` is the dQ buffer that it adds to.
CHUNKS = Params("seq", "kv_head", "chunk0", "chunk1", "split")
# Some queries of one head, at most 64; `splits` is the number of dQ buffers that hold a part of theirs.
ROWS = Params("seq", "head", "first", "count", "splits")

EXPORTS = ("run_deltas", "run_chunks", "run_finish", "run_bias", "run_sink")


def build(isa: Isa, compute: Type) -> str:
    """IR of the module; exports `EXPORTS`, each `void name(params)`."""
    m = Module()
    parts = build_parts(m, isa, compute)
    rows = (build_delta_rows(m, parts), build_finish_rows(m, parts))
    for name, callee in zip(("run_deltas", "run_finish"), rows, strict=True):
        with m.function(name, [PTR], exported=True) as f:
            Rows(f, parts).run(callee)
    with m.function("run_chunks", [PTR], exported=True) as f:
        worker = Main(f, parts, rows)
        worker.each_task(CHUNKS, worker.task)
    build_bias(m, parts)
    build_sink(m, parts)
    return m.text()


def scratch_layout(block: Blocking, head_dim: int, head_dim_v: int, sub: int) -> tuple[dict[str, int], int]:
    """Byte offsets of a thread's buffers, and the size of all of them; `sub` key tiles a chunk."""
    size, lanes, width = block.compute.bytes, block.lanes, block.lanes * block.vectors
    pad, pad_v = (-(-d // lanes) * lanes * size for d in (head_dim, head_dim_v))
    tile, bits = BLOCK_Q * width * size, BLOCK_Q * block.vectors * 2
    sizes = {"at_q": BLOCK_Q * pad, "at_do": BLOCK_Q * pad_v, "at_out": BLOCK_Q * pad_v}
    sizes |= dict.fromkeys(("at_lse", "at_delta"), BLOCK_Q * size)
    sizes |= dict.fromkeys(("at_p", "at_ds", "at_raw", "at_tmp"), tile)
    sizes |= {"at_bits": bits, "at_drop": bits, "at_table": 8 * extents_size(block), "at_bad": 16 * sub}
    sizes |= dict.fromkeys(("at_k", "at_kt", "at_dk"), sub * width * pad)
    sizes |= dict.fromkeys(("at_vt", "at_dv"), sub * width * pad_v)
    offsets, total = {}, 0
    for name, n in sizes.items():
        offsets[name] = total
        total += -(-n // 64) * 64
    return offsets, -(-total // 4096) * 4096 + 64


# P, scratch, seq, head, first query, number of queries (at most 64)
_ROW_ARGS = (PTR, PTR, I64, I64, I64, I64)


def build_delta_rows(m: Module, parts: Parts) -> Function:
    """delta_rows(P, scratch, b, h, first, count, splits): delta = rowsum(do * o) - dlse; `splits` is not used."""
    with m.function("delta_rows", [*_ROW_ARGS, I64]) as f:
        p, scratch, b, head, first, count, _ = f.args
        scope = Tiles(f, parts, p, scratch)
        token, vec, size = scope.sequence(b)["q_token"] + first, scope.vec, scope.size
        for name in ("out", "do"):
            scope.load(name, scope.base(name, b, head, token), count, 0, scope.buffer("at_" + name))
        out, do = scope.buffer("at_out"), scope.buffer("at_do")
        to, dlse = scope.per_query("delta", b, head, token), scope.per_query("dlse", b, head, token)
        has_dlse = scope.read("dlse").ne(0)
        with f.range(0, count) as r:
            total = f.var(vec, 0.0)
            with f.range(r * scope.pitch_v, (r + 1) * scope.pitch_v, vec.bytes) as o:
                x = f.load(vec, out, o)
                more = f.fma(x, f.load(vec, do, o), total.get())
                total.set(f.select(x.ne(0.0), more, total.get()))  # a row that sees nothing ignores its do, NaN too
            delta = f.var(vec.scalar, f.reduce(total.get(), "add"))
            with f.when(has_dlse):
                delta.set(delta.get() - f.load(vec.scalar, dlse, r * size))
            f.store(delta.get(), to, r * size)
    return f


def build_finish_rows(m: Module, parts: Parts) -> Function:
    """finish_rows(P, scratch, b, h, first, count, splits): dq = scale * (sum of `splits` dQ buffers), converted."""
    with m.function("finish_rows", [*_ROW_ARGS, I64]) as f:
        p, scratch, b, head, first, count, splits = f.args
        scope = Tiles(f, parts, p, scratch)
        token, vec = scope.sequence(b)["q_token"] + first, scope.vec
        source, row, split = scope.base("acc", b, head, token), scope.read("acc_n"), scope.read("acc_split")
        others = source.at(scope.read("acc_second"))
        rows = scope.buffer("at_q")
        with f.range(0, count) as r, f.range(0, scope.pitch, vec.bytes) as o:
            total = f.var(vec, f.load(vec, source, r * row + o))
            with f.range(0, splits - 1) as s:
                total.set(total.get() + f.load(vec, others, r * row + o + s * split))
            f.store(total.get(), rows, r * scope.pitch + o)
        f.call(parts.store_rows, rows, count, scope.base("dq", b, head, token), scope.read("dq_n"), scope.dim,
               scope.floating("scale"), scope.read("dtype"))  # fmt: skip
    return f


class Rows(Worker):
    """A kernel whose tasks are `ROWS`."""

    def run(self, callee: Function) -> None:
        def task(get: dict[str, Value]) -> None:
            self.f.call(callee, self.p, self.scratch, *(get[n] for n in ROWS.names))

        self.each_task(ROWS, task)


class Main(Worker):
    """dK and dV of a range of keys, and its part of dQ; of its query heads delta and dq too if they are its alone."""

    def __init__(self, f: Function, parts: Parts, rows: tuple[Function, Function]) -> None:
        super().__init__(f, parts)
        self.rows = rows

    def task(self, get: dict[str, Value]) -> None:
        f = self.f
        self.get, self.b, self.at = get, get["seq"], self.sequence(get["seq"])
        self.need = {n: self.read(f"need_{n}").ne(0) for n in "qkv"}
        self.sub, self.group = self.read("sub"), self.read("group")
        alone = self.read("alone").ne(0)
        with f.when(alone):
            self._each_row_block(self.rows[0])
        with f.when(self.need["q"]):
            self._clear_dq()
        with f.range(get["chunk0"], get["chunk1"]) as chunk:
            self._chunk(chunk)
        with f.when(alone & self.need["q"]):
            self._each_row_block(self.rows[1])

    def _each_row_block(self, callee: Function) -> None:
        f, q_len = self.f, self.at["q_len"]
        with f.range(0, self.group) as g, f.range(0, q_len, BLOCK_Q) as first:
            head, count = self.get["kv_head"] * self.group + g, f.minimum(q_len - first, BLOCK_Q)
            f.call(callee, self.p, self.scratch, self.b, head, first, count, 1)

    def _acc(self, head: Value, i: Value) -> Value:
        """Row i of this task's dQ buffer."""
        f, split = self.f, self.get["split"]
        offset = self.read("acc_second") + (split - 1) * self.read("acc_split")
        first = self.base("acc", self.b, head, self.at["q_token"] + i)
        return first.at(f.select(split.eq(0), f.const(0, I64), offset))

    def _clear_dq(self) -> None:
        f, row = self.f, self.read("acc_n")
        with f.range(0, self.group) as g:
            start = self._acc(self.get["kv_head"] * self.group + g, f.const(0, I64))
            with f.range(0, self.at["q_len"]) as i, f.range(0, self.pitch, self.vec.bytes) as o:
                f.store(f.const(0.0, self.vec), start, i * row + o)

    def _chunk(self, chunk: Value) -> None:
        f, at, kv_head = self.f, self.at, self.get["kv_head"]
        per_chunk = self.sub * self.width
        self.k0 = chunk * per_chunk
        self.keys = f.minimum(at["kv_len"] - self.k0, per_chunk)
        self.tiles = (self.keys + (self.width - 1)) // self.width
        with f.range(0, self.tiles) as s:
            self.load_keys(at, self.b, kv_head, self.k0 + s * self.width, self._tile_keys(s), s)
        for name, pitch in (("at_dk", self.pitch), ("at_dv", self.pitch_v)):
            with f.range(0, padded(self.keys, self.block) * pitch, self.vec.bytes) as o:
                f.store(f.const(0.0, self.vec), self.buffer(name), o)
        first, stop = self._queries_of_chunk()
        with f.range(0, self.group) as g, f.range(first & -BLOCK_Q, stop, BLOCK_Q) as i0:
            self._queries(kv_head * self.group + g, i0)
        one, code = f.const(1.0, self.block.compute), self.read("dtype")
        for name, dim in (("dk", self.dim), ("dv", self.dim_v)):
            with f.when(self.need[name[1]]):
                to = self.base(name, self.b, kv_head, at["kv_token"] + self.k0)
                f.call(
                    self.parts.store_rows,
                    self.buffer("at_" + name),
                    self.keys,
                    to,
                    self.read(f"{name}_n"),
                    dim,
                    one,
                    code,
                )

    def _tile_keys(self, s: Value) -> Value:
        return self.f.minimum(self.keys - s * self.width, self.width)

    def _queries_of_chunk(self) -> tuple[Value, Value]:
        """[first, stop): from the first to the last query whose intervals touch the chunk, by bisection."""
        f, n, q_len = self.f, self.read("n_intervals"), self.at["q_len"]
        first, stop = f.var(I64, 0), f.var(I64, q_len)
        with f.when(n.ne(0)):
            first.set(q_len)
            stop.set(0)
            with f.range(0, n) as k:
                starts = f.load(PTR, self.at["seq"], 8 * 4).at(k * q_len * 8)
                lo = f.call(self.parts.first_above, starts.at(q_len * 4), q_len, self.k0)
                hi = f.call(self.parts.first_above, starts, q_len, self.k0 + self.keys - 1)
                with f.when(lo < hi):
                    first.set(f.minimum(first.get(), lo))
                    stop.set(f.maximum(stop.get(), hi))
        return first.get(), stop.get()

    def _queries(self, head: Value, i0: Value) -> None:
        """All key tiles of the chunk for up to 64 queries, which are brought in when the first one needs them."""
        f, at = self.f, self.at
        nr = f.minimum(at["q_len"] - i0, BLOCK_Q)
        loaded, bad_q, bad_do = f.var(I64, 0), f.var(I64, 0), f.var(I64, 0)
        with f.range(0, self.tiles) as s:
            j0, nb = self.k0 + s * self.width, self._tile_keys(s)
            where = (self.p, at["seq"], self.b, head, i0, nr, j0, nb)
            kind = f.var(I64, f.call(self.parts.mask_bits, *where, self.buffer("at_bits")))
            with f.when(kind.get().ne(NONE)):
                with f.when(loaded.get().eq(0)):
                    for flag, bad in zip((bad_q, bad_do), self.load_queries(at, self.b, head, i0, nr), strict=True):
                        flag.set(bad)
                    loaded.set(1)
                    rows, row = self._acc(head, i0), self.read("acc_n")
                    with f.range(0, nr) as r, f.range(0, self.pitch, 64) as o:  # dQ is the one tile from far away
                        f.prefetch(rows.at(r * row + o))
                bad_k, bad_v = (f.load(I64, self.buffer("at_bad"), s * 16 + o) for o in (0, 8))
                kt, vt = self.slot("at_kt", s, self.pitch), self.slot("at_vt", s, self.pitch_v)
                any_bad = bad_q.get() | bad_do.get() | bad_k | bad_v
                kind.set(f.call(self.parts.tile, *where, kind.get(), any_bad, kt, vt, self.scratch))
                partial = kind.get().eq(PARTIAL)
                self._add("v", s, nr, nb, partial & bad_do.get().ne(0))
                self._add("k", s, nr, nb, partial & bad_q.get().ne(0))
                self._add("q", s, nr, nb, partial & bad_k.ne(0), self._acc(head, i0))

    def _add(self, name: str, s: Value, nr: Value, nb: Value, careful: Value, acc: Value | None = None) -> None:
        """dV += P^T dO, dK += dS^T Q or dQ += dS K; `careful`: over visible pairs only."""
        f, products = self.f, self.parts.products
        dim, pitch = (self.dim_v, self.pitch_v) if name == "v" else (self.dim, self.pitch)
        vectors = padded(dim, self.block) // self.block.lanes
        tile, table, bits = (
            self.buffer("at_p" if name == "v" else "at_ds"),
            self.buffer("at_table"),
            self.buffer("at_bits"),
        )
        if acc is None:
            source, to, to_pitch = (
                self.buffer("at_do" if name == "v" else "at_q"),
                self.slot(f"at_d{name}", s, pitch),
                pitch,
            )
        else:
            source, to, to_pitch = self.slot("at_k", s, pitch), acc, self.read("acc_n")
        with f.when(self.need[name]):
            with f.when(careful):
                f.call(products.add_select, bits, tile, source, pitch, to, to_pitch, vectors, nr, nb, int(acc is None))
            with f.unless(careful):
                if acc is None:
                    f.call(products.add_keys, tile, source, pitch, to, vectors, table, nb)
                else:
                    f.call(products.add_rows, tile, source, pitch, to, to_pitch, vectors, table, nr, nb)
