"""dQ by blocks of queries, for deterministic=True: no sum crosses programs, so its order is fixed.

A program owns 128 queries of one head, 64 for each of two consumer warpgroups, and streams the keys that they see
through a ring:

    S = Q K^T,  P = exp2(score - lse),  dP = dO V^T,  dS = P (dP - delta) dscore,  dQ += dS K,  dQ = scale dQ

The product that gives dQ of one block of keys is issued with S of the next. Rows come in one or two boxes, of widths D
and D2 (q, k) and V and V2 (v, dO); names ending in 2 are the second box.
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

from kilat.backends.gluon import heuristics
from kilat.backends.gluon._compat import aggregate
from kilat.backends.gluon.backward_boxes import load_cleared, load_rows, scores_of
from kilat.backends.gluon.backward_parts import barriers, probabilities, store_rows
from kilat.backends.gluon.backward_place import band, sequence_of, span, take_place

BLOCK_Q = gl.constexpr(heuristics.DQ_BLOCK_Q)
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
    q2: gl.shared_memory_descriptor  # [2, 1, 64, 1, D2], or q if there is no second box
    do: gl.shared_memory_descriptor
    do2: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # [STAGES, 1, BN, 1, D]
    k2: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    v2: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    raw: gl.shared_memory_descriptor  # a short block of keys before its last rows are cleared
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, q2, do, do2, k, k2, v, v2, q_full, raw, k_full, v_full, k_free, v_free):
        self.q = q
        self.q2 = q2
        self.do = do
        self.do2 = do2
        self.k = k
        self.k2 = k2
        self.v = v
        self.v2 = v2
        self.q_full = q_full
        self.raw = raw
        self.k_full = k_full
        self.v_full = v_full
        self.k_free = k_free
        self.v_free = v_free


@gluon.jit
def queries_of(
    offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_q,
    left, right, right_top_left, blocks, lead, together, tiles,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Where the program with this id works: the last queries first, which see most keys; see `take_place`."""
    sequence, head, slot = take_place(batch, num_heads_q, blocks, lead, together)
    block = blocks - 1 - slot
    if offsets_q is not None:
        sequence = sequence_of(offsets_q, block, batch, BLOCK_Q)
        block -= gl.load(offsets_q + sequence) // BLOCK_Q + sequence
        tile = (gl.load(offsets_q + sequence) // BM + sequence) * (BM // 64) + head * tiles
        in_batch = sequence * 0
    else:
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
def produce_keys(
    q_desc, q2_desc, do_desc, do2_desc, k_desc, k2_desc, v_desc, v2_desc, x, r, BN: gl.constexpr,
    D: gl.constexpr, D2: gl.constexpr, V: gl.constexpr, V2: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """Q and dO once, then K and V of every turn."""
    for w in gl.static_range(2):
        at = (x.batch, x.q_start + x.row + w * 64, x.head)
        load_rows(q_desc, q2_desc, at, r.q_full, r.q.index(w), r.q2.index(w), 0, D2)
        load_rows(do_desc, do2_desc, at, r.q_full, r.do.index(w), r.do2.index(w), 0, V2)
    for t in range(x.turns):
        stage = t % STAGES
        phase = ((t // STAGES) & 1) ^ 1
        key = (x.first + t) * BN
        at = (x.batch, x.kv_start + key, x.head_kv)
        k, k2, k_full = r.k.index(stage), r.k2.index(stage), r.k_full.index(stage)
        v, v2, v_full = r.v.index(stage), r.v2.index(stage), r.v_full.index(stage)
        mbarrier.wait(r.k_free.index(stage), phase)
        mbarrier.wait(r.v_free.index(stage), phase)
        if FOREIGN & (key + BN > x.kv_len):  # the last turn: 0 * NaN is NaN
            load_cleared(k_desc, k2_desc, at, r.raw, 0, k, k2, x.kv_len - key, BN, D, D2)
            load_cleared(v_desc, v2_desc, at, r.raw, 1, v, v2, x.kv_len - key, BN, V, V2)
            mbarrier.arrive(k_full, count=1)
            mbarrier.arrive(v_full, count=1)
        else:
            load_rows(k_desc, k2_desc, at, k_full, k, k2, 0, D2)
            load_rows(v_desc, v2_desc, at, v_full, v, v2, 0, V2)


@gluon.jit
def consume_keys(
    dq_desc, dq2_desc, dq_ptr, lse_tiles, delta_tiles, x, r, seqlen_q, num_heads_q, dim, scale, factor, cap_log2,
    W: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, V: gl.constexpr, V2: gl.constexpr,
    SOFTCAP: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """dQ of 64 queries."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    W2: gl.constexpr = D2 if D2 else 64
    d2_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W2, 16])
    a2_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d2_layout, k_width=2)
    OF_DP: gl.constexpr = 2 if V2 else 1  # products
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = r.k.dtype
    i = gl.arange(0, 64, rows)
    stored = (x.tile + W).to(gl.int64) * 64 + i
    in_tiles = x.row + W * 64 + i < x.q_len  # lse and delta end with the sequence's last tile
    lse = gl.expand_dims(gl.load(lse_tiles + stored, mask=in_tiles, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(delta_tiles + stored, mask=in_tiles, other=0.0), 1)
    dq = gl.zeros([64, D], gl.float32, d_layout)
    if D2:
        dq2 = gl.zeros([64, D2], gl.float32, d2_layout)
    ds_operand = gl.zeros([64, BN], dtype, a_layout)
    q, q2, do, do2 = r.q.index(W), r.q2.index(W), r.do.index(W), r.do2.index(W)
    gl.assume(x.turns > 0)
    mbarrier.wait(r.q_full, 0)
    mbarrier.wait(r.k_full.index(0), 0)
    for t in range(x.turns):
        stage = t % STAGES
        phase = (t // STAGES) & 1
        before = gl.maximum(t - 1, 0) % STAGES
        # The first turn adds nothing.
        dq_next = warpgroup_mma(ds_operand, r.k.index(before).reshape([BN, D]), dq, is_async=True)  # [64, D]
        if D2:
            ds2_operand = gl.convert_layout(ds_operand, a2_layout)
            dq2_next = warpgroup_mma(ds2_operand, r.k2.index(before).reshape([BN, D2]), dq2, is_async=True)
        mbarrier.wait(r.k_full.index(stage), phase)
        s_next = scores_of(q, q2, r.k.index(stage), r.k2.index(stage), BN, D, D2)
        mbarrier.wait(r.v_full.index(stage), phase)
        dp_next = scores_of(do, do2, r.v.index(stage), r.v2.index(stage), BN, V, V2)
        if D2:
            dq, dq2, s = warpgroup_mma_wait(OF_DP, deps=[dq_next, dq2_next, s_next])
        else:
            dq, s = warpgroup_mma_wait(OF_DP, deps=[dq_next, s_next])
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
    last = (x.turns - 1) % STAGES
    dq_next = warpgroup_mma(ds_operand, r.k.index(last).reshape([BN, D]), dq, is_async=True)
    at = (x.batch, x.q_start, x.row + W * 64, x.q_len, x.head)
    sees = x.first * BN < x.kv_len  # rows that see nothing may hold NaN
    if D2:
        ds2_operand = gl.convert_layout(ds_operand, a2_layout)
        dq2_next = warpgroup_mma(ds2_operand, r.k2.index(last).reshape([BN, D2]), dq2, is_async=True)
        dq, dq2 = warpgroup_mma_wait(0, deps=[dq_next, dq2_next])
        dq2 = gl.where(sees, dq2 * scale, 0.0)
        store_rows(dq2, q2, dq2_desc, dq_ptr, at, seqlen_q, num_heads_q, dim, D, D2, FOREIGN)
    else:
        dq = warpgroup_mma_wait(0, deps=[dq_next])
    dq = gl.where(sees, dq * scale, 0.0)
    store_rows(dq, q, dq_desc, dq_ptr, at, seqlen_q, num_heads_q, dim, 0, D, FOREIGN)
    tma.store_wait(0)


LENGTHS = "batch seqlen_q seqlen_kv num_heads_q left right right_top_left blocks lead together tiles".split()  # noqa: SIM905


@gluon.jit(do_not_specialize=LENGTHS)
def backward_dq_kernel(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, do_desc, do2_desc, dq_desc, dq2_desc,
    dq_ptr, lse_tiles, delta_tiles, offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv,
    num_heads_q, left, right, right_top_left, blocks, lead, together, tiles, dim, scale, factor, cap_log2,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, V: gl.constexpr, V2: gl.constexpr,
    GROUP: gl.constexpr, SOFTCAP: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """One program for 128 queries of a head; BM is the main kernel's block of queries, which lse's tiles follow."""
    dtype: gl.constexpr = q_desc.dtype
    x = queries_of(
        offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_q,
        left, right, right_top_left, blocks, lead, together, tiles, BM, BN, GROUP,
    )  # fmt: skip
    q = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, V], do_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, V], v_desc.layout)
    q2 = q
    do2 = do
    k2 = k
    v2 = v
    if D2:
        q2 = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D2], q2_desc.layout)
        k2 = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D2], k2_desc.layout)
    if V2:
        do2 = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, V2], do2_desc.layout)
        v2 = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, V2], v2_desc.layout)
    r = Ring(
        q, q2, do, do2, k, k2, v, v2, barriers(4, 1).index(0), barriers(1, 1).index(0),
        barriers(1, STAGES), barriers(1, STAGES), barriers(2, STAGES), barriers(2, STAGES),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume_keys,
                (
                    dq_desc, dq2_desc, dq_ptr, lse_tiles, delta_tiles, x, r, seqlen_q, num_heads_q, dim, scale, factor,
                    cap_log2, 0, BN, D, D2, V, V2, SOFTCAP, FOREIGN,
                ),
            ),
            (
                consume_keys,
                (
                    dq_desc, dq2_desc, dq_ptr, lse_tiles, delta_tiles, x, r, seqlen_q, num_heads_q, dim, scale, factor,
                    cap_log2, 1, BN, D, D2, V, V2, SOFTCAP, FOREIGN,
                ),
            ),
            (
                produce_keys,
                (
                    q_desc, q2_desc, do_desc, do2_desc, k_desc, k2_desc, v_desc, v2_desc, x, r, BN, D, D2, V, V2,
                    FOREIGN,
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
