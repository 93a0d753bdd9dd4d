"""The backward's main kernel for a head dimension above 128: 64 keys a program, and the products split by kind.

One warpgroup (`scores`) does S, dP and dV of every turn, the other (`gradients`) dK and dQ, for which the first leaves
dS in shared memory. So dV and dK, which fill half of the register file, are held once and multiplied as wide as wgmma
goes, and no value is worked out twice. dQ leaves from registers by vector reductions in fragment order: there is no
room to stage it for TMA, and the way through shared memory would take a quarter of its bandwidth.

Names ending in 2 are the second box of a row, see `backward_broad_parts`.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kilat.backends.gluon.backward_boxes import scores_of
from kilat.backends.gluon.backward_broad_parts import BLOCK_KV, BM, produce_broad, shared_memory
from kilat.backends.gluon.backward_parts import hide, is_masked, probabilities, store_rows
from kilat.backends.gluon.backward_place import NOWHERE, place_of, row_and_tile

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))


@gluon.jit
def scores(
    dv_desc, dv2_desc, dv_ptr, x, r, factor, cap_log2, seqlen_kv, heads_kv, dim_v,
    D1: gl.constexpr, D2: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, GROUP: gl.constexpr, FOREIGN: gl.constexpr,
    SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """S, dP and dS of every turn, and dV."""
    v_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V1, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=v_layout, k_width=2)
    W2: gl.constexpr = V2 if V2 else 64
    v2_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W2, 16])
    a2_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=v2_layout, k_width=2)
    OF_DP: gl.constexpr = 2 if V2 else 1  # products
    dtype: gl.constexpr = r.k.dtype
    dv = gl.zeros([64, V1], gl.float32, v_layout)
    if V2:
        dv2 = gl.zeros([64, V2], gl.float32, v2_layout)
    k, k2, v, v2 = r.k.index(0), r.k2.index(0), r.v.index(0), r.v2.index(0)
    gl.assume(x.turns > 0)
    mbarrier.wait(r.kv_full.index(0), 0)
    mbarrier.wait(r.kv_full.index(1), 0)
    for t in range(x.turns):
        stage = t % 2
        phase = (t // 2) & 1
        row, _ = row_and_tile(x, t, BM, GROUP)
        do, do2 = r.do.index(stage), r.do2.index(stage)
        mbarrier.wait(r.q_full.index(stage), phase)
        s_next = scores_of(k, k2, r.q.index(stage), r.q2.index(stage), BM, D1, D2)
        if SOFTCAP:  # needs twice the registers between S and dS, so dP comes later
            lse = r.lse.index(stage).load(S_LAYOUT)
            s = warpgroup_mma_wait(0, deps=[s_next])
        else:
            mbarrier.wait(r.do_full.index(stage), phase)
            dp_next = scores_of(v, v2, do, do2, BM, V1, V2)
            lse = r.lse.index(stage).load(S_LAYOUT)
            s = warpgroup_mma_wait(OF_DP, deps=[s_next])
        p, slope = probabilities(s, lse, factor, cap_log2, SOFTCAP)
        if MASKED:  # noqa: SIM102 (a constant, and then a number of the program)
            if is_masked(x, row, BM, BLOCK_KV):
                p = hide(p, x, r.kv_full.index(0), row, 0, S_LAYOUT)
        weight = p * slope
        p_operand = gl.convert_layout(p.to(dtype), a_layout)
        # Always complete by now: it ends the basic block, so that ptxas leaves the exponentials under the product dP.
        mbarrier.wait(r.do_full.index(stage), phase)
        if SOFTCAP:
            dp_next = scores_of(v, v2, do, do2, BM, V1, V2)
        delta = r.delta.index(stage).load(S_LAYOUT)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        dv_next = warpgroup_mma(p_operand, do.reshape([BM, V1]), dv, is_async=True)  # [64, V1]
        if V2:
            p2_operand = gl.convert_layout(p_operand, a2_layout)
            dv2_next = warpgroup_mma(p2_operand, do2.reshape([BM, V2]), dv2, is_async=True)  # [64, V2]
        ds = (weight * (dp - delta)).to(dtype)
        r.ds.index(stage).store(ds)  # free: Q of this turn came after dK and dQ of two turns before
        fence_async_shared()
        mbarrier.arrive(r.ds_full.index(stage), count=1)
        if V2:
            dv, dv2 = warpgroup_mma_wait(0, deps=[dv_next, dv2_next])
        else:
            dv = warpgroup_mma_wait(0, deps=[dv_next])
        mbarrier.arrive(r.do_free.index(stage), count=1)
    is_seen = x.tile < NOWHERE  # keys that no query sees may hold NaN
    at = (x.kv_batch, x.kv_start, x.key, x.kv_len, x.head_kv)
    # Nobody else reads V.
    store_rows(gl.where(is_seen, dv, 0.0), v, dv_desc, dv_ptr, at, seqlen_kv, heads_kv, dim_v, 0, V1, FOREIGN)
    if V2:
        dv2 = gl.where(is_seen, dv2, 0.0)
        store_rows(dv2, v2, dv2_desc, dv_ptr, at, seqlen_kv, heads_kv, dim_v, V1, V2, FOREIGN)
    tma.store_wait(0)


@gluon.jit
def dq_part(r, slot, PART: gl.constexpr, D1: gl.constexpr, N: gl.constexpr):
    """Issue dQ = dS^T K of columns 128 PART to 128 PART + N - 1: [BM, N]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    if D1 == 256:
        k = r.k.index(0).reshape([64, D1]).slice(PART * 128, N, dim=1)
    elif PART == 0:
        k = r.k.index(0).reshape([64, D1])
    else:
        k = r.k2.index(0).reshape([64, N])
    zero = gl.zeros([BM, N], gl.float32, layout)
    return warpgroup_mma(r.ds.index(slot).permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def add_dq_part(dq, dq_ptr, tile, PART: gl.constexpr, DQ: gl.constexpr, N: gl.constexpr):
    """Add dQ [64, N], columns from 128 PART on, to tile `tile` of the accumulator, which is DQ wide.

    The order is that of `backward_parts.fragment_order` for every 64 columns: a thread adds 16 bytes at a time.
    """
    pieces = dq.reshape([4, 2, 8, N // 64, 8, 4, 2]).permute((3, 0, 4, 2, 5, 1, 6)).reshape([N // 2, 128])
    layout: gl.constexpr = pieces.type.layout
    i = gl.arange(0, N // 2, gl.SliceLayout(1, layout))
    j = gl.arange(0, 128, gl.SliceLayout(0, layout))
    first = (tile * (DQ // 64) + PART * 2).to(gl.int64) * 4096
    if tile < NOWHERE:
        gl.atomic_add(dq_ptr + first + (gl.expand_dims(i * 128, 1) + gl.expand_dims(j, 0)), pieces, sem="relaxed")


@gluon.jit
def gradients(
    dk_desc, dk2_desc, dk_ptr, dq_ptr, x, r, scale, seqlen_kv, heads_kv, dim,
    D1: gl.constexpr, D2: gl.constexpr, GROUP: gl.constexpr, FOREIGN: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """dK, and dQ of every turn in one or two parts of up to 128 columns."""
    W2: gl.constexpr = D2 if D2 else 64
    k_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D1, 16])
    k2_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W2, 16])
    DQ: gl.constexpr = D1 + D2
    N0: gl.constexpr = 128 if DQ >= 128 else 64
    N1: gl.constexpr = DQ - N0
    OF_DK: gl.constexpr = 2 if D2 else 1  # products
    dk = gl.zeros([64, D1], gl.float32, k_layout)
    if D2:
        dk2 = gl.zeros([64, D2], gl.float32, k2_layout)
    gl.assume(x.turns > 0)
    mbarrier.wait(r.ds_full.index(0), 0)
    mbarrier.wait(r.kv_full.index(0), 0)
    for t in range(x.turns):
        slot = t % 2
        phase = (t // 2) & 1
        _, tile = row_and_tile(x, t, BM, GROUP)
        mbarrier.wait(r.q_full.index(slot), phase)
        mbarrier.wait(r.ds_full.index(slot), phase)
        ds = r.ds.index(slot)
        if WITH_DQ:
            dq_next = dq_part(r, slot, 0, D1, N0)
        dk_next = warpgroup_mma(ds, r.q.index(slot).reshape([BM, D1]), dk, is_async=True)  # [64, D1]
        if D2:
            dk2_next = warpgroup_mma(ds, r.q2.index(slot).reshape([BM, D2]), dk2, is_async=True)  # [64, D2]
        if WITH_DQ:
            dq = warpgroup_mma_wait(OF_DK, deps=[dq_next])
            add_dq_part(dq, dq_ptr, tile, 0, DQ, N0)
            if N1:
                dq1_next = dq_part(r, slot, 1, D1, N1)
                dq1 = warpgroup_mma_wait(0, deps=[dq1_next])
        if D2:
            dk, dk2 = warpgroup_mma_wait(0, deps=[dk_next, dk2_next])
        else:
            dk = warpgroup_mma_wait(0, deps=[dk_next])
        mbarrier.arrive(r.q_free.index(slot), count=1)
        if WITH_DQ and N1:
            add_dq_part(dq1, dq_ptr, tile, 1, DQ, N1)
    is_seen = x.tile < NOWHERE
    at = (x.kv_batch, x.kv_start, x.key, x.kv_len, x.head_kv)
    # The last dS came after the last S, so nobody else reads K any more.
    dk = gl.where(is_seen, dk * scale, 0.0)
    store_rows(dk, r.k.index(0), dk_desc, dk_ptr, at, seqlen_kv, heads_kv, dim, 0, D1, FOREIGN)
    if D2:
        dk2 = gl.where(is_seen, dk2 * scale, 0.0)
        store_rows(dk2, r.k2.index(0), dk2_desc, dk_ptr, at, seqlen_kv, heads_kv, dim, D1, D2, FOREIGN)
    tma.store_wait(0)


LENGTHS = (
    "batch seqlen_q seqlen_kv num_heads_kv left right right_top_left tiles_kv lead together tiles".split()  # noqa: SIM905
)


@gluon.jit(do_not_specialize=LENGTHS)
def backward_broad_kernel(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, do_desc, do2_desc, lse_desc, delta_desc,
    dk_desc, dk2_desc, dv_desc, dv2_desc, dq_ptr, dk_ptr, dv_ptr,
    offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_kv,
    left, right, right_top_left, tiles_kv, lead, together, tiles, dim, dim_v, scale, factor, cap_log2,
    D1: gl.constexpr, D2: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, GROUP: gl.constexpr, FOREIGN: gl.constexpr,
    SOFTCAP: gl.constexpr, DOWN: gl.constexpr, WITH_DQ: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One program for 64 keys of a key/value head; see `backward_parts` for the names."""
    x = place_of(
        offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_kv,
        left, right, right_top_left, tiles_kv, lead, together, tiles, BM, BLOCK_KV, GROUP, DOWN,
    )  # fmt: skip
    r = shared_memory(
        q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, do_desc, do2_desc, lse_desc, delta_desc, D1, D2, V1, V2
    )
    gl.warp_specialize(
        [
            (
                scores,
                (
                    dv_desc, dv2_desc, dv_ptr, x, r, factor, cap_log2, seqlen_kv, num_heads_kv, dim_v,
                    D1, D2, V1, V2, GROUP, FOREIGN, SOFTCAP, MASKED,
                ),
            ),
            (
                gradients,
                (
                    dk_desc, dk2_desc, dk_ptr, dq_ptr, x, r, scale, seqlen_kv, num_heads_kv, dim,
                    D1, D2, GROUP, FOREIGN, WITH_DQ,
                ),
            ),
            (
                produce_broad,
                (
                    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, do_desc, do2_desc, lse_desc, delta_desc, x, r,
                    D1, D2, V1, V2, GROUP, FOREIGN,
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
