"""dQ by blocks of queries, for deterministic=True: no sum crosses programs, so its order is fixed.

A program owns 128 queries of one head, 64 for each of two consumer warpgroups, and streams the keys that they see
through a ring:

    S = Q K^T,  P = exp2(score - lse),  dP = dO V^T,  dS = P (dP - delta) dscore,  dQ += dS K,  dQ = scale dQ

The product that gives dQ of one block of keys is issued with S of the next.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# The annotations of aggregates are read when the class is made, so they must not be strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kilat.backends.gluon._compat import aggregate, async_load, cta_barrier
from kilat.backends.gluon.backward_parts import band, barriers, clear_rows, probabilities, sequence_of, span, store_rows

BLOCK_Q = gl.constexpr(128)
STAGES = gl.constexpr(3)


@aggregate
class Queries:
    """Where a program works, and which keys its queries see."""

    batch: gl.tensor  # first coordinate in the descriptors: 0 if ragged
    q_start: gl.tensor  # second coordinate of its sequence's first query
    kv_start: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    head: gl.tensor
    head_kv: gl.tensor
    row: gl.tensor  # first query of the program, inside the sequence
    tile: gl.tensor  # its first tile of lse and delta
    low: gl.tensor  # key j is visible to query i iff low <= j - i <= high
    high: gl.tensor
    first: gl.tensor  # first block of keys
    turns: gl.tensor  # number of blocks; one behind the last key if there is none

    @gluon.constexpr_function
    def __init__(
        self, batch, q_start, kv_start, q_len, kv_len, head, head_kv, row, tile, low, high, first, turns
    ):  # fmt: skip
        self.batch = batch
        self.q_start = q_start
        self.kv_start = kv_start
        self.q_len = q_len
        self.kv_len = kv_len
        self.head = head
        self.head_kv = head_kv
        self.row = row
        self.tile = tile
        self.low = low
        self.high = high
        self.first = first
        self.turns = turns


@aggregate
class Ring:
    """Shared memory and barriers."""

    q: gl.shared_memory_descriptor  # [2, 1, 64, 1, D], one for each warpgroup
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # [STAGES, 1, BN, 1, D]
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    raw: gl.shared_memory_descriptor  # a short block of keys before its last rows are cleared
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, q_full, raw, k_full, v_full, k_free, v_free):
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.q_full = q_full
        self.raw = raw
        self.k_full = k_full
        self.v_full = v_full
        self.k_free = k_free
        self.v_free = v_free


@gluon.jit
def queries_of(
    offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_q,
    left, right, right_top_left, blocks, tiles, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Where the program with this id works: queries first, then heads, then sequences; the last queries first."""
    pid = gl.program_id(0)
    block = blocks - 1 - pid % blocks
    head = (pid // blocks) % num_heads_q
    if offsets_q is not None:
        sequence = sequence_of(offsets_q, block, batch, BLOCK_Q)
        block -= gl.load(offsets_q + sequence) // BLOCK_Q + sequence
        tile = (gl.load(offsets_q + sequence) // BM + sequence) * (BM // 64) + head * tiles
        in_batch = sequence * 0
    else:
        sequence = pid // blocks // num_heads_q
        tile = (sequence * num_heads_q + head) * tiles
        in_batch = sequence
    q_start, q_len = span(offsets_q, lengths_q, sequence, seqlen_q)
    kv_start, kv_len = span(offsets_kv, lengths_kv, sequence, seqlen_kv)
    low, high = band(q_len, kv_len, left, right, right_top_left)
    row = block * BLOCK_Q
    last_row = gl.minimum(row + BLOCK_Q, q_len) - 1
    first_key = gl.maximum(row + low, 0)
    last_key = gl.minimum(last_row + high, kv_len - 1)
    first = first_key // BN
    turns = last_key // BN + 1 - first
    if (last_row < row) | (last_key < first_key):
        first = seqlen_kv // BN + 1
        turns = first * 0 + 1
    return Queries(
        in_batch, q_start, kv_start, q_len, kv_len, head, head // GROUP, row, tile + row // 64, low, high, first, turns
    )


@gluon.jit
def produce_keys(q_desc, do_desc, k_desc, v_desc, x, r, BN: gl.constexpr, D: gl.constexpr, FOREIGN: gl.constexpr):
    """Q and dO once, then K and V of every turn."""
    mbarrier.expect(r.q_full, 2 * q_desc.block_type.nbytes + 2 * do_desc.block_type.nbytes)
    for w in gl.static_range(2):
        at = [x.batch, x.q_start + x.row + w * 64, x.head, 0]
        async_load(q_desc, at, r.q_full, r.q.index(w))
        async_load(do_desc, at, r.q_full, r.do.index(w))
    for t in range(x.turns):
        stage = t % STAGES
        phase = ((t // STAGES) & 1) ^ 1
        key = (x.first + t) * BN
        at = [x.batch, x.kv_start + key, x.head_kv, 0]
        k_full = r.k_full.index(stage)
        v_full = r.v_full.index(stage)
        mbarrier.wait(r.k_free.index(stage), phase)
        mbarrier.wait(r.v_free.index(stage), phase)
        if FOREIGN & (key + BN > x.kv_len):  # the last turn: 0 * NaN is NaN
            mbarrier.expect(r.raw, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            async_load(k_desc, at, r.raw, r.k.index(stage))
            async_load(v_desc, at, r.raw, r.v.index(stage))
            mbarrier.wait(r.raw, 0)
            clear_rows(r.k.index(stage), x.kv_len - key, BN, D)
            clear_rows(r.v.index(stage), x.kv_len - key, BN, D)
            fence_async_shared()
            cta_barrier()
            mbarrier.arrive(k_full, count=1)
            mbarrier.arrive(v_full, count=1)
        else:
            mbarrier.expect(k_full, k_desc.block_type.nbytes)
            async_load(k_desc, at, k_full, r.k.index(stage))
            mbarrier.expect(v_full, v_desc.block_type.nbytes)
            async_load(v_desc, at, v_full, r.v.index(stage))


@gluon.jit
def consume_keys(
    dq_desc, dq_ptr, lse_tiles, delta_tiles, x, r, seqlen_q, num_heads_q, dim, scale, factor, cap_log2,
    W: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, SOFTCAP: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """dQ of 64 queries."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = r.k.dtype
    i = gl.arange(0, 64, rows)
    stored = (x.tile + W).to(gl.int64) * 64 + i
    in_tiles = x.row + W * 64 + i < x.q_len  # lse and delta end with the sequence's last tile
    lse = gl.expand_dims(gl.load(lse_tiles + stored, mask=in_tiles, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(delta_tiles + stored, mask=in_tiles, other=0.0), 1)
    dq = gl.zeros([64, D], gl.float32, d_layout)
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    ds_operand = gl.zeros([64, BN], dtype, a_layout)
    q = r.q.index(W).reshape([64, D])
    do = r.do.index(W).reshape([64, D])
    gl.assume(x.turns > 0)
    mbarrier.wait(r.q_full, 0)
    mbarrier.wait(r.k_full.index(0), 0)
    for t in range(x.turns):
        stage = t % STAGES
        phase = (t // STAGES) & 1
        before = gl.maximum(t - 1, 0) % STAGES
        k = r.k.index(stage).reshape([BN, D])
        v = r.v.index(stage).reshape([BN, D])
        # The first turn adds nothing.
        dq_next = warpgroup_mma(ds_operand, r.k.index(before).reshape([BN, D]), dq, is_async=True)  # [64, D]
        mbarrier.wait(r.k_full.index(stage), phase)
        s_next = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)  # [64, BN]
        mbarrier.wait(r.v_full.index(stage), phase)
        dp_next = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)  # [64, BN]
        dq, s = warpgroup_mma_wait(1, deps=[dq_next, s_next])
        if t > 0:
            mbarrier.arrive(r.k_free.index(before), count=1)
        p, slope = probabilities(s, lse, factor, cap_log2, SOFTCAP)
        key = (x.first + t) * BN
        row = x.row + W * 64
        if (key + BN > x.kv_len) | (key + BN - 1 - row > x.high) | (key - row - 63 < x.low):
            mbarrier.wait(r.q_full, 0)  # long over; it keeps this a branch, see `backward_parts.hide`
            j = key + gl.arange(0, BN, gl.SliceLayout(0, s_layout))
            distance = gl.expand_dims(j, 0) - gl.expand_dims(row + i, 1)
            seen = (distance >= x.low) & (distance <= x.high) & gl.expand_dims(j < x.kv_len, 0)
            p = gl.where(seen, p, 0.0)
        weight = p * slope
        mbarrier.wait(r.v_full.index(stage), phase)  # long over; keeps the exponentials under the product dP
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        mbarrier.arrive(r.v_free.index(stage), count=1)
        ds = weight * (dp - delta)
        ds_operand = gl.convert_layout(ds.to(dtype), a_layout)
    dq_next = warpgroup_mma(ds_operand, r.k.index((x.turns - 1) % STAGES).reshape([BN, D]), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq_next])
    dq = gl.where(x.first * BN < x.kv_len, dq * scale, 0.0)  # rows that see nothing may hold NaN
    at = (x.batch, x.q_start, x.row + W * 64, x.q_len, x.head)
    store_rows(dq, r.q.index(W), dq_desc, dq_ptr, at, seqlen_q, num_heads_q, dim, D, FOREIGN)
    tma.store_wait(0)


LENGTHS = "batch seqlen_q seqlen_kv num_heads_q left right right_top_left blocks tiles".split()  # noqa: SIM905


@gluon.jit(do_not_specialize=LENGTHS)
def backward_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dq_ptr, lse_tiles, delta_tiles, offsets_q, offsets_kv, lengths_q,
    lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_q, left, right, right_top_left, blocks, tiles, dim,
    scale, factor, cap_log2, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr,
    SOFTCAP: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """One program for 128 queries of a head; BM is the main kernel's block of queries, which lse's tiles follow."""
    dtype: gl.constexpr = q_desc.dtype
    x = queries_of(
        offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_q,
        left, right, right_top_left, blocks, tiles, BM, BN, GROUP,
    )  # fmt: skip
    r = Ring(
        gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], q_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], do_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D], v_desc.layout),
        barriers(1, 1).index(0),
        barriers(1, 1).index(0),
        barriers(1, STAGES),
        barriers(1, STAGES),
        barriers(2, STAGES),
        barriers(2, STAGES),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume_keys,
                (
                    dq_desc, dq_ptr, lse_tiles, delta_tiles, x, r, seqlen_q, num_heads_q, dim, scale, factor, cap_log2,
                    0, BN, D, SOFTCAP, FOREIGN,
                ),
            ),
            (
                consume_keys,
                (
                    dq_desc, dq_ptr, lse_tiles, delta_tiles, x, r, seqlen_q, num_heads_q, dim, scale, factor, cap_log2,
                    1, BN, D, SOFTCAP, FOREIGN,
                ),
            ),
            (produce_keys, (q_desc, do_desc, k_desc, v_desc, x, r, BN, D, FOREIGN)),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
