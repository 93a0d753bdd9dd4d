# pyright: basic, reportOperatorIssue=false
# Triton's compiler reads these functions, not Python: values are tensors of Triton, which carry no types here.
"""The backward kernels: delta; dK and dV, one program a block of keys; dQ, one program a block of queries.

Scores are computed twice (FlashAttention-2, Dao 2023, arXiv 2307.08691, in two passes instead of atomics): every
gradient is summed by one program in a fixed order, so it is bitwise repeatable.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kilat.backends.triton.tiles import (
    dot_nn,
    dot_nt,
    key_ranges,
    load_tile,
    plain,
    query_tile,
    row_base,
    row_offsets,
    scale_tile,
    store_tile,
    visible,
    zero_tile,
)
from kilat.backends.triton.tiles_backward import (
    any_shown,
    full_block,
    gradients,
    kept_tile,
    key_tile,
    load_row_values,
    load_statistics,
    masked_block,
    one_plan,
    query_ranges,
    scaled,
    two_plans,
    whole_blocks,
)


@triton.jit
def load_rows(x, base, first, live, like, spec: tl.constexpr, VALUES: tl.constexpr, MASKED: tl.constexpr):
    """Rows from `first` on: a tuple of [rows, piece] in the type of tensor `like`; with MASKED the others are 0."""
    r = tl.arange(0, live.shape[0])
    start = base + tl.cast(first, tl.int64) * x.row
    tile = load_tile(start, row_offsets(x, r, spec), live, spec, VALUES, MASKED)
    if x.ptr.dtype != like.ptr.dtype:  # do may be float32 where q is not
        if len(tile) == 2:
            tile = (tile[0].to(like.ptr.dtype.element_ty), tile[1].to(like.ptr.dtype.element_ty))
        else:
            tile = (tile[0].to(like.ptr.dtype.element_ty),)
    return tile


@triton.jit
def rows_only(tile, live):
    """A tuple of [rows, piece] with zeros in the rows that are not live, whatever they held."""
    kept_rows = (tl.where(live[:, None], tile[0], 0.0),)
    if len(tile) == 2:
        kept_rows = (kept_rows[0], tl.where(live[:, None], tile[1], 0.0))
    return kept_rows


# ---- delta -----------------------------------------------------------------------------------------------------------
@triton.jit
def row_sums(o_base, do_base, o_offsets, do_offsets, live, spec: tl.constexpr):
    """rowsum(o * do) in float32; a zero of o counts as 0 whatever do holds (rows that see nothing ignore it)."""
    o_tile = load_tile(o_base, o_offsets, live, spec, True, True)
    do_tile = load_tile(do_base, do_offsets, live, spec, True, True)
    total = tl.sum(tl.where(o_tile[0] == 0.0, 0.0, o_tile[0].to(tl.float32) * do_tile[0].to(tl.float32)), 1)
    if len(o_tile) == 2:
        total += tl.sum(tl.where(o_tile[1] == 0.0, 0.0, o_tile[1].to(tl.float32) * do_tile[1].to(tl.float32)), 1)
    return total


@triton.jit(do_not_specialize=["seqs"])
def delta_kernel(o, do, dlse, delta, seqs, spec: tl.constexpr, BLOCK_Q: tl.constexpr):
    """delta = rowsum(o * do) - dlse of BLOCK_Q queries of one head, 0 where no sequence owns the row.

    Grid: `adapt.query_tiles`; dlse (or None) and delta float32 in the layout of lse.
    """
    b, h, i0, q_first, q_len, rows, _, _ = query_tile(seqs, BLOCK_Q)
    r = tl.arange(0, BLOCK_Q)
    i = i0 + r  # [block_q]
    live = i < q_len
    o_base, do_base = row_base(o, b, q_first + i0, h), row_base(do, b, q_first + i0, h)
    total = row_sums(o_base, do_base, row_offsets(o, r, spec), row_offsets(do, r, spec), live, spec)  # [block_q]
    if dlse is not None:
        total -= load_row_values(dlse, b, h, q_first, i, live, seqs, 0.0)
    head = h.to(tl.int64)
    if seqs.cu_q is None:
        head += b.to(tl.int64) * plain(seqs.heads_q)
    tl.store(delta + head * plain(seqs.seqlen_q) + (q_first + i), tl.where(live, total, 0.0), mask=i < rows)


# ---- dK and dV -------------------------------------------------------------------------------------------------------
@triton.jit
def keys_step(
    state,
    keys,
    queries,
    i0,
    seen,
    at,
    args,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
    WANTED: tl.constexpr,
):
    """(dK / scale, dV) after one more block of queries, on transposed tiles: P^T and dS^T multiply from the left.

    keys: (k and v tiles, j0). queries: (q, do, bases of their head, lse, delta). seen: the first query and the end of
    those that an affine mask lets see some of the keys. WANTED: (dk, dv).
    """
    dk, dv = state
    k_tile, v_tile, j0 = keys
    q, do, q_base, do_base, lse, delta = queries
    seqs, mask, _, _, numbers = args
    i, j = i0 + tl.arange(0, BLOCK_Q), j0 + tl.arange(0, BLOCK_KV)
    live = i < at[3]
    shown, keep = live, live
    if MASKED:
        shown = visible(mask, numbers, i[None, :], j[:, None], at, spec)  # [block_kv, block_q]
        if spec.by_entry or spec.intervals > 0:
            live = live & (tl.max(shown.to(tl.int32), 0) > 0)
        else:
            live = live & (i >= seen[0]) & (i < seen[1])
    q_tile = load_rows(q, q_base, i0, live, q, spec, False, MASKED)  # [block_q, head_dim]
    do_tile = load_rows(do, do_base, i0, live, q, spec, True, MASKED)  # [block_q, head_dim_v]
    log_sum, delta_row = load_statistics(lse, delta, i, live, at, seqs)  # [block_q]
    if spec.dropout != "":
        keep = kept_tile(i, j, j0, at, args, spec, BLOCK_KV, True)
    s = scaled(dot_nt(k_tile, q_tile, spec), numbers, spec)  # [block_kv, block_q]
    dp = dot_nt(v_tile, do_tile, spec)  # [block_kv, block_q]
    p, ds = gradients(
        s, dp, log_sum[None, :], delta_row[None, :], shown, keep, i[None, :], j[:, None], at, args, spec, MASKED, -1
    )
    if WANTED[1]:
        dv = dot_nn(p.to(q.ptr.dtype.element_ty), do_tile, dv, spec)
    if WANTED[0]:
        dk = dot_nn(ds.to(q.ptr.dtype.element_ty), q_tile, dk, spec)
    return dk, dv


@triton.jit
def keys_walk(
    state,
    keys,
    queries,
    at,
    args,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    WANTED: tl.constexpr,
):
    """`keys_step` over the queries of one head: first blocks that need a mask, then the others."""
    _, mask, _, _, numbers = args
    j0 = keys[2]
    j_last = tl.minimum(j0 + BLOCK_KV, at[4]) - 1
    ranges = query_ranges(mask, numbers, j0, j_last, at, spec, 0)
    plan = one_plan(whole_blocks(ranges, at[3], spec, BLOCK_Q))
    if spec.intervals == 2:
        more = query_ranges(mask, numbers, j0, j_last, at, spec, 1)
        plan = two_plans(whole_blocks(ranges, at[3], spec, BLOCK_Q), whole_blocks(more, at[3], spec, BLOCK_Q))
    seen = (ranges[0], ranges[3])
    for t in tl.range(0, plan[3] - plan[5]):
        i0 = masked_block(plan, t) * BLOCK_Q
        if spec.by_entry or spec.intervals > 0:
            i, j = i0 + tl.arange(0, BLOCK_Q), j0 + tl.arange(0, BLOCK_KV)
            if any_shown(visible(mask, numbers, i[None, :], j[:, None], at, spec)):
                state = keys_step(state, keys, queries, i0, seen, at, args, spec, BLOCK_Q, BLOCK_KV, True, WANTED)
        else:
            state = keys_step(state, keys, queries, i0, seen, at, args, spec, BLOCK_Q, BLOCK_KV, True, WANTED)
    if not spec.by_entry:
        for t in tl.range(0, plan[5]):
            i0 = full_block(plan, t) * BLOCK_Q
            state = keys_step(state, keys, queries, i0, seen, at, args, spec, BLOCK_Q, BLOCK_KV, False, WANTED)
    return state


@triton.jit(do_not_specialize=["seqs", "numbers"])
def keys_kernel(
    q,
    k,
    v,
    do,
    dk,
    dv,
    lse,
    delta,
    seqs,
    mask,
    scores,
    dropout,
    numbers,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """dK and dV (None: not wanted) of BLOCK_KV keys of one kv head, summed over its query heads.

    dV = P^T dO, dK = scale dS^T Q. Grid: `backward_launch.key_tiles`.
    """
    b, h_kv, j0, kv_first, kv_len, rows, q_first, q_len = key_tile(seqs, BLOCK_KV)
    if j0 < rows:
        args = (seqs, mask, scores, dropout, numbers)
        r = tl.arange(0, BLOCK_KV)
        live = j0 + r < kv_len  # [block_kv]
        k_tile = load_rows(k, row_base(k, b, kv_first, h_kv), j0, live, k, spec, False, True)  # [block_kv, head_dim]
        v_tile = load_rows(v, row_base(v, b, kv_first, h_kv), j0, live, k, spec, True, True)  # [block_kv, head_dim_v]
        if spec.scaling == "q":  # float32
            k_tile = scale_tile(k_tile, tl.full([BLOCK_KV], 1.0, tl.float32) * numbers.scale)
        state = (zero_tile(BLOCK_KV, spec, False), zero_tile(BLOCK_KV, spec, True))
        WANTED: tl.constexpr = (dk is not None, dv is not None)
        if j0 < kv_len:
            for g in tl.range(0, seqs.group):
                h = h_kv * seqs.group + g
                at = (b, h, q_first, q_len, kv_len)
                queries = (q, do, row_base(q, b, q_first, h), row_base(do, b, q_first, h), lse, delta)
                keys = (k_tile, v_tile, j0)
                state = keys_walk(state, keys, queries, at, args, spec, BLOCK_Q, BLOCK_KV, WANTED)
        if dk is not None:
            dk_tile = scale_tile(rows_only(state[0], live), tl.full([BLOCK_KV], 1.0, tl.float32) * numbers.scale)
            base = row_base(dk, b, kv_first + j0, h_kv)
            store_tile(base, row_offsets(dk, r, spec), j0 + r < rows, dk_tile, spec, False)
        if dv is not None:
            base = row_base(dv, b, kv_first + j0, h_kv)
            store_tile(base, row_offsets(dv, r, spec), j0 + r < rows, rows_only(state[1], live), spec, True)


# ---- dQ --------------------------------------------------------------------------------------------------------------
@triton.jit
def queries_step(
    dq,
    queries,
    keys,
    j0,
    seen,
    i,
    at,
    args,
    spec: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dQ / scale after one more block of keys.

    queries: (q and do tiles, lse, delta). keys: (k, v, bases of their head). seen: the first key and the end of those
    that an affine mask shows to some of the queries.
    """
    q_tile, do_tile, log_sum, delta_row = queries
    k, v, k_base, v_base = keys
    _, mask, _, _, numbers = args
    j = j0 + tl.arange(0, BLOCK_KV)
    live = j < at[4]
    shown, keep = live, live
    if MASKED:
        shown = visible(mask, numbers, i[:, None], j[None, :], at, spec)  # [block_q, block_kv]
        if spec.by_entry or spec.intervals > 0:
            live = live & (tl.max(shown.to(tl.int32), 0) > 0)
        else:
            live = live & (j >= seen[0]) & (j < seen[1])
    k_tile = load_rows(k, k_base, j0, live, k, spec, False, MASKED)  # [block_kv, head_dim]
    v_tile = load_rows(v, v_base, j0, live, k, spec, True, MASKED)  # [block_kv, head_dim_v]
    if spec.dropout != "":
        keep = kept_tile(i, j, j0, at, args, spec, BLOCK_KV, False)
    s = scaled(dot_nt(q_tile, k_tile, spec), numbers, spec)  # [block_q, block_kv]
    dp = dot_nt(do_tile, v_tile, spec)  # [block_q, block_kv]
    _, ds = gradients(
        s, dp, log_sum[:, None], delta_row[:, None], shown, keep, i[:, None], j[None, :], at, args, spec, MASKED, -1
    )
    return dot_nn(ds.to(k.ptr.dtype.element_ty), k_tile, dq, spec)


@triton.jit
def queries_walk(dq, queries, keys, i0, at, args, spec: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """`queries_step` over the keys that BLOCK_Q queries see: first blocks that need a mask, then the others."""
    _, mask, _, _, numbers = args
    i = i0 + tl.arange(0, BLOCK_Q)
    i_last = tl.minimum(i0 + BLOCK_Q, at[3]) - 1
    ranges = key_ranges(mask, numbers, i0, i_last, at, spec, 0)
    plan = one_plan(whole_blocks(ranges, at[4], spec, BLOCK_KV))
    if spec.intervals == 2:
        more = key_ranges(mask, numbers, i0, i_last, at, spec, 1)
        plan = two_plans(whole_blocks(ranges, at[4], spec, BLOCK_KV), whole_blocks(more, at[4], spec, BLOCK_KV))
    seen = (ranges[0], ranges[3])
    for t in tl.range(0, plan[3] - plan[5]):
        j0 = masked_block(plan, t) * BLOCK_KV
        if spec.by_entry or spec.intervals > 0:
            j = j0 + tl.arange(0, BLOCK_KV)
            if any_shown(visible(mask, numbers, i[:, None], j[None, :], at, spec)):
                dq = queries_step(dq, queries, keys, j0, seen, i, at, args, spec, BLOCK_KV, True)
        else:
            dq = queries_step(dq, queries, keys, j0, seen, i, at, args, spec, BLOCK_KV, True)
    if not spec.by_entry:
        for t in tl.range(0, plan[5]):
            j0 = full_block(plan, t) * BLOCK_KV
            dq = queries_step(dq, queries, keys, j0, seen, i, at, args, spec, BLOCK_KV, False)
    return dq


@triton.jit(do_not_specialize=["seqs", "numbers"])
def queries_kernel(
    q,
    k,
    v,
    do,
    dq,
    lse,
    delta,
    seqs,
    mask,
    scores,
    dropout,
    numbers,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """dQ = scale dS K of BLOCK_Q queries of one head. Grid: `adapt.query_tiles`."""
    b, h, i0, q_first, q_len, rows, kv_first, kv_len = query_tile(seqs, BLOCK_Q)
    if i0 < rows:
        at = (b, h, q_first, q_len, kv_len)
        args = (seqs, mask, scores, dropout, numbers)
        r = tl.arange(0, BLOCK_Q)
        live = i0 + r < q_len  # [block_q]
        scale = tl.full([BLOCK_Q], 1.0, tl.float32) * numbers.scale
        q_tile = load_rows(q, row_base(q, b, q_first, h), i0, live, q, spec, False, True)  # [block_q, head_dim]
        do_tile = load_rows(do, row_base(do, b, q_first, h), i0, live, q, spec, True, True)  # [block_q, head_dim_v]
        if spec.scaling == "q":  # float32
            q_tile = scale_tile(q_tile, scale)
        log_sum, delta_row = load_statistics(lse, delta, i0 + r, live, at, seqs)  # [block_q]
        acc = zero_tile(BLOCK_Q, spec, False)
        if i0 < q_len:
            h_kv = h // seqs.group
            keys = (k, v, row_base(k, b, kv_first, h_kv), row_base(v, b, kv_first, h_kv))
            queries = (q_tile, do_tile, log_sum, delta_row)
            acc = queries_walk(acc, queries, keys, i0, at, args, spec, BLOCK_Q, BLOCK_KV)
        base = row_base(dq, b, q_first + i0, h)
        store_tile(base, row_offsets(dq, r, spec), i0 + r < rows, scale_tile(acc, scale), spec, False)
