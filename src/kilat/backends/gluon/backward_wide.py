"""The consumer of the backward for head_dim 65 .. 128: one 64-row block of queries a turn.

A turn does dK of the turn before and dQ of two turns before (`LAG`), then S, dP, dV and dS of its own, so that the two
warpgroups may drift half a turn apart and the elementwise part of one runs under the products of the other. Only plain
registers cross the loop's back edge: an accumulator or a register operand in flight across it makes ptxas serialise
every wgmma. For the same reason the loop runs at least once.
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

from kilat.backends.gluon._compat import cta_barrier
from kilat.backends.gluon.backward_parts import (
    BLOCK_KV,
    NOWHERE,
    add_dq,
    hide,
    is_masked,
    probabilities,
    row_and_tile,
    store_rows,
)

BM = gl.constexpr(64)
D = gl.constexpr(128)
LAG = gl.constexpr(2)
BUFFERS = gl.constexpr(4)  # of dS: a warpgroup may be LAG turns ahead of one that is LAG turns behind with its dQ


@gluon.jit
def dq_products(r, slot, W: gl.constexpr):
    """Issue dQ = dS^T K of the turn whose dS is in `slot`, the columns of warpgroup W."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    zero = gl.zeros([BM, 64], gl.float32, layout)
    k0 = r.k.index(0).reshape([64, D]).slice(W * 64, 64, dim=1)
    k1 = r.k.index(1).reshape([64, D]).slice(W * 64, 64, dim=1)
    dq = warpgroup_mma(r.ds.index(slot * 2).permute((1, 0)), k0, zero, use_acc=False, is_async=True)  # [BM, D / 2]
    return warpgroup_mma(r.ds.index(slot * 2 + 1).permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def consume_wide(
    dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, x, r, scale, factor, cap_log2, seqlen_kv, heads_kv, dim, dim_v,
    W: gl.constexpr, GROUP: gl.constexpr, SOFTCAP: gl.constexpr, TURNS: gl.constexpr, DO_FIRST: gl.constexpr,
    WITH_DQ: gl.constexpr, MASKED: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and half the columns of every turn's dQ."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    dtype: gl.constexpr = r.k.dtype
    dk = gl.zeros([64, D], gl.float32, d_layout)
    dv = gl.zeros([64, D], gl.float32, d_layout)
    zero = gl.zeros([64, BM], gl.float32, s_layout)
    ds_operand = gl.zeros([64, BM], dtype, a_layout)
    k = r.k.index(W).reshape([64, D])
    v = r.v.index(W).reshape([64, D])
    gl.assume(x.turns > 0)
    mbarrier.wait(r.kv_full, 0)
    if W == 1 and not TURNS:
        mbarrier.wait(r.go, 0)
    for t in range(x.turns):
        stage = t % 2
        before = gl.maximum(t - 1, 0) % 2
        phase = (t // 2) & 1
        row, _ = row_and_tile(x, t, BM, GROUP)
        q = r.q.index(stage).reshape([BM, D])
        do = r.do.index(stage).reshape([BM, D])
        # The first turn adds nothing to dK; until there is a dQ, its place in the pipeline computes one to be dropped.
        if t == 0:
            mbarrier.wait(r.q_full.index(0), 0)
        dk_next = warpgroup_mma(ds_operand, r.q.index(before).reshape([BM, D]), dk, is_async=True)  # [64, D]
        if WITH_DQ:
            late = (t + BUFFERS - LAG) % BUFFERS
            if t >= LAG:
                mbarrier.wait(r.ds_full.index(late), ((t - LAG) // BUFFERS) & 1)
            dq_next = dq_products(r, late, W)  # [BM, D / 2]
        mbarrier.wait(r.q_full.index(stage), phase)
        s_next = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)  # [64, BM]
        if WITH_DQ:
            dq, dk = warpgroup_mma_wait(1, deps=[dq_next, dk_next])
            tma.store_wait(0)
            if t > 0:
                mbarrier.arrive(r.free.index(before), count=1)
            if t >= LAG:
                _, tile = row_and_tile(x, t - LAG, BM, GROUP)
                add_dq(dq, dq_desc, r.dq.index(W), tile * 2 + W)
        else:
            dk = warpgroup_mma_wait(1, deps=[dk_next])
            if t > 0:
                mbarrier.arrive(r.free.index(before), count=1)
        mbarrier.wait(r.do_full.index(stage), phase)
        delta = r.delta.index(stage).load(s_layout)
        # dP - delta: where delta is subtracted at the end, P, dP and delta need 16 registers that are not there.
        dp_next = warpgroup_mma(v, do.permute((1, 0)), zero - delta, is_async=True)  # [64, BM]
        lse = r.lse.index(stage).load(s_layout)
        if TURNS:
            if W == 1:
                mbarrier.wait(r.turn.index(0), t & 1)
            else:
                if t > 0:
                    mbarrier.wait(r.turn.index(1), (t - 1) & 1)
        s = warpgroup_mma_wait(1, deps=[s_next])
        p, slope = probabilities(s, lse, factor, cap_log2, SOFTCAP)
        if MASKED:  # noqa: SIM102 (a constant, and then a number of the program)
            if is_masked(x, row, BM, BLOCK_KV):
                p = hide(p, x, r.kv_full, row, W, s_layout)
        weight = p * slope  # p itself is not needed any more, which saves 32 registers with a softcap
        p_operand = gl.convert_layout(p.to(dtype), a_layout)
        if W == 0 and not TURNS:  # noqa: SIM102
            if t == 0:
                mbarrier.arrive(r.go, count=1)
        # Always complete by now: it ends the basic block, so that ptxas leaves the exponentials under the product dP.
        mbarrier.wait(r.do_full.index(stage), phase)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
        dv_next = warpgroup_mma(p_operand, do, dv, is_async=True)  # [64, D]
        ds = weight * dp
        ds_half = ds.to(dtype)
        ds_operand = gl.convert_layout(ds_half, a_layout)
        if WITH_DQ:
            slot = t % BUFFERS
            r.ds.index(slot * 2 + W).store(ds_half)
            fence_async_shared()
            mbarrier.arrive(r.ds_full.index(slot), count=1)
        if TURNS:
            mbarrier.arrive(r.turn.index(W), count=1)
        dv = warpgroup_mma_wait(0, deps=[dv_next])
        if DO_FIRST:
            mbarrier.arrive(r.do_free.index(stage), count=1)
    dk_next = warpgroup_mma(ds_operand, r.q.index((x.turns - 1) % 2).reshape([BM, D]), dk, is_async=True)
    if WITH_DQ:
        for i in gl.static_range(LAG):
            t = x.turns - LAG + i
            if t >= 0:
                mbarrier.wait(r.ds_full.index(t % BUFFERS), (t // BUFFERS) & 1)
                dq = warpgroup_mma_wait(0, deps=[dq_products(r, t % BUFFERS, W)])
                tma.store_wait(0)
                cta_barrier()
                _, tile = row_and_tile(x, t, BM, GROUP)
                add_dq(dq, dq_desc, r.dq.index(W), tile * 2 + W)
    dk = warpgroup_mma_wait(0, deps=[dk_next])
    mbarrier.arrive(r.done, count=1)
    mbarrier.wait(r.done, 0)
    is_seen = x.tile < NOWHERE  # keys that no query sees may hold NaN
    at = (x.kv_batch, x.kv_start, x.key + W * 64, x.kv_len, x.head_kv)
    dk = gl.where(is_seen, dk * scale, 0.0)
    dv = gl.where(is_seen, dv, 0.0)
    store_rows(dk, r.k.index(W), dk_desc, dk_ptr, at, seqlen_kv, heads_kv, dim, 0, D, FOREIGN)
    store_rows(dv, r.v.index(W), dv_desc, dv_ptr, at, seqlen_kv, heads_kv, dim_v, 0, D, FOREIGN)
    tma.store_wait(0)
