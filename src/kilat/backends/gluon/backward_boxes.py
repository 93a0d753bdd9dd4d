"""Rows in one or two boxes, of widths W1 and W2 (0 if there is one): loads and products of the backward.

Boxes are powers of two wide, so a head dimension of 192 takes two. Names ending in 2 are the second box.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from kilat.backends.gluon._compat import async_load, cta_barrier
from kilat.backends.gluon.backward_parts import clear_rows


@gluon.jit
def load_rows(desc, desc2, at, bar, x, x2, extra: gl.constexpr, W2: gl.constexpr):
    """Rows from `at` (batch, row, head) into x and x2, with their bytes and `extra` more expected at `bar`."""
    batch, row, head = at
    if W2:
        mbarrier.expect(bar, desc.block_type.nbytes + desc2.block_type.nbytes + extra)
        async_load(desc2, [batch, row, head, desc.block_shape[3]], bar, x2)
    else:
        mbarrier.expect(bar, desc.block_type.nbytes + extra)
    async_load(desc, [batch, row, head, 0], bar, x)


@gluon.jit
def load_cleared(
    desc, desc2, at, bar, raws, x, x2, left, ROWS: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr
):  # fmt: skip
    """ROWS rows of which only the first `left` are the sequence's own, the rest cleared: 0 * NaN is NaN.

    `raws` loads have completed at `bar` before.
    """
    load_rows(desc, desc2, at, bar, x, x2, 0, W2)
    mbarrier.wait(bar, raws & 1)
    clear_rows(x, left, ROWS, W1)
    if W2:
        clear_rows(x2, left, ROWS, W2)
    fence_async_shared()
    cta_barrier()


@gluon.jit
def scores_of(a, a2, b, b2, N: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr):
    """Issue a b^T: [64, N] from rows [64, W1 + W2] and [N, W1 + W2]; two products if there are two boxes."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    zero = gl.zeros([64, N], gl.float32, layout)
    s = warpgroup_mma(a.reshape([64, W1]), b.reshape([N, W1]).permute((1, 0)), zero, use_acc=False, is_async=True)
    if W2:
        s = warpgroup_mma(a2.reshape([64, W2]), b2.reshape([N, W2]).permute((1, 0)), s, is_async=True)
    return s
