# pyright: basic, reportOperatorIssue=false
# Triton's compiler reads these functions, not Python: values are tensors of Triton, which carry no types here.
"""The decode kernels: FlashDecoding with grouped heads in one tile and parts of keys of equal length, then a merge."""

from __future__ import annotations

import triton
import triton.language as tl

from kilat.backends.triton.forward import count
from kilat.backends.triton.tiles import (
    clamp,
    dot_nn,
    dot_nt,
    key_span,
    load_tile,
    plain,
    query_span,
    row_base,
    scale_tile,
    store_tile,
    visible,
    zero_tile,
)
from kilat.backends.triton.tiles_decode import (
    find_part,
    places,
    shares,
    stored,
    token_scales,
    visits,
    widened,
    written_rows,
)
from kilat.backends.triton.tiles_scores import modify_scores

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def step(state, q, kv, j0, i, seen, at, args, spec: tl.constexpr, FORM: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys: (acc, m, l) after it; m is the largest s so far, l sums exp(s - m) and acc exp(s - m) v.

    kv: k, v, their bases, scale (with k's, if a head has one), scales. seen: (first, end) of the keys that an affine
    mask shows to some row.
    """
    acc, m, l = state
    k, v, k_base, v_base, scale, quantised, h_kv = kv
    seqs, mask, scores, numbers = args
    j = j0 + tl.arange(0, FORM.block_kv)
    live = j < at[4]
    if MASKED:
        shown = visible(mask, numbers, i[:, None], j[None, :], at, spec)  # [block_rows, block_kv]
        if spec.by_entry or spec.intervals > 0:
            live = live & (tl.max(shown.to(tl.int32), 0) > 0)
        else:
            live = live & (j >= seen[0]) & (j < seen[1])
    if FORM.page == 0:
        at_j = j0
    else:
        at_j = places(seqs, at[0], j, live, FORM.page, MASKED)
    k_stored = stored(k, k_base, at_j, live, spec, False, FORM.page, MASKED)  # [block_kv, head_dim]
    k_tile = widened(k_stored, FORM, q[0].dtype)
    s = dot_nt(q, k_tile, spec)  # [block_rows, block_kv]
    if spec.scaling == "s":
        s = s * scale
    if FORM.k_by_token:
        s = s * token_scales(quantised.k, at[0], h_kv, at_j, live, FORM.page, MASKED)[None, :]
    s = modify_scores(s, scores, numbers, i[:, None], j[None, :], at, spec, len(spec.users))
    if MASKED:
        s = tl.where(shown, s, float("-inf"))
    if FORM.shared:
        v_tile = (k_tile[0],)
        if len(spec.pieces_v) == 2:
            v_tile = k_tile
    else:
        v_stored = stored(v, v_base, at_j, live, spec, True, FORM.page, MASKED)  # [block_kv, head_dim_v]
        v_tile = widened(v_stored, FORM, q[0].dtype)
    m_new = tl.maximum(m, tl.max(s, 1))  # [block_rows]
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet: no inf - inf
    p = tl.exp2((s - shift[:, None]) * LOG2E)  # [block_rows, block_kv]
    alpha = tl.exp2((m - shift) * LOG2E)  # [block_rows]
    l = l * alpha + tl.sum(p, 1)
    if FORM.v_by_token:
        p = p * token_scales(quantised.v, at[0], h_kv, at_j, live, FORM.page, MASKED)[None, :]
    acc = dot_nn(p.to(q[0].dtype), v_tile, scale_tile(acc, alpha), spec)
    return acc, m_new, l


@triton.jit
def walk(state, q, kv, blocks, part, i, at, args, spec: tl.constexpr, FORM: tl.constexpr):
    """Steps over the blocks of keys of one part: the middle without mask instructions, then both ends.

    part: (first, end) of the positions in `visits`.
    """
    visited, interval = blocks
    lo, n, lo_2, _ = visited
    _, full_lo, full_hi, hi, seen_lo = interval
    BLOCK_KV: tl.constexpr = FORM.block_kv
    seen = (seen_lo, hi)
    if spec.by_entry or spec.intervals == 2:
        for t in tl.range(part[0], part[1]):
            j0 = tl.where(t < n, lo + t * BLOCK_KV, lo_2 + (t - n) * BLOCK_KV)
            state = step(state, q, kv, j0, i, seen, at, args, spec, FORM, True)
    else:
        start = lo + part[0] * BLOCK_KV
        stop = tl.minimum(lo + part[1] * BLOCK_KV, hi)
        full_lo = clamp(full_lo, start, tl.maximum(stop, start))
        full_hi = tl.minimum(full_hi, lo + part[1] * BLOCK_KV)
        empty = full_hi <= full_lo
        full_lo = tl.where(empty, start, full_lo)
        full_hi = tl.where(empty, start, full_hi)
        for j0 in tl.range(full_lo, full_hi, BLOCK_KV):
            state = step(state, q, kv, j0, i, seen, at, args, spec, FORM, False)
        left = count(start, full_lo, BLOCK_KV)
        for t in tl.range(0, left + count(full_hi, stop, BLOCK_KV), num_stages=1):
            j0 = tl.where(t < left, start + t * BLOCK_KV, full_hi + (t - left) * BLOCK_KV)
            state = step(state, q, kv, j0, i, seen, at, args, spec, FORM, True)
    return state


@triton.jit
def add_sink(m, l, sink, h):
    """(m, l, factor of what was summed): exp(sink) joins a sum l of exp(s - m)."""
    extra = tl.load(sink + h).to(tl.float32)
    peak = tl.maximum(m, extra)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    alpha = tl.exp2((m - shift) * LOG2E)
    return peak, l * alpha + tl.exp2((extra - shift) * LOG2E), alpha


@triton.jit(do_not_specialize=["seqs", "numbers", "split"])
def decode_kernel(
    q,
    k,
    v,
    out,
    lse,
    quantised,
    parts,
    split,
    seqs,
    mask,
    scores,
    numbers,
    sink,
    spec: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORM: tl.constexpr,
):
    """One part of the keys of a tile of rows: out and lse if it is the only one, else a slot of `parts`.

    Grid: `decode_launch.Shape.per_head` times heads_kv; BATCH > batch; COLUMNS = sum(pieces_v); FORM: `arguments.Form`.
    """
    heads_kv = plain(seqs.heads_q) // seqs.group
    h_kv = tl.program_id(0) % heads_kv
    number = tl.program_id(0) // heads_kv
    programs, parts_of, end = shares(seqs, mask, numbers, split, spec, BLOCK_ROWS, FORM.block_kv, BATCH)
    if number < tl.max(end, 0):
        b, first_slot, of_tile, tile, part = find_part(number, programs, parts_of, end)
        q_first, q_len = query_span(seqs, b)
        kv_first, kv_len = key_span(seqs, b)
        first_row = tile * BLOCK_ROWS
        r = first_row + tl.arange(0, BLOCK_ROWS)  # [block_rows]
        i = r // seqs.group
        h = h_kv * seqs.group + r % seqs.group
        at = (b, h[:, None], q_first, q_len, kv_len)
        token = (q_first + i).to(tl.int64)
        q_tile = load_tile(
            row_base(q, b, b * 0, b * 0), token * q.row + h.to(tl.int64) * q.head, i < q_len, spec, False, True
        )
        scale = numbers.scale
        v_scale = 1.0
        if quantised.k is not None and not FORM.k_by_token:
            scale = scale * tl.load(quantised.k.ptr + h_kv * quantised.k.head)
        if quantised.v is not None and not FORM.v_by_token:
            v_scale = tl.load(quantised.v.ptr + h_kv * quantised.v.head)
        if spec.scaling == "q":  # float32
            q_tile = scale_tile(q_tile, tl.full([BLOCK_ROWS], 1.0, tl.float32) * scale)
        b_stored = b * 0 if FORM.page > 0 else b  # pages belong to no sequence
        k_base = row_base(k, b_stored, kv_first, h_kv)
        v_base = row_base(v, b_stored, kv_first, h_kv)
        kv = (k, v, k_base, v_base, scale, quantised, h_kv)
        i_last = tl.minimum((first_row + BLOCK_ROWS - 1) // seqs.group, q_len - 1)
        blocks = visits(mask, numbers, first_row // seqs.group, i_last, at, spec, FORM.block_kv)
        steps = blocks[0][1] + blocks[0][3]
        share = (steps + of_tile - 1) // of_tile
        mine = (tl.minimum(part * share, steps), tl.minimum((part + 1) * share, steps))
        m = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        state = (zero_tile(BLOCK_ROWS, spec, True), m, tl.zeros([BLOCK_ROWS], tl.float32))
        args = (seqs, mask, scores, numbers)
        acc, m, l = walk(state, q_tile, kv, blocks, mine, i, at, args, spec, FORM)
        if of_tile == 1:
            if sink is not None:
                m, l, alpha = add_sink(m, l, sink, h)
                acc = scale_tile(acc, alpha)
            empty = (l == 0.0) | (i >= q_len)  # not m = -inf: scores may be NaN
            total = tl.where(empty, 1.0, l)
            acc = scale_tile(acc, tl.where(i < q_len, v_scale / total, 0.0))
            log_sum = tl.where(empty, float("-inf"), m + tl.log2(total) * LN2)
            written = i < written_rows(seqs, b, q_first, q_len)
            store_tile(
                row_base(out, b, b * 0, b * 0), token * out.row + h.to(tl.int64) * out.head, written, acc, spec, True
            )
            head = h.to(tl.int64)
            if seqs.cu_q is None:
                head += b.to(tl.int64) * plain(seqs.heads_q)
            tl.store(lse + head * plain(seqs.seqlen_q) + token, log_sum, mask=written)
        if parts.out is not None:
            if (number == first_slot) & (h_kv == 0):
                tl.store(parts.table + 2 * b, first_slot)
                tl.store(parts.table + 2 * b + 1, of_tile)
            if of_tile > 1:
                total = tl.where(l == 0.0, 1.0, l)
                acc = scale_tile(acc, v_scale / total)
                slot = tl.program_id(0).to(tl.int64) * plain(parts.rows) + tl.arange(0, BLOCK_ROWS)
                written = i < q_len
                for n in tl.static_range(len(spec.pieces_v)):
                    column = spec.pieces_v[0] * n + tl.arange(0, spec.pieces_v[n])[None, :]
                    tl.store(parts.out + slot[:, None] * COLUMNS + column, acc[n], mask=written[:, None])
                log_sum = tl.where(l == 0.0, float("-inf"), m + tl.log2(total) * LN2)
                tl.store(parts.lse + slot, log_sum, mask=written)


@triton.jit
def owner(seqs, token):
    """(b, i): the sequence of a token of a ragged q, and its number there; b = batch if none owns it."""
    low = token * 0
    high = low + plain(seqs.batch)
    while low < high:  # the last b that does not begin after the token
        middle = (low + high + 1) // 2
        if tl.load(seqs.cu_q + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low, token - clamp(tl.load(seqs.cu_q + low), 0, plain(seqs.seqlen_q))


@triton.jit(do_not_specialize=["seqs"])
def merge_kernel(
    out,
    lse,
    parts,
    seqs,
    sink,
    spec: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """out and lse of one row whose keys were cut into parts: a float32 mean weighted by exp(lse), in their order.

    Grid: tokens times heads_q. Rows of one part are there already. CHUNK parts are summed at a time, however many there
    are, so that a row's bits follow from its own parts. COLUMNS of `parts`; WIDTH, a power of two, >= head_dim_v.
    """
    token = tl.program_id(0) // plain(seqs.heads_q)
    h = tl.program_id(0) % plain(seqs.heads_q)
    if seqs.cu_q is not None:
        b, i = owner(seqs, token)
        row = token.to(tl.int64)
        head = h.to(tl.int64)
        out_row = out.ptr + row * out.row + head * out.head
    else:
        b = token // plain(seqs.seqlen_q)
        i = token % plain(seqs.seqlen_q)
        row = i.to(tl.int64)
        head = b.to(tl.int64) * plain(seqs.heads_q) + h
        out_row = row_base(out, b, i, h)
    slots = plain(parts.slots)
    of_tile = clamp(tl.load(parts.table + 2 * b + 1), 0, slots)
    if of_tile > 1:
        r = i * seqs.group + h % seqs.group
        heads_kv = plain(seqs.heads_q) // seqs.group
        first = tl.load(parts.table + 2 * b) + r // BLOCK_ROWS * of_tile
        n = tl.arange(0, CHUNK)
        top = tl.full([CHUNK], float("-inf"), tl.float32)
        for start in tl.range(0, of_tile, CHUNK):
            slot = (first + start + n) * heads_kv + h // seqs.group
            live = (start + n < of_tile) & (slot >= 0) & (slot < slots)
            where = slot.to(tl.int64) * plain(parts.rows) + r % BLOCK_ROWS
            top = tl.maximum(top, tl.load(parts.lse + where, mask=live, other=float("-inf")))
        m = tl.max(top, 0)
        shift = tl.where(m == float("-inf"), 0.0, m)
        column = tl.arange(0, WIDTH)
        acc = tl.zeros([WIDTH], tl.float32)
        l = tl.zeros([CHUNK], tl.float32)
        for start in tl.range(0, of_tile, CHUNK):
            slot = (first + start + n) * heads_kv + h // seqs.group
            live = (start + n < of_tile) & (slot >= 0) & (slot < slots)
            where = slot.to(tl.int64) * plain(parts.rows) + r % BLOCK_ROWS
            weight = tl.exp2((tl.load(parts.lse + where, mask=live, other=float("-inf")) - shift) * LOG2E)
            shown = (weight > 0.0)[:, None] & (column[None, :] < spec.head_dim_v)
            part = tl.load(parts.out + where[:, None] * COLUMNS + column[None, :], mask=shown, other=0.0)
            acc += tl.sum(part * weight[:, None], 0)
            l += weight
        l = tl.sum(l, 0)
        if sink is not None:
            m, l, alpha = add_sink(m, l, sink, h)
            acc = acc * alpha
        empty = l == 0.0
        total = tl.where(empty, 1.0, l)
        result = (acc / total).to(out.ptr.dtype.element_ty)
        tl.store(out_row + column, result, mask=column < spec.head_dim_v)
        tl.store(lse + head * plain(seqs.seqlen_q) + row, tl.where(empty, m, m + tl.log2(total) * LN2))
