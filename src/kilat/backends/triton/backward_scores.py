# pyright: basic, reportOperatorIssue=false
# Triton's compiler reads these functions, not Python: values are tensors of Triton, which carry no types here.
"""Gradients of a bias and of the tensors of user scores, each in a kernel of its own that computes dS anew."""

from __future__ import annotations

import triton
import triton.language as tl

from kilat.backends.triton.backward import load_rows
from kilat.backends.triton.tiles import (
    clamp,
    dot_nt,
    key_ranges,
    key_span,
    plain,
    query_span,
    query_tile,
    row_base,
    scale_tile,
    visible,
)
from kilat.backends.triton.tiles_backward import (
    any_shown,
    gradients,
    kept_tile,
    load_statistics,
    masked_block,
    one_plan,
    scaled,
    two_plans,
    whole_blocks,
)
from kilat.backends.triton.tiles_scores import modify_scores


@triton.jit
def tile_gradient(tensors, i, j, i0, j0, kv_first, shown, at, args, spec: tl.constexpr, STAGE: tl.constexpr):
    """(scale q k^T, dS before user function STAGE) of a tile, hidden pairs 0; i and j are vectors.

    tensors: (q, k, v, do, lse, delta). shown [block_q, block_kv].
    """
    q, k, v, do, lse, delta = tensors
    b, h, q_first, q_len, kv_len = at
    h_kv = h // args[0].group
    BLOCK_KV: tl.constexpr = j.shape[0]
    sees = (i < q_len) & (tl.max(shown.to(tl.int32), 1) > 0)  # [block_q]
    seen = (j < kv_len) & (tl.max(shown.to(tl.int32), 0) > 0)  # [block_kv]
    q_tile = load_rows(q, row_base(q, b, q_first, h), i0, sees, q, spec, False, True)  # [block_q, head_dim]
    do_tile = load_rows(do, row_base(do, b, q_first, h), i0, sees, q, spec, True, True)  # [block_q, head_dim_v]
    k_tile = load_rows(k, row_base(k, b, kv_first, h_kv), j0, seen, q, spec, False, True)  # [block_kv, head_dim]
    v_tile = load_rows(v, row_base(v, b, kv_first, h_kv), j0, seen, q, spec, True, True)  # [block_kv, head_dim_v]
    if spec.scaling == "q":  # float32
        q_tile = scale_tile(q_tile, tl.full([i.shape[0]], 1.0, tl.float32) * args[4].scale)
    keep = shown
    if spec.dropout != "":
        keep = kept_tile(i, j, j0, at, args, spec, BLOCK_KV, False)
    log_sum, delta_row = load_statistics(lse, delta, i, sees, at, args[0])  # [block_q]
    s = scaled(dot_nt(q_tile, k_tile, spec), args[4], spec)  # [block_q, block_kv]
    dp = dot_nt(do_tile, v_tile, spec)  # [block_q, block_kv]
    _, ds = gradients(
        s, dp, log_sum[:, None], delta_row[:, None], shown, keep, i[:, None], j[None, :], at, args, spec, True, STAGE
    )
    return s, ds


# ---- bias ------------------------------------------------------------------------------------------------------------
@triton.jit
def add_bias_tile(
    acc, tensors, i0, j0, kv_first, at, args, spec: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """acc [block_q, block_kv] plus the bias's gradient of one tile."""
    i, j = i0 + tl.arange(0, BLOCK_Q), j0 + tl.arange(0, BLOCK_KV)
    shown = visible(args[1], args[4], i[:, None], j[None, :], at, spec)
    if any_shown(shown):
        _, ds = tile_gradient(tensors, i, j, i0, j0, kv_first, shown, at, args, spec, 0)
        acc += ds
    return acc


@triton.jit(do_not_specialize=["seqs", "numbers", "parts"])
def bias_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dbias,
    parts,
    seqs,
    mask,
    scores,
    dropout,
    numbers,
    spec: tl.constexpr,
    WIDE_Q: tl.constexpr,
    WIDE_KV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """dbias[b, h, i, j] = dS before the user functions, summed over broadcast axes: BLOCK_Q x BLOCK_KV entries.

    dbias float32 [splits, batch or 1, heads or 1, rows, columns]; parts: those five sizes. A broadcast batch and head
    axis is cut into `splits` parts. WIDE_Q, WIDE_KV: the bias has more than one row, column; else the program sums over
    all. Grid: splits * batch * heads * ceil(rows / BLOCK_Q) * ceil(columns / BLOCK_KV).
    """
    splits, batches, heads, rows, columns = parts
    tiles_kv = (columns + BLOCK_KV - 1) // BLOCK_KV
    tiles_q = (rows + BLOCK_Q - 1) // BLOCK_Q
    pid = tl.program_id(0)
    tile_kv = pid % tiles_kv
    tile_q = pid // tiles_kv % tiles_q
    slab = pid // tiles_kv // tiles_q  # (split, b, h)
    h0 = slab % heads
    b0 = slab // heads % batches
    split = slab // heads // batches
    all_h = tl.where(heads == 1, plain(seqs.heads_q), 1)
    reached = tl.where(batches == 1, plain(seqs.batch), 1) * all_h  # pairs (b, h) that an entry reaches
    args = (seqs, mask, scores, dropout, numbers)
    tensors = (q, k, v, do, lse, delta)
    acc = tl.full([BLOCK_Q, BLOCK_KV], 0.0, tl.float32)
    stop = ((split + 1).to(tl.int64) * reached // splits).to(tl.int32)
    for n in tl.range((split.to(tl.int64) * reached // splits).to(tl.int32), stop):
        b, h = b0 + n // all_h, h0 + n % all_h
        q_first, q_len = query_span(seqs, b)
        kv_first, kv_len = key_span(seqs, b)
        at = (b, h, q_first, q_len, kv_len)
        q_lo, q_hi = tile_q * BLOCK_Q, tl.minimum(tile_q * BLOCK_Q + 1, q_len)
        kv_lo, kv_hi = tile_kv * BLOCK_KV, tl.minimum(tile_kv * BLOCK_KV + 1, kv_len)
        if not WIDE_Q:
            q_hi = q_len
        if not WIDE_KV:
            kv_hi = kv_len
        for i0 in tl.range(q_lo, q_hi, BLOCK_Q):
            for j0 in tl.range(kv_lo, kv_hi, BLOCK_KV):
                acc = add_bias_tile(acc, tensors, i0, j0, kv_first, at, args, spec, BLOCK_Q, BLOCK_KV)
    if not WIDE_Q:
        acc = tl.sum(acc, 0)[None, :]  # [1, block_kv]
    if not WIDE_KV:
        acc = tl.sum(acc, 1)[:, None]  # [.., 1]
    i = tile_q * BLOCK_Q + tl.arange(0, acc.shape[0])[:, None]
    j = tile_kv * BLOCK_KV + tl.arange(0, acc.shape[1])[None, :]
    where = (slab.to(tl.int64) * rows + i) * columns + j
    tl.store(dbias + where, acc, mask=(i < rows) & (j < columns))


# ---- tensors of user scores ------------------------------------------------------------------------------------------
@triton.jit
def add_elements(x, values, table, slot: tl.constexpr):
    """Add x [block_q, block_kv] to the elements of `table` that the indices values[1:] name, clamped to its axes."""
    at = tl.full([x.shape[0], x.shape[1]], 0, tl.int64)
    for n in tl.static_range(len(table.sizes)):
        at += clamp(values[1 + n], 0, table.sizes[n] - 1).to(tl.int64) * table.strides[n]
    if not slot.by_query:  # one element for all queries of the tile
        x = tl.sum(x, 0)[None, :]
        at = tl.max(at, 0)[None, :]
    if not slot.by_key:
        x = tl.sum(x, 1)[:, None]
        at = tl.max(at, 1)[:, None]
    tl.atomic_add(table.ptr + at, x, mask=x != 0, sem="relaxed")


@triton.jit(do_not_specialize=["seqs", "numbers"])
def table_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    table,
    factor,
    seqs,
    mask,
    scores,
    dropout,
    numbers,
    spec: tl.constexpr,
    slot: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """The gradient of a tensor from one place where a user function reads it, for BLOCK_Q queries of one head.

    slot: `backward_scores_launch.Slot`. MODE: "sum" adds float32 to `table`; "fixed" adds int64, each value times
    `factor` (float32 []), so that the order of additions does not matter; "largest" adds nothing and writes the largest
    size to factor [programs]. Grid: `adapt.query_tiles`.
    """
    b, h, i0, q_first, q_len, _, kv_first, kv_len = query_tile(seqs, BLOCK_Q)
    at = (b, h, q_first, q_len, kv_len)
    args = (seqs, mask, scores, dropout, numbers)
    tensors = (q, k, v, do, lse, delta)
    largest = tl.full([BLOCK_Q], 0.0, tl.float32)
    if i0 < q_len:
        i = i0 + tl.arange(0, BLOCK_Q)
        q_pos = i + (kv_len - q_len)
        i_last = tl.minimum(i0 + BLOCK_Q, q_len) - 1
        blocks = whole_blocks(key_ranges(mask, numbers, i0, i_last, at, spec, 0), kv_len, spec, BLOCK_KV)
        plan = one_plan(blocks)
        if spec.intervals == 2:
            more = key_ranges(mask, numbers, i0, i_last, at, spec, 1)
            plan = two_plans(blocks, whole_blocks(more, kv_len, spec, BLOCK_KV))
        every = (plan[0], plan[1], plan[2], plan[3], plan[3], 0)
        for t in tl.range(0, plan[3]):
            j0 = masked_block(every, t) * BLOCK_KV
            j = j0 + tl.arange(0, BLOCK_KV)
            shown = visible(mask, numbers, i[:, None], j[None, :], at, spec)
            if any_shown(shown):
                s, ds = tile_gradient(tensors, i, j, i0, j0, kv_first, shown, at, args, spec, slot.user + 1)
                before = modify_scores(s, scores, numbers, i[:, None], j[None, :], at, spec, slot.user)
                values = slot.partial(before, b, h, q_pos[:, None], j[None, :], scores.users[slot.user])
                x = tl.where(ds == 0.0, 0.0, ds * values[0])  # a partial of a hidden pair may be NaN
                if MODE == "largest":
                    sizes = tl.where(x == x, tl.abs(x), float("inf"))
                    largest = tl.maximum(largest, tl.max(sizes, 1))
                elif MODE == "fixed":
                    add_elements(tl.floor(x * tl.load(factor) + 0.5).to(tl.int64), values, table, slot)
                else:
                    add_elements(x, values, table, slot)
    if MODE == "largest":
        tl.store(factor + tl.program_id(0), tl.max(largest, 0))
