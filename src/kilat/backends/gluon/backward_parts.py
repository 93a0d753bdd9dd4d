"""Parts that the backward kernels share: shared memory, the mask, the TMA producer, the epilogue.

A program (CTA) owns 128 keys of one key/value head. It runs over turns t = 0 .. turns - 1: the blocks of queries that
see its keys, each for all query heads of the group. A TMA producer feeds two consumer warpgroups of 64 keys each.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# The annotations of aggregates are read when the class is made, so they must not be strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kilat.backends.gluon._compat import aggregate, async_load, async_reduce_add, async_store, cta_barrier
from kilat.backends.gluon.backward_place import row_and_tile

BLOCK_KV = gl.constexpr(128)  # below head_dim 129


@aggregate
class Shared:
    """Shared memory and barriers of a program; 'full' and 'free' say what the barrier's completion means."""

    q: gl.shared_memory_descriptor  # [stages, 1, BM, 1, D]
    do: gl.shared_memory_descriptor  # [2, 1, BM, 1, D]
    k: gl.shared_memory_descriptor  # [2, 1, 64, 1, D], one for each warpgroup
    v: gl.shared_memory_descriptor  # [2, 1, 64, 1, D]
    ds: gl.shared_memory_descriptor  # [buffers, 64, 64], keys x queries
    dq: gl.shared_memory_descriptor  # [2, 32, 128], one for each warpgroup, in fragment order
    lse: gl.shared_memory_descriptor  # [stages * BM / 64, 1, 64], log2 units
    delta: gl.shared_memory_descriptor  # [2 * BM / 64, 1, 64]
    kv_raw: gl.shared_memory_descriptor  # k and v before their last rows are cleared
    q_raw: gl.shared_memory_descriptor  # q and do, likewise
    kv_full: gl.shared_memory_descriptor  # k; if FOREIGN v, too
    q_full: gl.shared_memory_descriptor  # q and lse
    do_full: gl.shared_memory_descriptor  # do and delta; in the first turn v, too, unless FOREIGN
    free: gl.shared_memory_descriptor  # q and lse of a stage, and the do and delta of the same turn
    ds_full: gl.shared_memory_descriptor  # both warpgroups have stored their half; below head_dim 65
    done: gl.shared_memory_descriptor  # both warpgroups have read k for the last time; below head_dim 65
    go: gl.shared_memory_descriptor  # warpgroup 0 has had its head start; below head_dim 65
    turn: gl.shared_memory_descriptor  # [2]: warpgroup w has done its elementwise part of a turn; from head_dim 65 on

    @gluon.constexpr_function
    def __init__(
        self, q, do, k, v, ds, dq, lse, delta, kv_raw, q_raw, kv_full, q_full, do_full, free, ds_full,
        done, go, turn,
    ):  # fmt: skip
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.ds = ds
        self.dq = dq
        self.lse = lse
        self.delta = delta
        self.kv_raw = kv_raw
        self.q_raw = q_raw
        self.kv_full = kv_full
        self.q_full = q_full
        self.do_full = do_full
        self.free = free
        self.ds_full = ds_full
        self.done = done
        self.go = go
        self.turn = turn


@gluon.jit
def barriers(count, N: gl.constexpr):
    """N barriers that each take `count` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def is_masked(x, row, BM: gl.constexpr, BLOCK_KV: gl.constexpr):
    """Whether some of the BM queries from `row` do not see some of the program's keys, or keys lie past the end."""
    last_key = x.key + BLOCK_KV - 1
    return (last_key >= x.kv_len) | (last_key - row > x.high) | (x.key - row - (BM - 1) < x.low)


@gluon.jit
def hide(p, x, kv_full, row, W: gl.constexpr, layout: gl.constexpr):
    """p [64 keys of warpgroup W, 64 queries from `row`] with 0 where the mask hides the key.

    To be called under `if is_masked(...)`. The wait has long been over; its loop keeps the branch a branch, which would
    otherwise become selects that every block pays for.
    """
    mbarrier.wait(kv_full, 0)
    query = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    lane = query & 6  # to the key's side of the comparisons, which leaves constants; see `forward_parts.hide`
    j = x.key + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    last = gl.where(j < x.kv_len, gl.maximum(j - row - x.low, -1), -1)
    first = gl.expand_dims(j - row - x.high, 1) - lane
    seen = (query - lane >= first) & (query - lane <= gl.expand_dims(last, 1) - lane)
    return gl.where(seen, p, 0.0)


@gluon.jit
def probabilities(s, lse, factor, cap_log2, SOFTCAP: gl.constexpr):
    """(P = exp2(score - lse), d score / d (scale s)), the latter 1 without a softcap.

    factor is scale * log2(e); with a softcap 2 * log2(e) * scale / cap, because tanh(y) = 1 - 2 / (1 + exp(2 y)).
    """
    if SOFTCAP:
        tanh = 1.0 - 2.0 / (1.0 + gl.exp2(s * factor))
        return gl.exp2(tanh * cap_log2 - lse), 1.0 - tanh * tanh
    else:
        return gl.exp2(s * factor - lse), 1.0


@gluon.jit
def fragment_order(x):
    """[64, 64] of an MMA accumulator -> [32, 128] in which a thread owns 16-byte pieces; no data moves between threads.

    Rows split as (warp 4, half 2, 8), columns as (8, lane 4, pair 2); the order is (warp, 8 columns, 8 rows, lane,
    half, pair). `backward_rows.finish_kernel` undoes it.
    """
    return x.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([32, 128])


@gluon.jit
def add_dq(dq, dq_desc, buffer, piece):
    """Add a [64, 64] piece of dQ to piece number `piece` of the accumulator, by TMA."""
    buffer.store(fragment_order(dq))
    fence_async_shared()
    async_reduce_add(dq_desc, [piece * 32, 0], buffer)


@gluon.jit
def clear_rows(buffer, first, ROWS: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a [1, ROWS, 1, D] buffer from `first` on; 8 or 16 rows at a time, for want of registers."""
    STEP: gl.constexpr = 1024 // D if D < 256 else 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tile = buffer.reshape([ROWS, D])
    for start in gl.static_range(0, ROWS, STEP):
        if start + STEP > first:
            part = tile.slice(start, STEP, dim=0)
            row = start + gl.arange(0, STEP, gl.SliceLayout(1, layout))
            part.store(gl.where(gl.expand_dims(row, 1) < first, part.load(layout), 0.0).to(buffer.dtype))


@gluon.jit
def load_both_halves(desc, x, buffer, bar):
    """K or V of both warpgroups, with its bytes counted at `bar`."""
    for w in gl.static_range(2):
        async_load(desc, [x.kv_batch, x.kv_start + x.key + w * 64, x.head_kv, 0], bar, buffer.index(w))


@gluon.jit
def load_keys(k_desc, v_desc, x, r, D: gl.constexpr, FOREIGN: gl.constexpr):
    """K of the program. FOREIGN: behind the sequence lies what is not its own, and must be zeroed (0 * NaN); V, too."""
    K_BYTES: gl.constexpr = 2 * k_desc.block_type.nbytes
    V_BYTES: gl.constexpr = 2 * v_desc.block_type.nbytes
    if FOREIGN & (x.key + BLOCK_KV > x.kv_len):
        mbarrier.expect(r.kv_raw, K_BYTES + V_BYTES)
        load_both_halves(k_desc, x, r.k, r.kv_raw)
        load_both_halves(v_desc, x, r.v, r.kv_raw)
        mbarrier.wait(r.kv_raw, 0)
        for w in gl.static_range(2):
            clear_rows(r.k.index(w), x.kv_len - x.key - w * 64, 64, D)
            clear_rows(r.v.index(w), x.kv_len - x.key - w * 64, 64, D)
        fence_async_shared()
        cta_barrier()
        mbarrier.arrive(r.kv_full, count=1)
    else:
        mbarrier.expect(r.kv_full, K_BYTES + V_BYTES if FOREIGN else K_BYTES)
        load_both_halves(k_desc, x, r.k, r.kv_full)
        if FOREIGN:
            load_both_halves(v_desc, x, r.v, r.kv_full)


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, x, r,
    BM: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """The producer: K and V once, then Q and lse, dO and delta of every turn.

    What S waits for comes first. Unless FOREIGN, V comes with the first dO.
    """
    ROWS: gl.constexpr = BM // 64
    DO_BYTES: gl.constexpr = do_desc.block_type.nbytes + BM * 4
    load_keys(k_desc, v_desc, x, r, D, FOREIGN)
    STAGES: gl.constexpr = r.q.shape[0]
    shorts = 0
    for t in range(x.turns):
        stage = t % STAGES
        do_stage = t % 2
        row, tile = row_and_tile(x, t, BM, GROUP)
        at = [x.q_batch, x.q_start + row, x.head_q + t % GROUP, 0]
        q_full = r.q_full.index(stage)
        do_full = r.do_full.index(do_stage)
        is_short = FOREIGN & (row < x.q_len) & (row + BM > x.q_len)
        if STAGES == 2:  # of three, Q's is free when the dO of the turn before could be asked for
            mbarrier.wait(r.free.index(stage), ((t // 2) & 1) ^ 1)
        if is_short:
            mbarrier.expect(r.q_raw, q_desc.block_type.nbytes)
            async_load(q_desc, at, r.q_raw, r.q.index(stage))
            mbarrier.wait(r.q_raw, shorts & 1)
            shorts += 1
            clear_rows(r.q.index(stage), x.q_len - row, BM, D)
            fence_async_shared()
            cta_barrier()
            mbarrier.expect(q_full, BM * 4)
        else:
            mbarrier.expect(q_full, q_desc.block_type.nbytes + BM * 4)
            async_load(q_desc, at, q_full, r.q.index(stage))
        # Before dO, since S is what the consumers wait for.
        for i in gl.static_range(ROWS):
            async_load(lse_desc, [tile + i, 0], q_full, r.lse.index(stage * ROWS + i))
        if STAGES == 3 and t >= 2:
            mbarrier.wait(r.free.index((t + 1) % 3), ((t - 2) // 3) & 1)
        if is_short:
            mbarrier.expect(r.q_raw, do_desc.block_type.nbytes)
            async_load(do_desc, at, r.q_raw, r.do.index(do_stage))
            mbarrier.wait(r.q_raw, shorts & 1)
            shorts += 1
            clear_rows(r.do.index(do_stage), x.q_len - row, BM, D)
            fence_async_shared()
            cta_barrier()
            mbarrier.expect(do_full, BM * 4)
        else:
            if not FOREIGN and t == 0:
                mbarrier.expect(do_full, DO_BYTES + 2 * v_desc.block_type.nbytes)
                load_both_halves(v_desc, x, r.v, do_full)
            else:
                mbarrier.expect(do_full, DO_BYTES)
            async_load(do_desc, at, do_full, r.do.index(do_stage))
        for i in gl.static_range(ROWS):
            async_load(delta_desc, [tile + i, 0], do_full, r.delta.index(do_stage * ROWS + i))


@gluon.jit
def store_rows(
    value, buffer, desc, ptr, at, seqlen, heads, dim, FIRST: gl.constexpr, D: gl.constexpr, FOREIGN: gl.constexpr
):
    """Write [64, D], columns from FIRST on, of a gradient [.., seqlen, heads, dim] that is contiguous.

    It goes through shared memory (`buffer`).
    at = (batch, first token of the sequence, row, length of the sequence, head); rows from the length on are not
    written where something else may lie there (FOREIGN).
    """
    batch, start, row, length, head = at
    buffer.reshape([64, D]).store(value.to(buffer.dtype))
    if FOREIGN:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        rows = buffer.reshape([64, D]).load(layout)
        i = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
        c = FIRST + gl.arange(0, D, gl.SliceLayout(0, layout))
        token = (batch.to(gl.int64) * seqlen + start) * heads + head
        offset = gl.expand_dims(i.to(gl.int64) * heads * dim, 1) + gl.expand_dims(c, 0)
        inside = gl.expand_dims(i < length, 1) & gl.expand_dims(c < dim, 0)
        gl.store(ptr + token * dim + offset, rows, mask=inside)
    else:
        fence_async_shared()
        async_store(desc, [batch, start + row, head, FIRST], buffer)
