"""The backward's main kernel on sm_90: dK, dV, and dQ added up in float32.

    P = exp2(score - lse),  dV = P^T dO,  dP = dO V^T,  dS = P (dP - delta) dscore,  dK = scale dS^T Q,  dQ += dS K

lse (in log2 units) and delta come from `backward_rows.prepare_kernel`, which also clears dQ's accumulator; its
`finish_kernel` turns that into dQ. Everything is transposed here: S^T and dS^T are [keys, queries], so that P^T and
dS^T are register operands of the products that give dV and dK.
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kilat.backends.gluon.backward_narrow import consume_narrow
from kilat.backends.gluon.backward_parts import BLOCK_KV, Shared, barriers, produce
from kilat.backends.gluon.backward_place import place_of
from kilat.backends.gluon.backward_wide import consume_wide


@gluon.jit
def shared_memory(
    q_desc, do_desc, k_desc, v_desc, dq_desc, lse_desc, delta_desc,
    BM: gl.constexpr, D: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers: Q in STAGES, dO in two, dS in BUFFERS.

    A barrier that nobody waits for is not made: Triton would put something else into its place while it still is one.
    """
    dtype: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = BM // 64
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    ds = gl.allocate_shared_memory(dtype, [BUFFERS * 2 * ROWS, 64, 64], ds_layout)
    phases = barriers(1, 2 if D == 128 else 1)  # of the warpgroups' elementwise parts
    done, ds_full = phases.index(0), phases
    if D == 64:
        done, ds_full = barriers(2, 1).index(0), barriers(2, BUFFERS)
    r = Shared(
        gl.allocate_shared_memory(dtype, [STAGES, 1, BM, 1, D], q_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, BM, 1, D], do_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], k_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], v_desc.layout),
        ds,
        gl.allocate_shared_memory(gl.float32, [2, 32, 128], dq_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES * ROWS, 1, 64], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2 * ROWS, 1, 64], delta_desc.layout),
        barriers(1, 1).index(0),
        barriers(1, 1).index(0),
        barriers(1, 1).index(0),
        barriers(1, STAGES),
        barriers(1, 2),
        barriers(2, STAGES),
        ds_full,
        done,
        phases.index(0),
        phases,
    )
    fence_async_shared()
    return r


LENGTHS = (
    "batch seqlen_q seqlen_kv num_heads_kv left right right_top_left tiles_kv lead together tiles".split()  # noqa: SIM905
)


@gluon.jit(do_not_specialize=LENGTHS)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr,
    offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_kv,
    left, right, right_top_left, tiles_kv, lead, together, tiles, dim, dim_v, scale, factor, cap_log2,
    BM: gl.constexpr, D: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    FOREIGN: gl.constexpr, SOFTCAP: gl.constexpr, DOWN: gl.constexpr, WITH_DQ: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One program for 128 keys of a key/value head; see `backward_parts` for the names."""
    x = place_of(
        offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_kv,
        left, right, right_top_left, tiles_kv, lead, together, tiles, BM, BLOCK_KV, GROUP, DOWN,
    )  # fmt: skip
    r = shared_memory(q_desc, do_desc, k_desc, v_desc, dq_desc, lse_desc, delta_desc, BM, D, BUFFERS, STAGES)
    gl.warp_specialize(
        [
            (
                consume_wide if D == 128 else consume_narrow,
                (
                    dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, x, r, scale, factor, cap_log2, seqlen_kv, num_heads_kv,
                    dim, dim_v, 0, GROUP, SOFTCAP, WITH_DQ, MASKED, FOREIGN,
                ),
            ),
            (
                consume_wide if D == 128 else consume_narrow,
                (
                    dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, x, r, scale, factor, cap_log2, seqlen_kv, num_heads_kv,
                    dim, dim_v, 1, GROUP, SOFTCAP, WITH_DQ, MASKED, FOREIGN,
                ),
            ),
            (
                produce,
                (
                    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, x, r, BM, D, GROUP, FOREIGN,
                ),
            ),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
