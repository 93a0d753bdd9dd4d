"""Parts of the backward for a head dimension above 128: shared memory and the TMA producer.

Rows come in one or two boxes, of widths D1 and D2 (q, k) and V1 and V2 (v, dO); names ending in 2 are the second box.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# The annotations of aggregates are read when the class is made, so they must not be strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kilat.backends.gluon._compat import aggregate, async_load
from kilat.backends.gluon.backward_boxes import load_cleared, load_rows
from kilat.backends.gluon.backward_parts import barriers
from kilat.backends.gluon.backward_place import row_and_tile

BM = gl.constexpr(64)
BLOCK_KV = gl.constexpr(64)


@aggregate
class Broad:
    """Shared memory and barriers of a program; 'full' and 'free' say what the barrier's completion means."""

    q: gl.shared_memory_descriptor  # [2, 1, 64, 1, D1]
    q2: gl.shared_memory_descriptor  # [2, 1, 64, 1, D2], or q if there is no second box
    do: gl.shared_memory_descriptor  # [2, 1, 64, 1, V1]
    do2: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # [1, 1, 64, 1, D1]
    k2: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor  # [1, 1, 64, 1, V1]
    v2: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # [2, 64, 64], keys x queries; free when q is
    lse: gl.shared_memory_descriptor  # [2, 1, 64], log2 units
    delta: gl.shared_memory_descriptor  # [2, 1, 64]
    raw: gl.shared_memory_descriptor  # rows that came before what is behind a sequence is cleared
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor  # q and lse
    do_full: gl.shared_memory_descriptor  # do and delta
    q_free: gl.shared_memory_descriptor  # by `gradients`, whose dK needs dS and so S
    do_free: gl.shared_memory_descriptor  # by `scores`
    ds_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, q2, do, do2, k, k2, v, v2, ds, lse, delta, raw, kv_full, q_full, do_full, q_free, do_free, ds_full
    ):  # fmt: skip
        self.q = q
        self.q2 = q2
        self.do = do
        self.do2 = do2
        self.k = k
        self.k2 = k2
        self.v = v
        self.v2 = v2
        self.ds = ds
        self.lse = lse
        self.delta = delta
        self.raw = raw
        self.kv_full = kv_full
        self.q_full = q_full
        self.do_full = do_full
        self.q_free = q_free
        self.do_free = do_free
        self.ds_full = ds_full


@gluon.jit
def produce_broad(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, do_desc, do2_desc, lse_desc, delta_desc, x, r,
    D1: gl.constexpr, D2: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, GROUP: gl.constexpr, FOREIGN: gl.constexpr,
):  # fmt: skip
    """The producer: K and V once, then dO, delta, Q and lse of every turn into two stages; dO's is free first."""
    ROW_BYTES: gl.constexpr = BM * 4
    raws = 0
    k, k2, v, v2 = r.k.index(0), r.k2.index(0), r.v.index(0), r.v2.index(0)
    at_keys = (x.kv_batch, x.kv_start + x.key, x.head_kv)
    if FOREIGN & (x.key + BLOCK_KV > x.kv_len):
        left = x.kv_len - x.key
        load_cleared(k_desc, k2_desc, at_keys, r.raw, raws, k, k2, left, BLOCK_KV, D1, D2)
        load_cleared(v_desc, v2_desc, at_keys, r.raw, raws + 1, v, v2, left, BLOCK_KV, V1, V2)
        raws += 2
        mbarrier.arrive(r.kv_full.index(0), count=1)
        mbarrier.arrive(r.kv_full.index(1), count=1)
    else:
        load_rows(k_desc, k2_desc, at_keys, r.kv_full.index(0), k, k2, 0, D2)
        load_rows(v_desc, v2_desc, at_keys, r.kv_full.index(1), v, v2, 0, V2)
    for t in range(x.turns):
        stage = t % 2
        free = ((t // 2) & 1) ^ 1
        row, tile = row_and_tile(x, t, BM, GROUP)
        at = (x.q_batch, x.q_start + row, x.head_q + t % GROUP)
        is_short = FOREIGN & (row < x.q_len) & (row + BM > x.q_len)
        do_full = r.do_full.index(stage)
        do, do2 = r.do.index(stage), r.do2.index(stage)
        mbarrier.wait(r.do_free.index(stage), free)
        if is_short:
            load_cleared(do_desc, do2_desc, at, r.raw, raws, do, do2, x.q_len - row, BM, V1, V2)
            raws += 1
            mbarrier.expect(do_full, ROW_BYTES)
        else:
            load_rows(do_desc, do2_desc, at, do_full, do, do2, ROW_BYTES, V2)
        async_load(delta_desc, [tile, 0], do_full, r.delta.index(stage))
        q_full = r.q_full.index(stage)
        q, q2 = r.q.index(stage), r.q2.index(stage)
        mbarrier.wait(r.q_free.index(stage), free)
        if is_short:
            load_cleared(q_desc, q2_desc, at, r.raw, raws, q, q2, x.q_len - row, BM, D1, D2)
            raws += 1
            mbarrier.expect(q_full, ROW_BYTES)
        else:
            load_rows(q_desc, q2_desc, at, q_full, q, q2, ROW_BYTES, D2)
        async_load(lse_desc, [tile, 0], q_full, r.lse.index(stage))


@gluon.jit
def shared_memory(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, do_desc, do2_desc, lse_desc, delta_desc,
    D1: gl.constexpr, D2: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers."""
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, BM, 1, D1], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [1, 1, 64, 1, D1], k_desc.layout)
    do = gl.allocate_shared_memory(dtype, [2, 1, BM, 1, V1], do_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 64, 1, V1], v_desc.layout)
    q2 = q
    k2 = k
    do2 = do
    v2 = v
    if D2:
        q2 = gl.allocate_shared_memory(dtype, [2, 1, BM, 1, D2], q2_desc.layout)
        k2 = gl.allocate_shared_memory(dtype, [1, 1, 64, 1, D2], k2_desc.layout)
    if V2:
        do2 = gl.allocate_shared_memory(dtype, [2, 1, BM, 1, V2], do2_desc.layout)
        v2 = gl.allocate_shared_memory(dtype, [1, 1, 64, 1, V2], v2_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BM], dtype)
    r = Broad(
        q, q2, do, do2, k, k2, v, v2,
        gl.allocate_shared_memory(dtype, [2, 64, BM], ds_layout),
        gl.allocate_shared_memory(gl.float32, [2, 1, 64], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, 1, 64], delta_desc.layout),
        barriers(1, 1).index(0), barriers(1, 2), barriers(1, 2), barriers(1, 2), barriers(1, 2), barriers(1, 2),
        barriers(1, 2),
    )  # fmt: skip
    fence_async_shared()
    return r
