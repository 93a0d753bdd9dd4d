"""The consumer of the backward for head_dim up to 64: 128 queries a turn, in two blocks of 64, a and b.

S and dP are issued one block ahead, so a turn enters with P and dP of its block a in registers and leaves with those
of the next turn's. Warpgroup w does dQ of block w of the turn before, with whole rows; first and last turn stand
outside of the loop, since the first has no dQ to do and the last nothing to issue ahead. V is a register operand.
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

BM_NARROW = gl.constexpr(128)
D_NARROW = gl.constexpr(64)
BUFFERS_NARROW = gl.constexpr(3)  # of dS: dQ is one turn late, and the warpgroups may be one turn apart
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2))


@gluon.jit
def block(buffer, stage, i: gl.constexpr):
    """Rows of block i (0 or 1) of a stage of Q or dO: [64, D]."""
    return buffer.index(stage).reshape([BM_NARROW, D_NARROW]).slice(i * 64, 64, dim=0)


@gluon.jit
def scores_to_p(s, r, x, row, at, factor, cap_log2, W: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr):
    """P of 64 queries from `row`, whose lse is entry `at`, and P times the slope of a softcap."""
    p, slope = probabilities(s, r.lse.index(at).load(S_LAYOUT), factor, cap_log2, SOFTCAP)
    if MASKED:  # noqa: SIM102 (a constant, and then a number of the program)
        if is_masked(x, row, 64, BLOCK_KV):
            p = hide(p, x, r.kv_full, row, W, S_LAYOUT)
    return p, p * slope


@gluon.jit
def dq_products(r, t, W: gl.constexpr):
    """Issue dQ = dS^T K of block W of turn t."""
    zero = gl.zeros([64, D_NARROW], gl.float32, S_LAYOUT)
    at = (t % BUFFERS_NARROW) * 4 + W * 2
    k0 = r.k.index(0).reshape([64, D_NARROW])
    k1 = r.k.index(1).reshape([64, D_NARROW])
    dq = warpgroup_mma(r.ds.index(at).permute((1, 0)), k0, zero, use_acc=False, is_async=True)  # [64, D]
    return warpgroup_mma(r.ds.index(at + 1).permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def turn(
    t, p, weight, dp, dk, dv, k, v, dq_desc, x, r, factor, cap_log2,
    W: gl.constexpr, GROUP: gl.constexpr, SOFTCAP: gl.constexpr, WITH_DQ: gl.constexpr, MASKED: gl.constexpr,
    FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """One turn: dV, dS, dK of its two blocks, dQ of the turn before, S and dP one block ahead."""
    dtype: gl.constexpr = r.k.dtype
    HAS_DQ: gl.constexpr = WITH_DQ and not FIRST
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    stage = t % 2
    phase = (t // 2) & 1
    slot = t % BUFFERS_NARROW
    row, _ = row_and_tile(x, t, BM_NARROW, GROUP)
    # block a
    p_operand = gl.convert_layout(p.to(dtype), OPERAND)
    dv_next = warpgroup_mma(p_operand, block(r.do, stage, 0), dv, is_async=True)  # [64, D]
    s_next = warpgroup_mma(k, block(r.q, stage, 1).permute((1, 0)), zero, use_acc=False, is_async=True)  # [64, 64]
    ds = (weight * (dp - r.delta.index(stage * 2).load(S_LAYOUT))).to(dtype)
    if WITH_DQ:
        r.ds.index(slot * 4 + W).store(ds)
    dk_next = warpgroup_mma(gl.convert_layout(ds, OPERAND), block(r.q, stage, 0), dk, is_async=True)  # [64, D]
    dv = warpgroup_mma_wait(2, deps=[dv_next])
    if HAS_DQ:
        mbarrier.wait(r.ds_full.index((t - 1) % BUFFERS_NARROW), ((t - 1) // BUFFERS_NARROW) & 1)
        dq_next = dq_products(r, t - 1, W)  # [64, D]
    dp_next = warpgroup_mma(v, block(r.do, stage, 1).permute((1, 0)), zero, use_acc=False, is_async=True)  # [64, 64]
    if HAS_DQ:
        s = warpgroup_mma_wait(4, deps=[s_next])
    else:
        s = warpgroup_mma_wait(2, deps=[s_next])
    p, weight = scores_to_p(s, r, x, row + 64, stage * 2 + 1, factor, cap_log2, W, SOFTCAP, MASKED)
    # Complete long ago: these waits end the basic block, so that ptxas leaves the exponentials under the products.
    mbarrier.wait(r.q_full.index(stage), phase)
    if HAS_DQ:
        tma.store_wait(0)
        dk, dq = warpgroup_mma_wait(1, deps=[dk_next, dq_next])
        cta_barrier()
        _, tile = row_and_tile(x, t - 1, BM_NARROW, GROUP)
        add_dq(dq, dq_desc, r.dq.index(W), tile + W)
        dp = warpgroup_mma_wait(0, deps=[dp_next])
    else:
        dk, dp = warpgroup_mma_wait(0, deps=[dk_next, dp_next])
    # block b
    p_operand = gl.convert_layout(p.to(dtype), OPERAND)
    dv_next = warpgroup_mma(p_operand, block(r.do, stage, 1), dv, is_async=True)
    after = gl.minimum(t + 1, x.turns - 1)
    stage_after = after % 2
    phase_after = (after // 2) & 1
    if not LAST:
        mbarrier.wait(r.q_full.index(stage_after), phase_after)
        s_next = warpgroup_mma(
            k, block(r.q, stage_after, 0).permute((1, 0)), zero, use_acc=False, is_async=True
        )  # [64, 64]
    ds = (weight * (dp - r.delta.index(stage * 2 + 1).load(S_LAYOUT))).to(dtype)
    if WITH_DQ:
        r.ds.index(slot * 4 + 2 + W).store(ds)
        fence_async_shared()
        mbarrier.arrive(r.ds_full.index(slot), count=1)
    dk_next = warpgroup_mma(gl.convert_layout(ds, OPERAND), block(r.q, stage, 1), dk, is_async=True)
    if LAST:
        dv, dk = warpgroup_mma_wait(0, deps=[dv_next, dk_next])
    else:
        mbarrier.wait(r.do_full.index(stage_after), phase_after)
        dp_next = warpgroup_mma(
            v, block(r.do, stage_after, 0).permute((1, 0)), zero, use_acc=False, is_async=True
        )  # [64, 64]
        dv, s = warpgroup_mma_wait(2, deps=[dv_next, s_next])
        row, _ = row_and_tile(x, after, BM_NARROW, GROUP)
        p, weight = scores_to_p(s, r, x, row, stage_after * 2, factor, cap_log2, W, SOFTCAP, MASKED)
        mbarrier.wait(r.q_full.index(stage_after), phase_after)
        dk, dp = warpgroup_mma_wait(0, deps=[dk_next, dp_next])
        mbarrier.arrive(r.free.index(stage), count=1)
    return p, weight, dp, dk, dv


@gluon.jit
def consume_narrow(
    dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, x, r, scale, factor, cap_log2, seqlen_kv, heads_kv, dim, dim_v,
    W: gl.constexpr, GROUP: gl.constexpr, SOFTCAP: gl.constexpr,
    WITH_DQ: gl.constexpr, MASKED: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys, and one of the two 64-row blocks of every turn's dQ."""
    dk = gl.zeros([64, D_NARROW], gl.float32, S_LAYOUT)
    dv = gl.zeros([64, D_NARROW], gl.float32, S_LAYOUT)
    zero = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    k = r.k.index(W).reshape([64, D_NARROW])
    v_buffer = r.v.index(W).reshape([64, D_NARROW])
    gl.assume(x.turns > 0)
    mbarrier.wait(r.kv_full, 0)
    if W == 1:
        mbarrier.wait(r.go, 0)
    mbarrier.wait(r.q_full.index(0), 0)
    s_next = warpgroup_mma(k, block(r.q, 0, 0).permute((1, 0)), zero, use_acc=False, is_async=True)  # [64, 64]
    mbarrier.wait(r.do_full.index(0), 0)
    v = v_buffer.load(OPERAND)
    dp_next = warpgroup_mma(v, block(r.do, 0, 0).permute((1, 0)), zero, use_acc=False, is_async=True)  # [64, 64]
    s = warpgroup_mma_wait(1, deps=[s_next])
    p, weight = scores_to_p(s, r, x, x.first * BM_NARROW, 0, factor, cap_log2, W, SOFTCAP, MASKED)
    if W == 0:
        mbarrier.arrive(r.go, count=1)
    dp = warpgroup_mma_wait(0, deps=[dp_next])
    p, weight, dp, dk, dv = turn(
        0, p, weight, dp, dk, dv, k, v, dq_desc, x, r, factor, cap_log2, W, GROUP, SOFTCAP, WITH_DQ, MASKED, True, False
    )
    for t in range(1, x.turns - 1):
        p, weight, dp, dk, dv = turn(
            t, p, weight, dp, dk, dv, k, v, dq_desc, x, r, factor, cap_log2,
            W, GROUP, SOFTCAP, WITH_DQ, MASKED, False, False,
        )  # fmt: skip
    last = x.turns - 1
    if last > 0:
        p, weight, dp, dk, dv = turn(
            last, p, weight, dp, dk, dv, k, v, dq_desc, x, r, factor, cap_log2,
            W, GROUP, SOFTCAP, WITH_DQ, MASKED, False, True,
        )  # fmt: skip
    is_seen = x.tile < NOWHERE  # keys that no query sees may hold NaN
    at = (x.kv_batch, x.kv_start, x.key + W * 64, x.kv_len, x.head_kv)
    # dV leaves while the last dQ is under way: its half of V is nobody else's.
    if WITH_DQ:
        mbarrier.wait(r.ds_full.index(last % BUFFERS_NARROW), (last // BUFFERS_NARROW) & 1)
        dq_next = dq_products(r, last, W)
        tma.store_wait(0)
        cta_barrier()
    dv = gl.where(is_seen, dv, 0.0)
    store_rows(dv, r.v.index(W), dv_desc, dv_ptr, at, seqlen_kv, heads_kv, dim_v, 0, D_NARROW, FOREIGN)
    if WITH_DQ:
        dq = warpgroup_mma_wait(0, deps=[dq_next])
        _, tile = row_and_tile(x, last, BM_NARROW, GROUP)
        add_dq(dq, dq_desc, r.dq.index(W), tile + W)
    mbarrier.arrive(r.done, count=1)
    mbarrier.wait(r.done, 0)
    dk = gl.where(is_seen, dk * scale, 0.0)
    store_rows(dk, r.k.index(W), dk_desc, dk_ptr, at, seqlen_kv, heads_kv, dim, 0, D_NARROW, FOREIGN)
    tma.store_wait(0)
