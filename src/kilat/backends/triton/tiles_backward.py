# pyright: basic, reportOperatorIssue=false
# Triton's compiler reads these functions, not Python: values are tensors of Triton, which carry no types here.
"""Tile functions of the backward: which blocks to visit, P and dS of a tile; indices and `at` as in tiles.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kilat.backends.triton.tiles import clamp, find_tile, key_span, plain, query_span
from kilat.backends.triton.tiles_scores import kept, modify_scores, score_gradient

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_tile(seqs, BLOCK: tl.constexpr):
    """(b, kv head, j0, kv_first, kv_len, rows, q_first, q_len) of a program that owns BLOCK keys of one kv head.

    Grid: `backward_launch.key_tiles`. Rows j0 to j0 + BLOCK below `rows` are the program's to write, see `query_tile`.
    """
    pid = tl.program_id(0)
    heads = plain(seqs.heads_q) // seqs.group
    if seqs.cu_kv is not None:
        tiles = plain(seqs.seqlen_kv) // BLOCK + plain(seqs.batch) + 1
        h = pid // tiles
        b, tile = find_tile(seqs.cu_kv, plain(seqs.batch), pid % tiles, BLOCK)
        kv_first, kv_len = key_span(seqs, b)
        rows = tl.where(b < plain(seqs.batch), kv_len, plain(seqs.seqlen_kv) - kv_first)
    else:
        tiles = (plain(seqs.seqlen_kv) + BLOCK - 1) // BLOCK
        head = pid // tiles
        h = head % heads
        b = head // heads
        tile = pid % tiles
        kv_first, kv_len = key_span(seqs, b)
        rows = kv_len * 0 + plain(seqs.seqlen_kv)
    q_first, q_len = query_span(seqs, b)
    return b, h, tile * BLOCK, kv_first, kv_len, rows, q_first, q_len


# ---- which blocks ----------------------------------------------------------------------------------------------------
@triton.jit
def count_below(values, n, limit):
    """How many of the first n entries at `values`, which never decrease, are below `limit`."""
    low = n * 0
    high = low + n
    while low < high:
        middle = (low + high) // 2
        if tl.load(values + middle) < limit:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def query_ranges(mask, numbers, j_first, j_last, at, spec: tl.constexpr, N: tl.constexpr):
    """(visit_start, full_start, full_stop, visit_stop) of interval N for keys j_first to j_last, in queries.

    The transpose of `key_ranges`. Query i sees key j iff start[i] <= j < stop[i], and neither decreases: those that see
    a key lie from the number of stops <= j to the number of starts <= j.
    """
    b, _, q_first, q_len, kv_len = at
    if spec.intervals == 0:
        offset = kv_len - q_len  # of q_pos to i
        visit_start = q_len * 0
        full_start = q_len * 0
        full_stop = q_len
        visit_stop = q_len
        if spec.left:
            full_stop = tl.minimum(j_first - offset + plain(numbers.left) + 1, full_stop)
            visit_stop = tl.minimum(j_last - offset + plain(numbers.left) + 1, visit_stop)
        if spec.right:
            visit_start = tl.maximum(j_first - offset - plain(numbers.right), visit_start)
            full_start = tl.maximum(j_last - offset - plain(numbers.right), full_start)
        if spec.right_top_left:
            visit_start = tl.maximum(j_first - plain(numbers.right_top_left), visit_start)
            full_start = tl.maximum(j_last - plain(numbers.right_top_left), full_start)
    else:
        starts = mask.bounds + b.to(tl.int64) * plain(mask.bounds_batch) + q_first
        starts += tl.cast(2 * N, tl.int64) * plain(mask.bounds_rows)
        stops = starts + plain(mask.bounds_rows)
        visit_start = count_below(stops, q_len, j_first + 1)
        full_start = count_below(stops, q_len, j_last + 1)
        full_stop = count_below(starts, q_len, j_first + 1)
        visit_stop = count_below(starts, q_len, j_last + 1)
    return visit_start, full_start, full_stop, visit_stop


@triton.jit
def whole_blocks(ranges, length, spec: tl.constexpr, BLOCK: tl.constexpr):
    """(lo, full_lo, full_hi, hi): blocks lo to hi have all of the visited range, full_lo to full_hi need no mask.

    A block that reaches beyond `length` needs one.
    """
    visit_start, full_start, full_stop, visit_stop = ranges
    stop = tl.minimum(visit_stop, length)
    lo = tl.maximum(visit_start, 0) // BLOCK
    hi = tl.where(stop > visit_start, tl.maximum((stop + BLOCK - 1) // BLOCK, lo), lo)
    if spec.by_entry:
        return lo, lo, lo, hi
    else:
        full_lo = clamp((tl.maximum(full_start, 0) + BLOCK - 1) // BLOCK, lo, hi)
        full_hi = clamp(tl.minimum(full_stop, length) // BLOCK, full_lo, hi)
        return lo, full_lo, full_hi, hi


@triton.jit
def one_plan(blocks):
    """(lo, n, lo, visited, first_full, full) of one interval; see `two_plans`."""
    lo, full_lo, full_hi, hi = blocks
    return lo, hi - lo, lo, hi - lo, full_lo - lo, full_hi - full_lo


@triton.jit
def two_plans(one, other):
    """(lo, n, lo_2, visited, first_full, full): what two intervals visit, each block once.

    Position p of `visited` ones is block lo + p, from p = n on lo_2 + p - n. Positions first_full to first_full + full
    need no mask: those of the interval that has more of them.
    """
    swap = other[0] < one[0]
    lo = tl.where(swap, other[0], one[0])
    full_lo = tl.where(swap, other[1], one[1])
    full_hi = tl.where(swap, other[2], one[2])
    hi = tl.where(swap, other[3], one[3])
    lo_2 = tl.maximum(tl.where(swap, one[0], other[0]), hi)
    hi_2 = tl.maximum(tl.where(swap, one[3], other[3]), lo_2)
    full_lo_2 = clamp(tl.where(swap, one[1], other[1]), lo_2, hi_2)
    full_hi_2 = clamp(tl.where(swap, one[2], other[2]), full_lo_2, hi_2)
    n = hi - lo
    second = full_hi_2 - full_lo_2 > full_hi - full_lo
    first_full = tl.where(second, n + full_lo_2 - lo_2, full_lo - lo)
    full = tl.where(second, full_hi_2 - full_lo_2, full_hi - full_lo)
    return lo, n, lo_2, n + hi_2 - lo_2, first_full, full


@triton.jit
def full_block(plan, t):
    """Number t of the blocks that need no mask."""
    lo, n, lo_2, _, first_full, _ = plan
    p = first_full + t
    return tl.where(p < n, lo + p, lo_2 + p - n)


@triton.jit
def masked_block(plan, t):
    """Number t of the other blocks, from 0 to visited - full."""
    lo, n, lo_2, _, first_full, full = plan
    p = tl.where(t < first_full, t, t + full)
    return tl.where(p < n, lo + p, lo_2 + p - n)


@triton.jit
def any_shown(shown):
    """Whether a tile has a visible pair."""
    return tl.max(tl.max(shown.to(tl.int32), 1), 0) > 0


# ---- P and dS --------------------------------------------------------------------------------------------------------
@triton.jit
def kept_tile(i, j, j0, at, args, spec: tl.constexpr, BLOCK_KV: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Which probabilities dropout keeps, bool [block_q, BLOCK_KV] or its transpose; i [block_q]."""
    keep = kept(args[3], args[4], i[:, None], j0, at, args[0], spec, BLOCK_KV)
    if TRANSPOSED:
        keep = tl.trans(keep)
    return keep


@triton.jit
def scaled(s, numbers, spec: tl.constexpr):
    """scale q k^T from the product of tiles; in float32 one of the tiles has been scaled before."""
    if spec.scaling != "q":
        s = s * numbers.scale
    return s


@triton.jit
def gradients(
    s, dp, lse, delta, shown, keep, i, j, at, args, spec: tl.constexpr, MASKED: tl.constexpr, STAGE: tl.constexpr
):
    """(P keep / (1 - p), dS) of a tile, from scale q k^T and do v^T; lse (inf: no P) and delta of i's shape.

    P = exp(s - lse), dP = keep / (1 - p) do v^T, dS = P (dP - delta), then through the score modifiers back to before
    softcap (STAGE = -1) or to before user function STAGE. Where MASKED, hidden pairs have P = dS = 0. `keep` is unused
    without dropout.
    """
    _, _, scores, _, numbers = args
    z = modify_scores(s, scores, numbers, i, j, at, spec, len(spec.users))
    p = tl.exp2((z - lse) * LOG2E)  # not z * LOG2E: in log2 units the largest score might not fit
    if scores.bias is not None or len(spec.users) > 0:  # -inf hides, and derivatives there may be NaN
        if MASKED:
            shown = shown & (z != float("-inf"))
        else:
            shown = z != float("-inf")
    if MASKED or scores.bias is not None or len(spec.users) > 0:
        p = tl.where(shown, p, 0.0)
    pv = p
    if spec.dropout != "":
        pv = tl.where(keep, p * numbers.keep_scale, 0.0)
        dp = tl.where(keep, dp * numbers.keep_scale, 0.0)
    ds = p * (dp - delta)
    for n in tl.static_range(len(spec.users)):
        if len(spec.users) - 1 - n >= STAGE:
            ds = score_gradient(ds, s, scores, numbers, i, j, at, spec, len(spec.users) - 1 - n)
    if STAGE < 0:
        ds = score_gradient(ds, s, scores, numbers, i, j, at, spec, -1)
    if MASKED or scores.bias is not None or len(spec.users) > 0:
        ds = tl.where(shown, ds, 0.0)
    return pv, ds


@triton.jit
def load_row_values(values, b, h, q_first, i, live, seqs, other):
    """values[b, h, i] of float32 [batch, heads, seqlen_q], or [heads, total_q] at q_first + i."""
    head = h.to(tl.int64)
    if seqs.cu_q is None:
        head += b.to(tl.int64) * plain(seqs.heads_q)
    return tl.load(values + head * plain(seqs.seqlen_q) + (q_first + i), mask=live, other=other)


@triton.jit
def load_statistics(lse, delta, i, live, at, seqs):
    """(lse, delta) of queries i, of i's shape; rows without P (not live, or seeing nothing) have lse = inf."""
    b, h, q_first, _, _ = at
    log_sum = load_row_values(lse, b, h, q_first, i, live, seqs, float("-inf"))
    log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum)
    return log_sum, load_row_values(delta, b, h, q_first, i, live, seqs, 0.0)
