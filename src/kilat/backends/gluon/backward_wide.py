"""The consumer of the backward for head_dim 65 .. 128: one 64-row block of queries a turn.

A turn does dK of the turn before and dQ of two turns before (`LAG`), then S, dP, dV and dS of its own, so that the two
warpgroups may drift half a turn apart and the elementwise part of one runs under the products of the other. The first
turns, which have no dQ to do, stand outside of the loop. Only plain registers cross the loop's back edge: an
accumulator or a register operand in flight across it makes ptxas serialise every wgmma.

A warpgroup's elementwise part begins when that of the other is over (`turn`), which ends with dS in shared memory. So
in turn t both halves of dS of turn t - 2 are there, and nobody reads that of turn t - 3 any more.
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
from kilat.backends.gluon.backward_parts import BLOCK_KV, add_dq, hide, is_masked, probabilities, store_rows
from kilat.backends.gluon.backward_place import NOWHERE, row_and_tile

BM = gl.constexpr(64)
D = gl.constexpr(128)
LAG = gl.constexpr(2)
STAGES = gl.constexpr(3)  # of Q, which is read for the last time when dK of its turn is done, well into the next one
BUFFERS = gl.constexpr(3)  # of dS: who stores that of turn t knows that both dQ of turn t - LAG - 1 are done (`turn`)


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
def turn(
    t, third, parity, ds_operand, dk, dv, dq_desc, x, r, factor, cap_log2,
    W: gl.constexpr, GROUP: gl.constexpr, SOFTCAP: gl.constexpr, WITH_DQ: gl.constexpr,
    MASKED: gl.constexpr, AGE: gl.constexpr,
):  # fmt: skip
    """Turn t: AGE = min(t, LAG) says which products of earlier turns there are; third is t % 3, parity t // 3 % 2.

    These two are counted, since a division of every turn's number takes registers that are not there.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    dtype: gl.constexpr = r.k.dtype
    HAS_DQ: gl.constexpr = WITH_DQ and AGE == LAG
    zero = gl.zeros([64, BM], gl.float32, s_layout)
    k = r.k.index(W).reshape([64, D])
    v = r.v.index(W).reshape([64, D])
    after = gl.where(third == 2, 0, third + 1)  # (t + 1) % 3, which is (t - LAG) % 3
    stage = t % 2
    phase = (t // 2) & 1
    row, _ = row_and_tile(x, t, BM, GROUP)
    q = r.q.index(third).reshape([BM, D])
    do = r.do.index(stage).reshape([BM, D])
    if AGE > 0:
        before = gl.where(third == 0, 2, third - 1)
        dk_next = warpgroup_mma(ds_operand, r.q.index(before).reshape([BM, D]), dk, is_async=True)  # [64, D]
    if HAS_DQ:
        dq_next = dq_products(r, after, W)  # [BM, D / 2]
    mbarrier.wait(r.q_full.index(third), parity)
    s_next = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)  # [64, BM]
    if HAS_DQ:
        dq, dk = warpgroup_mma_wait(1, deps=[dq_next, dk_next])
        tma.store_wait(0)
    elif AGE > 0:
        dk = warpgroup_mma_wait(1, deps=[dk_next])
    if AGE > 0:
        mbarrier.arrive(r.free.index(before), count=1)
    if HAS_DQ:
        _, tile = row_and_tile(x, t - LAG, BM, GROUP)
        add_dq(dq, dq_desc, r.dq.index(W), tile * 2 + W)
    mbarrier.wait(r.do_full.index(stage), phase)
    delta = r.delta.index(stage).load(s_layout)
    # dP - delta: where delta is subtracted at the end, P, dP and delta need 16 registers that are not there.
    dp_next = warpgroup_mma(v, do.permute((1, 0)), zero - delta, is_async=True)  # [64, BM]
    lse = r.lse.index(third).load(s_layout)
    if W == 1:
        mbarrier.wait(r.turn.index(0), t & 1)
    elif AGE > 0:
        mbarrier.wait(r.turn.index(1), (t - 1) & 1)
    s = warpgroup_mma_wait(1, deps=[s_next])
    p, slope = probabilities(s, lse, factor, cap_log2, SOFTCAP)
    if MASKED:  # noqa: SIM102 (a constant, and then a number of the program)
        if is_masked(x, row, BM, BLOCK_KV):
            p = hide(p, x, r.kv_full, row, W, s_layout)
    weight = p * slope  # p itself is not needed any more, which saves 32 registers with a softcap
    p_operand = gl.convert_layout(p.to(dtype), a_layout)
    # Always complete by now: it ends the basic block, so that ptxas leaves the exponentials under the product dP.
    mbarrier.wait(r.do_full.index(stage), phase)
    dp = warpgroup_mma_wait(0, deps=[dp_next])
    dv_next = warpgroup_mma(p_operand, do, dv, is_async=True)  # [64, D]
    ds = weight * dp
    ds_half = ds.to(dtype)
    ds_operand = gl.convert_layout(ds_half, a_layout)
    if WITH_DQ:
        r.ds.index(third * 2 + W).store(ds_half)
        fence_async_shared()
    mbarrier.arrive(r.turn.index(W), count=1)
    dv = warpgroup_mma_wait(0, deps=[dv_next])
    return ds_operand, dk, dv


@gluon.jit
def consume_wide(
    dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, x, r, scale, factor, cap_log2, seqlen_kv, heads_kv, dim, dim_v,
    W: gl.constexpr, GROUP: gl.constexpr, SOFTCAP: gl.constexpr, WITH_DQ: gl.constexpr,
    MASKED: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and half the columns of every turn's dQ."""
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    dk = gl.zeros([64, D], gl.float32, d_layout)
    dv = gl.zeros([64, D], gl.float32, d_layout)
    ds_operand = gl.zeros([64, BM], r.k.dtype, a_layout)
    gl.assume(x.turns > 0)
    mbarrier.wait(r.kv_full, 0)
    ds_operand, dk, dv = turn(
        0, 0, 0, ds_operand, dk, dv, dq_desc, x, r, factor, cap_log2,
        W, GROUP, SOFTCAP, WITH_DQ, MASKED, 0,
    )  # fmt: skip
    if x.turns > 1:
        ds_operand, dk, dv = turn(
            1, 1, 0, ds_operand, dk, dv, dq_desc, x, r, factor, cap_log2,
            W, GROUP, SOFTCAP, WITH_DQ, MASKED, 1,
        )  # fmt: skip
    third = x.turns * 0 + LAG
    parity = x.turns * 0
    for t in range(LAG, x.turns):
        ds_operand, dk, dv = turn(
            t, third, parity, ds_operand, dk, dv, dq_desc, x, r, factor, cap_log2,
            W, GROUP, SOFTCAP, WITH_DQ, MASKED, LAG,
        )  # fmt: skip
        parity = gl.where(third == 2, parity ^ 1, parity)
        third = gl.where(third == 2, 0, third + 1)
    last = x.turns - 1
    dk_next = warpgroup_mma(ds_operand, r.q.index(last % STAGES).reshape([BM, D]), dk, is_async=True)  # [64, D]
    at = (x.kv_batch, x.kv_start, x.key + W * 64, x.kv_len, x.head_kv)
    is_seen = x.tile < NOWHERE  # keys that no query sees may hold NaN
    dv = gl.where(is_seen, dv, 0.0)
    # dV leaves under dK's product, dK under the last dQ, both through this half of V, which is nobody else's.
    cta_barrier()
    store_rows(dv, r.v.index(W), dv_desc, dv_ptr, at, seqlen_kv, heads_kv, dim_v, 0, D, FOREIGN)
    if WITH_DQ:
        if last > 0:
            dq = warpgroup_mma_wait(0, deps=[dq_products(r, (last - 1) % BUFFERS, W)])
            tma.store_wait(0)
            cta_barrier()
            _, tile = row_and_tile(x, last - 1, BM, GROUP)
            add_dq(dq, dq_desc, r.dq.index(W), tile * 2 + W)
        mbarrier.wait(r.turn.index(1 - W), last & 1)
        dq_next = dq_products(r, last % BUFFERS, W)  # [BM, D / 2]
        dk = warpgroup_mma_wait(2, deps=[dk_next])  # dQ is two products
    else:
        dk = warpgroup_mma_wait(0, deps=[dk_next])
    tma.store_wait(0)  # dV and dQ have left their buffers
    cta_barrier()
    dk = gl.where(is_seen, dk * scale, 0.0)
    store_rows(dk, r.v.index(W), dk_desc, dk_ptr, at, seqlen_kv, heads_kv, dim, 0, D, FOREIGN)
    if WITH_DQ:
        dq = warpgroup_mma_wait(0, deps=[dq_next])
        _, tile = row_and_tile(x, last, BM, GROUP)
        add_dq(dq, dq_desc, r.dq.index(W), tile * 2 + W)
    tma.store_wait(0)
