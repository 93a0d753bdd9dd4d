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
    plain,
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
def masked_step(state, q, kv, j0, i, seen, at, args, spec: tl.constexpr, BLOCK_KV: tl.constexpr):
    """A step over keys of which rows may not see all; nothing is done where a mask by entries shows none of them."""
    if spec.by_entry:
        j = j0 + tl.arange(0, BLOCK_KV)
        shown = visible(args[1], args[4], i[:, None], j[None, :], at, spec)
        if tl.max(tl.max(shown.to(tl.int32), 1), 0) > 0:
            state = step(state, q, kv, j0, i, seen, at, args, spec, BLOCK_KV, True)
    else:
        state = step(state, q, kv, j0, i, seen, at, args, spec, BLOCK_KV, True)
    return state


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
def count(lo, hi, BLOCK: tl.constexpr):
    """How many blocks it takes from lo, where one begins, to hi."""
    return (tl.maximum(hi - lo, 0) + BLOCK - 1) // BLOCK


@triton.jit
def walk(state, q, kv, blocks, i, at, args, spec: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Steps over the keys of `key_blocks`: the middle without mask instructions, then both ends."""
    lo, full_lo, full_hi, hi, seen_lo = blocks
    seen = (seen_lo, hi)
    if not spec.by_entry:
        for j0 in tl.range(full_lo, full_hi, BLOCK_KV):
            state = step(state, q, kv, j0, i, seen, at, args, spec, BLOCK_KV, False)
    if spec.from_left:  # one loop over both ends: its body is large
        left = count(lo, full_lo, BLOCK_KV)
        for n in tl.range(0, left + count(full_hi, hi, BLOCK_KV)):
            j0 = tl.where(n < left, lo + n * BLOCK_KV, full_hi + (n - left) * BLOCK_KV)
            state = masked_step(state, q, kv, j0, i, seen, at, args, spec, BLOCK_KV)
    else:
        for j0 in tl.range(full_hi, hi, BLOCK_KV):
            state = masked_step(state, q, kv, j0, i, seen, at, args, spec, BLOCK_KV)
    return state


@triton.jit
def walk_both(state, q, kv, one, other, i, at, args, spec: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Steps over two intervals: the one that begins first, then what the other has beyond its blocks."""
    swap = other[0] < one[0]
    lo = tl.where(swap, other[0], one[0])
    full_lo = tl.where(swap, other[1], one[1])
    full_hi = tl.where(swap, other[2], one[2])
    hi = tl.where(swap, other[3], one[3])
    done = lo + count(lo, hi, BLOCK_KV) * BLOCK_KV
    lo_2 = tl.maximum(tl.where(swap, one[0], other[0]), done)
    full_lo_2 = tl.maximum(tl.where(swap, one[1], other[1]), lo_2)
    full_hi_2 = tl.maximum(tl.where(swap, one[2], other[2]), full_lo_2)
    hi_2 = tl.where(swap, one[3], other[3])
    if not spec.by_entry:
        first = count(full_lo, full_hi, BLOCK_KV)
        for n in tl.range(0, first + count(full_lo_2, full_hi_2, BLOCK_KV)):
            j0 = tl.where(n < first, full_lo + n * BLOCK_KV, full_lo_2 + (n - first) * BLOCK_KV)
            state = step(state, q, kv, j0, i, (0, 0), at, args, spec, BLOCK_KV, False)
    a = count(lo, full_lo, BLOCK_KV)
    b = a + count(full_hi, hi, BLOCK_KV)
    c = b + count(lo_2, full_lo_2, BLOCK_KV)
    for n in tl.range(0, c + count(full_hi_2, hi_2, BLOCK_KV)):
        j0 = tl.where(n < b, full_hi + (n - a) * BLOCK_KV, lo_2 + (n - b) * BLOCK_KV)
        j0 = tl.where(n < a, lo + n * BLOCK_KV, tl.where(n < c, j0, full_hi_2 + (n - c) * BLOCK_KV))
        state = masked_step(state, q, kv, j0, i, (0, 0), at, args, spec, BLOCK_KV)
    return state


@triton.jit
def sign_tile(tile, sign):
    """A tuple of tiles times 1, -1 or 0, in their own type."""
    signed = ((tile[0].to(tl.float32) * sign).to(tile[0].dtype),)
    if len(tile) == 2:
        signed = (signed[0], (tile[1].to(tl.float32) * sign).to(tile[1].dtype))
    return signed


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
            q_tile = sign_tile(q_tile, numbers.sign)
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
            head += b.to(tl.int64) * plain(seqs.heads_q)
        tl.store(lse + head * plain(seqs.seqlen_q) + (q_first + i), log_sum, mask=i < rows)
        out_base = row_base(out, b, q_first + i0, h)
        store_tile(out_base, row_offsets(out, r, spec), i < rows, result, spec, True)
