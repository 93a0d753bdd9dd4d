"""The producer of the backward that asks for dO of a turn before Q, since dO's buffer is free half a turn earlier.

A consumer is done with dO at the end of a turn, after dV, and with Q only in the turn after, after dK.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kilat.backends.gluon._compat import async_load
from kilat.backends.gluon.backward_parts import load_both_halves, load_keys, row_and_tile


@gluon.jit
def load_with_rows(desc, rows_desc, at, tile, full, buffer, rows, first, ROWS: gl.constexpr, V_BYTES: gl.constexpr):
    """A block of Q or dO, and its lse or delta, with their bytes counted at the barrier `full`, as are V_BYTES."""
    mbarrier.expect(full, desc.block_type.nbytes + ROWS * 256 + V_BYTES)
    async_load(desc, at, full, buffer)
    for i in gl.static_range(ROWS):
        async_load(rows_desc, [tile + i, 0], full, rows.index(first + i))


@gluon.jit
def produce_do_first(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, x, r,
    BM: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """As `backward_parts.produce`, where no row lies behind a sequence that is not its own."""
    ROWS: gl.constexpr = BM // 64
    V_BYTES: gl.constexpr = 2 * v_desc.block_type.nbytes
    load_keys(k_desc, v_desc, x, r, D, FOREIGN)
    for t in range(x.turns):
        stage = t % 2
        phase = ((t // 2) & 1) ^ 1
        row, tile = row_and_tile(x, t, BM, GROUP)
        at = [x.q_batch, x.q_start + row, x.head_q + t % GROUP, 0]
        q, do, first = r.q.index(stage), r.do.index(stage), stage * ROWS
        if t >= 2:  # before that both are free, and S is what the consumers wait for
            mbarrier.wait(r.do_free.index(stage), phase)
            load_with_rows(do_desc, delta_desc, at, tile, r.do_full.index(stage), do, r.delta, first, ROWS, 0)
        mbarrier.wait(r.free.index(stage), phase)
        load_with_rows(q_desc, lse_desc, at, tile, r.q_full.index(stage), q, r.lse, first, ROWS, 0)
        if t == 0 and not FOREIGN:
            load_both_halves(v_desc, x, r.v, r.do_full.index(0))
            load_with_rows(do_desc, delta_desc, at, tile, r.do_full.index(0), do, r.delta, first, ROWS, V_BYTES)
        elif t < 2:
            load_with_rows(do_desc, delta_desc, at, tile, r.do_full.index(stage), do, r.delta, first, ROWS, 0)
