# pyright: basic, reportOperatorIssue=false
# Triton's compiler reads these functions, not Python: values are tensors of Triton, which carry no types here.
"""The forward kernel: FlashAttention-2 (Dao 2023, arXiv 2307.08691), one program a block of queries of one head."""

from __future__ import annotations

import triton
import triton.language as tl

from kilat.backends.triton.tiles import (
    dot_nn,
    dot_nt,
    key_ranges,
    load_tile,
    page_offsets,
    query_tile,
    row_base,
    row_offsets,
    scale_tile,
    store_tile,
    visible,
    zero_tile,
)
from kilat.backends.triton.tiles_scores import kept, modify_scores

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_keys(x, base, j0, live, at, seqs, spec: tl.constexpr, VALUES: tl.constexpr, MASKED: tl.constexpr):
    """Rows of K (or V) from key j0 on: a tuple of [block_kv, piece]; with MASKED those not live [block_kv] are 0."""
    r = tl.arange(0, live.shape[0])
    if seqs.page_table is not None:
        return load_tile(base, page_offsets(x, seqs, at[0], j0 + r, live), live, spec, VALUES, MASKED)
    else:
        return load_tile(base + tl.cast(j0, tl.int64) * x.row, row_offsets(x, r, spec), live, spec, VALUES, MASKED)


@triton.jit
def step(state, q, kv, j0, i, seen, at, args, spec: tl.constexpr, BLOCK_KV: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys: (acc, m, l) after it.

    m is the largest score so far, in units in which s = score * numbers.unit; l the sum of exp(s - m) and acc that of
    exp(s - m) v. seen: (first, end) of the keys that an affine mask shows to some row of the block.
    """
    acc, m, l = state
    k, v, k_base, v_base = kv
    seqs, mask, scores, dropout, numbers = args
    j = j0 + tl.arange(0, BLOCK_KV)
    live = j < at[4]
    k_tile = load_keys(k, k_base, j0, live, at, seqs, spec, False, MASKED)  # [block_kv, head_dim]
    s = dot_nt(q, k_tile, spec)  # [block_q, block_kv]
    if spec.scaling == "s":
        s = s * numbers.scale
    s = modify_scores(s, scores, numbers, i[:, None], j[None, :], at, spec, len(spec.users))
    if MASKED:
        shown = visible(mask, numbers, i[:, None], j[None, :], at, spec)  # [block_q, block_kv]
        s = tl.where(shown, s, float("-inf"))
        if spec.by_entry or spec.intervals > 0:
            live = live & (tl.max(shown.to(tl.int32), 0) > 0)
        else:
            live = live & (j >= seen[0]) & (j < seen[1])
    v_tile = load_keys(v, v_base, j0, live, at, seqs, spec, True, MASKED)  # [block_kv, head_dim_v]
    m_new = tl.maximum(m, tl.max(s, 1))  # [block_q]
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet: no inf - inf
    unit_log2 = numbers.unit * LOG2E
    # scores first subtracted, then scaled: in log2 units the largest might not fit
    p = tl.exp2((s - shift[:, None]) * unit_log2)  # [block_q, block_kv]
    alpha = tl.exp2((m - shift) * unit_log2)  # [block_q]
    l = l * alpha + tl.sum(p, 1)
    acc = scale_tile(acc, alpha)
    if spec.dropout != "":
        p = tl.where(kept(dropout, numbers, i[:, None], j0, at, seqs, spec, BLOCK_KV), p, 0.0)
    acc = dot_nn(p.to(v.ptr.dtype.element_ty), v_tile, acc, spec)
    return acc, m_new, l


@triton.jit
def masked_steps(state, q, kv, lo, hi, i, seen, at, args, spec: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Steps over keys lo to hi, of which rows may not see all; blocks of a mask by entries that show none are left."""
    for j0 in tl.range(lo, hi, BLOCK_KV):
        if spec.by_entry:
            j = j0 + tl.arange(0, BLOCK_KV)
            shown = visible(args[1], args[4], i[:, None], j[None, :], at, spec)
            if tl.max(tl.max(shown.to(tl.int32), 1), 0) > 0:
                state = step(state, q, kv, j0, i, seen, at, args, spec, BLOCK_KV, True)
        else:
            state = step(state, q, kv, j0, i, seen, at, args, spec, BLOCK_KV, True)
    return state


@triton.jit
def walk(state, q, kv, ranges, i, at, args, spec: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Steps over the keys of `ranges` (of `key_blocks`): masked ends, and a middle without mask instructions."""
    lo, full_lo, full_hi, hi, seen_lo = ranges
    seen = (seen_lo, hi)
    if spec.from_left and not spec.by_entry:
        state = masked_steps(state, q, kv, lo, full_lo, i, seen, at, args, spec, BLOCK_KV)
    if not spec.by_entry:
        for j0 in tl.range(full_lo, full_hi, BLOCK_KV):
            state = step(state, q, kv, j0, i, seen, at, args, spec, BLOCK_KV, False)
    return masked_steps(state, q, kv, full_hi, hi, i, seen, at, args, spec, BLOCK_KV)


@triton.jit
def key_blocks(mask, numbers, i_first, i_last, at, spec: tl.constexpr, BLOCK_KV: tl.constexpr, N: tl.constexpr):
    """(lo, full_lo, full_hi, hi, first key seen) of interval N: `key_ranges` in whole blocks, except hi.

    Blocks from full_lo to full_hi are seen by every query; where there are none, full_lo = full_hi = lo.
    """
    seen_lo, full_start, full_stop, hi = key_ranges(mask, numbers, i_first, i_last, at, spec, N)
    hi = tl.where(i_last < i_first, 0, hi)
    lo = seen_lo // BLOCK_KV * BLOCK_KV
    if spec.by_entry:
        return lo, lo, lo, hi, seen_lo
    else:
        full_lo = (full_start + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV
        full_hi = tl.minimum(full_stop, hi) // BLOCK_KV * BLOCK_KV
        empty = full_hi <= full_lo
        return lo, tl.where(empty, lo, full_lo), tl.where(empty, lo, full_hi), hi, seen_lo


@triton.jit
def walk_both(state, q, kv, first, second, i, at, args, spec: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Steps over two intervals: the one that begins first, then what the other has beyond its blocks."""
    swap = second[0] < first[0]
    lo, full_lo, full_hi, hi, seen = first
    lo2, full_lo2, full_hi2, hi2, seen2 = second
    earlier = (
        tl.where(swap, lo2, lo),
        tl.where(swap, full_lo2, full_lo),
        tl.where(swap, full_hi2, full_hi),
        tl.where(swap, hi2, hi),
        tl.where(swap, seen2, seen),
    )
    done = tl.maximum(earlier[3] + BLOCK_KV - 1, 0) // BLOCK_KV * BLOCK_KV
    start = tl.maximum(tl.where(swap, lo, lo2), done)
    full_start = tl.maximum(tl.where(swap, full_lo, full_lo2), start)
    later = (
        start,
        full_start,
        tl.maximum(tl.where(swap, full_hi, full_hi2), full_start),
        tl.where(swap, hi, hi2),
        tl.where(swap, seen, seen2),
    )
    state = walk(state, q, kv, earlier, i, at, args, spec, BLOCK_KV)
    return walk(state, q, kv, later, i, at, args, spec, BLOCK_KV)


@triton.jit
def finish(state, sink, h, numbers, spec: tl.constexpr):
    """(out, lse): acc / l and m + log l, with the sink's term in the sum."""
    acc, m, l = state
    m = m * numbers.unit
    if sink is not None:
        extra = tl.load(sink + h).to(tl.float32)
        peak = tl.maximum(m, extra)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        alpha = tl.exp2((m - shift) * LOG2E)
        l = l * alpha + tl.exp2((extra - shift) * LOG2E)
        acc = scale_tile(acc, alpha)
        m = peak
    empty = m == float("-inf")
    total = tl.where(empty, 1.0, l)
    factor = 1.0 / total
    if spec.dropout != "":
        factor = factor * numbers.keep_scale
    return scale_tile(acc, factor), tl.where(empty, m, m + tl.log2(total) * LN2)


@triton.jit(do_not_specialize=["seqs", "numbers"])
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    seqs,
    mask,
    scores,
    dropout,
    numbers,
    sink,
    spec: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """out, lse of BLOCK_Q queries of one head. Grid: `adapt.query_tiles`; arguments: `arguments.py`; lse float32."""
    b, h, i0, q_first, q_len, rows, kv_first, kv_len = query_tile(seqs, BLOCK_Q)
    if i0 < rows:
        at = (b, h, q_first, q_len, kv_len)
        r = tl.arange(0, BLOCK_Q)
        i = i0 + r  # [block_q]
        h_kv = h // seqs.group
        q_base = row_base(q, b, q_first + i0, h)
        q_tile = load_tile(q_base, row_offsets(q, r, spec), i < q_len, spec, False, True)
        if spec.scaling == "q":  # float32
            q_tile = scale_tile(q_tile, tl.full([BLOCK_Q], 1.0, tl.float32) * numbers.scale)
        elif spec.scaling == "p" and spec.flip:
            sign = (tl.full([BLOCK_Q], 1.0, tl.float32) * numbers.sign).to(q.ptr.dtype.element_ty)
            q_tile = scale_tile(q_tile, sign)
        if seqs.page_table is not None:
            kv = (k, v, row_base(k, b * 0, kv_first, h_kv), row_base(v, b * 0, kv_first, h_kv))
        else:
            kv = (k, v, row_base(k, b, kv_first, h_kv), row_base(v, b, kv_first, h_kv))
        args = (seqs, mask, scores, dropout, numbers)
        m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_Q], tl.float32)
        state = (zero_tile(BLOCK_Q, spec, True), m, l)
        i_last = tl.minimum(i0 + BLOCK_Q, q_len) - 1
        ranges = key_blocks(mask, numbers, i0, i_last, at, spec, BLOCK_KV, 0)
        if spec.intervals == 2:
            more = key_blocks(mask, numbers, i0, i_last, at, spec, BLOCK_KV, 1)
            state = walk_both(state, q_tile, kv, ranges, more, i, at, args, spec, BLOCK_KV)
        else:
            state = walk(state, q_tile, kv, ranges, i, at, args, spec, BLOCK_KV)
        result, log_sum = finish(state, sink, h, numbers, spec)
        log_sum = tl.where(i < q_len, log_sum, float("-inf"))
        result = scale_tile(result, tl.where(i < q_len, 1.0, 0.0))
        head = h.to(tl.int64)
        if seqs.cu_q is None:
            head += b.to(tl.int64) * seqs.heads_q
        tl.store(lse + head * seqs.seqlen_q + (q_first + i), log_sum, mask=i < rows)
        out_base = row_base(out, b, q_first + i0, h)
        store_tile(out_base, row_offsets(out, r, spec), i < rows, result, spec, True)
