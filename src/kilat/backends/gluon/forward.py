# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
"""The forward kernel of sm_90: one TMA producer warp and two or three wgmma consumers of 64 queries, persistent.

Each consumer works in the paper's order, on one block of keys after the other:

    S = Q K^T,  m' = max(m, rowmax S),  P = exp(S - m'),  l = l exp(m - m') + rowsum P,  O = O exp(m - m') + P V

except that m' = m until the maximum has grown by more than 2^8, so that O is seldom rescaled (see `forward_softmax`).
Q K^T of block t is issued before P V of block t - 1, so that the tensor cores work while softmax runs. K and V come
through rings of STAGES buffers. Scores are in log2 units: S_log2 = S * scale * log2(e).

A head dimension is one or two boxes wide (powers of two): 96 is 64 + 32, 192 is 128 + 64; a box that reaches past the
tensor reads zeros. Names ending in 2 are the second box.

FlashAttention-3 (arXiv 2407.08608) describes the overlap; the row sum is kept per thread and summed once at the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kilat.backends.gluon.forward_parts import (
    PIECE,
    Shared,
    capped,
    hide,
    issue_qk,
    load,
    load_seen_v,
    pass_turn,
    take_turn,
    write_tile,
)
from kilat.backends.gluon.forward_softmax import packed, rescaled, row_max, settled, softmax
from kilat.backends.gluon.tiles import Sizes, block_at, key_blocks, key_start, key_stop, locate, nth_tile


@gluon.jit
def producer(
    m, s, q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, n_turns,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, D2: gl.constexpr, V2: gl.constexpr,
    RAGGED: gl.constexpr, USED: gl.constexpr, BOUNDS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Bring Q, K and V of every tile of this CTA."""
    BLOCK_KV: gl.constexpr = k_desc.block_shape[1]
    BLOCK_Q: gl.constexpr = 64 * CONSUMERS
    DV: gl.constexpr = v_desc.block_shape[3]
    done = 0  # blocks of keys so far, which is the place in the rings
    tiles = 0
    short = 0  # tiles with a block that nobody sees all of
    place, b, h, h_kv = nth_tile(0, s, ORDERED, RAGGED, BOUNDS & 6)
    for turn in range(n_turns):
        following = nth_tile(turn + 1, s, ORDERED, RAGGED, BOUNDS & 6)
        if place >= 0:
            b, row_q, row_kv, i0, q_rows, q_len, kv_len = locate(place, b, s, BLOCK_Q, RAGGED, USED)
            if i0 < q_rows:
                low, high, n_blocks, n_right, n_masked = key_blocks(i0, q_len, kv_len, s, BLOCK_Q, BLOCK_KV, BOUNDS)
                for t in range(n_blocks):
                    slot = (done + t) % STAGES
                    phase = ((done + t) // STAGES) & 1
                    first, _ = block_at(t, low, high, n_blocks, n_right, n_masked, BLOCK_KV)
                    if t == 0:
                        for w in gl.static_range(CONSUMERS):
                            q_slot = tiles % Q_STAGES * CONSUMERS + w
                            mbarrier.wait(m.q_free.index(q_slot), ((tiles // Q_STAGES) & 1) ^ 1)
                            row = row_q + i0 + w * 64
                            load(m.q, m.q2, m.q_full.index(q_slot), q_desc, q2_desc, b, h, row, q_slot, D2)
                    mbarrier.wait(m.k_free.index(slot), phase ^ 1)
                    load(m.k, m.k2, m.k_full.index(slot), k_desc, k2_desc, b, h_kv, row_kv + first, slot, D2)
                    mbarrier.wait(m.v_free.index(slot), phase ^ 1)
                    if high - low < BLOCK_KV:
                        row = row_kv + first
                        load_seen_v(m, v_desc, v2_desc, b, h_kv, row, slot, high - low, short, BLOCK_KV, DV, V2)
                        short += 1
                    else:
                        load(m.v, m.v2, m.v_full.index(slot), v_desc, v2_desc, b, h_kv, row_kv + first, slot, V2)
                done += n_blocks
                tiles += 1
        place, b, h, h_kv = following


@gluon.jit
def consumer(
    m, s, o_desc, o2_desc, out_ptr, lse_ptr, sink_ptr, n_turns, head_dim_v, scale_log2, slope_log2,
    W: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, D2: gl.constexpr,
    V2: gl.constexpr, RAGGED: gl.constexpr, USED: gl.constexpr, BOUNDS: gl.constexpr, ORDERED: gl.constexpr,
    NEGATIVE: gl.constexpr, SOFTCAP: gl.constexpr, SINK: gl.constexpr, STAGING: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Rows 64 W to 64 W + 63 of every tile of this CTA."""
    BLOCK_KV: gl.constexpr = m.k.shape[2]
    BLOCK_Q: gl.constexpr = 64 * CONSUMERS
    D: gl.constexpr = m.k.shape[4]
    V: gl.constexpr = m.v.shape[4]
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    L_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    O2_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V2 if V2 else V, 16])
    P2_L: gl.constexpr = gl.DotOperandLayout(0, O2_L, 2)
    IN_FLIGHT: gl.constexpr = 2 if V2 else 1  # products with V that a wait for S leaves under way
    dtype: gl.constexpr = m.k.dtype
    zero = gl.zeros([64, BLOCK_KV], gl.float32, S_L)
    row = W * 64 + gl.arange(0, 64, ROW)
    col = gl.expand_dims(gl.arange(0, BLOCK_KV, gl.SliceLayout(0, S_L)), 0)
    done = 0
    tiles = 0
    turns = 0  # taken so far
    place, b, h, _ = nth_tile(0, s, ORDERED, RAGGED, BOUNDS & 6)
    for turn in range(n_turns):
        following = nth_tile(turn + 1, s, ORDERED, RAGGED, BOUNDS & 6)
        if place >= 0:
            b, row_q, _, i0, q_rows, q_len, kv_len = locate(place, b, s, BLOCK_Q, RAGGED, USED)
            if i0 < q_rows:
                low, high, n_blocks, n_right, n_masked = key_blocks(i0, q_len, kv_len, s, BLOCK_Q, BLOCK_KV, BOUNDS)
                start = key_start(i0 + row, q_len, kv_len, s, BOUNDS)
                stop = key_stop(i0 + row, q_len, kv_len, s, BOUNDS)
                top = gl.full([64], float("-inf"), gl.float32, ROW)
                o = gl.zeros([64, V], gl.float32, O_L)
                o2 = o
                if V2:
                    o2 = gl.zeros([64, V2], gl.float32, O2_L)
                at = tiles % Q_STAGES * CONSUMERS + W
                # the first block: nothing to overlap it with
                mbarrier.wait(m.q_full.index(at), (tiles // Q_STAGES) & 1)
                slot = done % STAGES
                mbarrier.wait(m.k_full.index(slot), (done // STAGES) & 1)
                take_turn(m, turns, W, TURNS)
                st = issue_qk(m, at, zero, slot, D, D2, BLOCK_KV)
                pass_turn(m, W, CONSUMERS, TURNS)
                turns += 1
                x = warpgroup_mma_wait(0, deps=[st])  # [64, BLOCK_KV]
                mbarrier.arrive(m.k_free.index(slot), count=1)
                if SOFTCAP:
                    x = capped(x, slope_log2)
                first, end = block_at(0, low, high, n_blocks, n_right, n_masked, BLOCK_KV)
                x = hide(x, col, start - first, gl.minimum(stop, end) - first, BOUNDS & 1, NEGATIVE)
                top = row_max(x, top, scale_log2, NEGATIVE)
                p, l = softmax(x, top, scale_log2, L_L)
                pt = gl.convert_layout(packed(p, dtype), P_L)

                for t in range(1, n_blocks):
                    slot = (done + t) % STAGES
                    before = (done + t - 1) % STAGES
                    mbarrier.wait(m.k_full.index(slot), ((done + t) // STAGES) & 1)
                    take_turn(m, turns, W, TURNS)
                    st = issue_qk(m, at, zero, slot, D, D2, BLOCK_KV)
                    mbarrier.wait(m.v_full.index(before), ((done + t - 1) // STAGES) & 1)
                    ot = warpgroup_mma(pt, m.v.index(before).reshape([BLOCK_KV, V]), o, is_async=True)
                    if V2:
                        pt2 = gl.convert_layout(pt, P2_L)
                        ot2 = warpgroup_mma(pt2, m.v2.index(before).reshape([BLOCK_KV, V2]), o2, is_async=True)
                    pass_turn(m, W, CONSUMERS, TURNS)
                    turns += 1
                    x = warpgroup_mma_wait(IN_FLIGHT, deps=[st])  # [64, BLOCK_KV]
                    mbarrier.arrive(m.k_free.index(slot), count=1)
                    if SOFTCAP:
                        x = capped(x, slope_log2)
                    if BOUNDS and t < n_masked:  # without bounds only the first block can have keys to hide
                        first, end = block_at(t, low, high, n_blocks, n_right, n_masked, BLOCK_KV)
                        x = hide(x, col, start - first, gl.minimum(stop, end) - first, BOUNDS & 1, NEGATIVE)
                    best = row_max(x, top, scale_log2, NEGATIVE)
                    # Complete for long: it ends the basic block, so that ptxas does not draw the second row's maxima
                    # out under the first row's exponentials (head_dim 64 causal, O rescaled at every block: 515 -> 537
                    # TFLOP/s). `settled` ends one too; nobody has measured it without this wait.
                    mbarrier.wait(m.q_full.index(at), (tiles // Q_STAGES) & 1)
                    top, alpha, moved = settled(best, top)
                    p, part = softmax(x, top, scale_log2, L_L)
                    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, L_L)), 1) + part
                    pt = gl.convert_layout(packed(p, dtype), P_L)
                    if V2:
                        o, o2 = warpgroup_mma_wait(0, deps=[ot, ot2])
                        o2 = rescaled(o2, alpha, moved)
                    else:
                        o = warpgroup_mma_wait(0, deps=[ot])
                    mbarrier.arrive(m.v_free.index(before), count=1)
                    o = rescaled(o, alpha, moved)

                if STAGING != 2:
                    mbarrier.arrive(m.q_free.index(at), count=1)
                done += n_blocks
                tiles += 1
                slot = (done - 1) % STAGES
                rows = (b, h, row_q, i0, q_rows, q_len, head_dim_v)
                mbarrier.wait(m.v_full.index(slot), ((done - 1) // STAGES) & 1)
                take_turn(m, turns, W, TURNS)
                ot = warpgroup_mma(pt, m.v.index(slot).reshape([BLOCK_KV, V]), o, is_async=True)
                if V2:
                    pt2 = gl.convert_layout(pt, P2_L)
                    ot2 = warpgroup_mma(pt2, m.v2.index(slot).reshape([BLOCK_KV, V2]), o2, is_async=True)
                    pass_turn(m, W, CONSUMERS, TURNS)
                    o, o2 = warpgroup_mma_wait(0, deps=[ot, ot2])
                else:
                    pass_turn(m, W, CONSUMERS, TURNS)
                    o = warpgroup_mma_wait(0, deps=[ot])
                turns += 1
                mbarrier.arrive(m.v_free.index(slot), count=1)
                write_tile(
                    m, s, o_desc, o2_desc, out_ptr, lse_ptr, sink_ptr, o, o2, top, l, row, rows,
                    W, V2, RAGGED, USED, SINK, STAGING,
                )  # fmt: skip
                if STAGING == 2:
                    tma.store_wait(0)
                    mbarrier.arrive(m.q_free.index(at), count=1)
        place, b, h, _ = following
    if STAGING:
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        *("cu_q", "cu_kv", "used_q", "used_kv", "sink_ptr", "batch", "heads", "group", "seqlen_q", "seqlen_kv"),
        *("order", "head_dim_v", "left", "right", "right_top_left", "tiles_per_unit", "together", "n_turns"),
    ]
)
def forward_kernel(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, o_desc, o2_desc,
    out_ptr, lse_ptr, sink_ptr,
    cu_q, cu_kv, used_q, used_kv, order, batch, heads, group, seqlen_q, seqlen_kv, head_dim_v,
    left, right, right_top_left, tiles_per_unit, together, n_turns, scale_log2, slope_log2,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, D2: gl.constexpr, V2: gl.constexpr,
    RAGGED: gl.constexpr, USED: gl.constexpr, BOUNDS: gl.constexpr, ORDERED: gl.constexpr,
    NEGATIVE: gl.constexpr, SOFTCAP: gl.constexpr, SINK: gl.constexpr, STAGING: gl.constexpr,
    REGISTERS: gl.constexpr, Q_STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """O and lse of q [batch, seqlen_q, heads, D], k and v alike (ragged: batch 1), as `kilat` defines them.

    STAGING: the output leaves from registers (0), through a buffer of its own (1), through that of Q (2), or 64 columns
    at a time through two small buffers (3).
    Boxes: q [1, 64, 1, D], k and v [1, BLOCK_KV, 1, D]; out is contiguous, lse float32. The grid is any number of CTAs.
    """
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[3]
    V: gl.constexpr = v_desc.block_shape[3]
    BLOCK_KV: gl.constexpr = k_desc.block_shape[1]
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, 1, 64, 1, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_KV, 1, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_KV, 1, V], v_desc.layout)
    q2 = q
    k2 = k
    v2 = v
    o = q
    o2 = q
    if D2:
        q2 = gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, 1, 64, 1, D2], q2_desc.layout)
        k2 = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_KV, 1, D2], k2_desc.layout)
    if V2:
        v2 = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_KV, 1, V2], v2_desc.layout)
    if STAGING == 1:
        o = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 64, 1, V], o_desc.layout)
        if V2:
            o2 = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 64, 1, V2], o2_desc.layout)
    if STAGING == 3:
        o = gl.allocate_shared_memory(dtype, [CONSUMERS * 2, 1, 64, 1, PIECE], o_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * CONSUMERS, 1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [Q_STAGES * CONSUMERS, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_raw = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for w in gl.static_range(Q_STAGES * CONSUMERS):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_free.index(w), count=1)
    turn = v_raw
    if TURNS:
        turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BAR)
        for w in gl.static_range(CONSUMERS):
            mbarrier.init(turn.index(w), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=CONSUMERS)
    mbarrier.init(v_raw, count=1)
    fence_async_shared()
    m = Shared(q, q2, k, k2, v, v2, o, o2, q_full, q_free, k_full, k_free, v_full, v_free, v_raw, turn)
    s = Sizes(
        cu_q, cu_kv, used_q, used_kv, order, batch, heads, group, seqlen_q, seqlen_kv,
        left, right, right_top_left, tiles_per_unit, together,
    )  # fmt: skip
    # Each partition is code of its own; the arguments stand here in full because a tuple kept in a variable would turn
    # its compile-time numbers into run-time ones.
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (
                m, s, o_desc, o2_desc, out_ptr, lse_ptr, sink_ptr, n_turns, head_dim_v, scale_log2, slope_log2, 0,
                CONSUMERS, STAGES, Q_STAGES, D2, V2, RAGGED, USED, BOUNDS, ORDERED, NEGATIVE, SOFTCAP, SINK, STAGING,
                TURNS,
            )),
            (consumer, (
                m, s, o_desc, o2_desc, out_ptr, lse_ptr, sink_ptr, n_turns, head_dim_v, scale_log2, slope_log2, 1,
                CONSUMERS, STAGES, Q_STAGES, D2, V2, RAGGED, USED, BOUNDS, ORDERED, NEGATIVE, SOFTCAP, SINK, STAGING,
                TURNS,
            )),
            (producer, (
                m, s, q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, n_turns,
                CONSUMERS, STAGES, Q_STAGES, D2, V2, RAGGED, USED, BOUNDS, ORDERED,
            )),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (consumer, (
                m, s, o_desc, o2_desc, out_ptr, lse_ptr, sink_ptr, n_turns, head_dim_v, scale_log2, slope_log2, 0,
                CONSUMERS, STAGES, Q_STAGES, D2, V2, RAGGED, USED, BOUNDS, ORDERED, NEGATIVE, SOFTCAP, SINK, STAGING,
                TURNS,
            )),
            (consumer, (
                m, s, o_desc, o2_desc, out_ptr, lse_ptr, sink_ptr, n_turns, head_dim_v, scale_log2, slope_log2, 1,
                CONSUMERS, STAGES, Q_STAGES, D2, V2, RAGGED, USED, BOUNDS, ORDERED, NEGATIVE, SOFTCAP, SINK, STAGING,
                TURNS,
            )),
            (consumer, (
                m, s, o_desc, o2_desc, out_ptr, lse_ptr, sink_ptr, n_turns, head_dim_v, scale_log2, slope_log2, 2,
                CONSUMERS, STAGES, Q_STAGES, D2, V2, RAGGED, USED, BOUNDS, ORDERED, NEGATIVE, SOFTCAP, SINK, STAGING,
                TURNS,
            )),
            (producer, (
                m, s, q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, n_turns,
                CONSUMERS, STAGES, Q_STAGES, D2, V2, RAGGED, USED, BOUNDS, ORDERED,
            )),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    # fmt: on
