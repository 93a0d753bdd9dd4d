"""What runs before and after the backward's main kernel, row by row (plain Triton: both only move memory).

lse and delta lie in tiles of 64 rows, whole tiles for every sequence; dQ's accumulator in [32, 128] pieces, D / 64 for
every tile, each a [64, 64] block in the order of an MMA fragment (`backward_parts.fragment_order`).
"""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rows_of(offsets, lengths, batch, seqlen, heads, tiles, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(sequence, head, first token, length, first row in it, first row in the tiles) of this program's ROWS rows.

    Heads are innermost, so that programs of one time touch whole tokens, and the last rows come first; see docs/lab.
    Sequence b of a ragged batch starts at block offsets[b] // BLOCK + b of its head, see `backward_place.sequence_of`.
    """
    parts = tiles * 64 // ROWS
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head = number % heads
    sequence = number // heads // parts
    row = (number // heads - sequence * parts) * ROWS
    place = (sequence * heads + head).to(tl.int64) * tiles * 64 + row
    start = sequence * 0
    length = seqlen
    if offsets is not None:
        block = row // BLOCK
        low = sequence * 0
        high = low + batch
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(offsets + middle) // BLOCK + middle <= block:
                low = middle
            else:
                high = middle
        begin = tl.load(offsets + low)
        row -= (begin // BLOCK + low) * BLOCK
        start = tl.minimum(tl.maximum(begin, 0), seqlen)
        length = tl.minimum(tl.maximum(tl.load(offsets + low + 1), start), seqlen) - start
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), seqlen)
    return sequence, head, start, length, row, place


@triton.jit
def clear_tokens(x_ptr, first, end, units, share, shares, UNIT: tl.constexpr):
    """Zero tokens first .. end - 1 of x, each `units` pieces of UNIT elements; program `share` of `shares` its part."""
    BLOCK: tl.constexpr = 1024
    base = x_ptr + first.to(tl.int64) * units * UNIT
    count = (end - first).to(tl.int64) * units * UNIT
    for at in range(share.to(tl.int64) * BLOCK, count, shares.to(tl.int64) * BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(base + i, tl.zeros([BLOCK], x_ptr.dtype.element_ty), mask=i < count)


@triton.jit
def clear_gaps(x_ptr, offsets, lengths, sequence, batch, seqlen, units, share, shares, UNIT: tl.constexpr):
    """Zero the tokens of a gradient [.., seqlen, units * UNIT] that no sequence owns.

    They lie before the first offset and from the last one on, or from the length of a batch entry on.
    """
    if offsets is not None:
        first = tl.minimum(tl.maximum(tl.load(offsets), 0), seqlen)
        end = tl.minimum(tl.maximum(tl.load(offsets + batch), first), seqlen)
        clear_tokens(x_ptr, first * 0, first, units, share, shares, UNIT)
        clear_tokens(x_ptr, end, seqlen, units, share, shares, UNIT)
    else:
        end = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), seqlen)
        entry = x_ptr + sequence.to(tl.int64) * seqlen * units * UNIT
        clear_tokens(entry, end, seqlen, units, share, shares, UNIT)


@triton.jit(
    do_not_specialize=[
        "batch", "seqlen", "seqlen_kv", "heads", "tiles", "v_pieces", "dlse_b", "dlse_n", "dlse_h",
        "q_units", "k_units", "v_units", "o_b", "o_n", "o_h", "do_b", "do_n", "do_h",
    ]
)  # fmt: skip
def prepare_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, lse_tiles, delta_tiles, dq_pieces, offsets, lengths,
    dq_ptr, dk_ptr, dv_ptr, offsets_kv, lengths_kv, seqlen_kv, q_units, k_units, v_units,
    batch, seqlen, heads, tiles, v_pieces, o_b, o_n, o_h, do_b, do_n, do_h, dlse_b, dlse_n, dlse_h,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WITH_DQ: tl.constexpr,
    UNIT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dlse and lse in log2 units, padded to whole tiles; dQ's accumulator cleared.

    Rows that see nothing, and rows past the end, get lse = +inf, which makes every P = exp2(score - lse) zero.
    Of those of dq, dk and dv that are not None, the tokens that no sequence owns are cleared; see `clear_gaps`.
    A row of O is `v_pieces` times PIECE elements, C at most; strides of O and dO count pieces, and loads take one each.
    """
    sequence, head, start, length, first, place = rows_of(offsets, lengths, batch, seqlen, heads, tiles, BLOCK, ROWS)
    i = first + tl.arange(0, ROWS)
    there = i < length
    row = (start + i).to(tl.int64)
    b = sequence.to(tl.int64)
    h = head.to(tl.int64)
    lse = tl.load(lse_ptr + (b * heads + h) * seqlen + row, mask=there, other=float("-inf"))
    c = tl.arange(0, C)
    inside = there[:, None] & (c < v_pieces * PIECE)[None, :]
    o = tl.load(
        o_ptr + (b * o_b + h * o_h) * PIECE + row[:, None] * o_n * PIECE + c[None, :],  # [ROWS, C], needed only here
        mask=inside, other=0.0, eviction_policy="evict_first",
    )  # fmt: skip
    do = tl.load(
        do_ptr + (b * do_b + h * do_h) * PIECE + row[:, None] * do_n * PIECE + c[None, :],  # [ROWS, C]
        mask=inside, other=0.0,
    )  # fmt: skip
    if WITH_DQ:  # while the loads are under way; any part will do
        number = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
        pieces = dq_pieces + number * ROWS * D
        for column in tl.static_range(0, D, 64):
            zeros = tl.zeros([ROWS * 64], tl.float32)
            tl.store(pieces + ROWS * column + tl.arange(0, ROWS * 64), zeros, eviction_policy="evict_last")
    o = o.to(tl.float32)
    delta = tl.sum(o * tl.where(o == 0, 0.0, do.to(tl.float32)), 1)  # [ROWS]; what sees nothing ignores a NaN in dO
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + b * dlse_b + h * dlse_h + row * dlse_n, mask=there, other=0.0)
    seen = lse > float("-inf")
    at = place + tl.arange(0, ROWS)
    tl.store(lse_tiles + at, tl.where(seen, lse * LOG2E, float("inf")))
    tl.store(delta_tiles + at, tl.where(seen, delta, 0.0))
    shares = tiles * 64 // ROWS * heads
    share = tl.program_id(0) % shares
    if dq_ptr is not None:
        clear_gaps(dq_ptr, offsets, lengths, sequence, batch, seqlen, q_units, share, shares, UNIT)
    if dk_ptr is not None:
        clear_gaps(dk_ptr, offsets_kv, lengths_kv, sequence, batch, seqlen_kv, k_units, share, shares, UNIT)
    if dv_ptr is not None:
        clear_gaps(dv_ptr, offsets_kv, lengths_kv, sequence, batch, seqlen_kv, v_units, share, shares, UNIT)


@triton.jit(do_not_specialize=["batch", "seqlen", "heads", "tiles", "dim_pieces"])
def finish_kernel(
    dq_pieces, dq_ptr, offsets, lengths, batch, seqlen, heads, tiles, dim_pieces, scale,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """dQ = scale * accumulator, out of fragment order, in the type and layout [.., seqlen, heads, dim] of q.

    dim is `dim_pieces` times PIECE; C columns at a time.
    """
    sequence, head, start, length, first, place = rows_of(offsets, lengths, batch, seqlen, heads, tiles, BLOCK, ROWS)
    if first < length:
        T: tl.constexpr = ROWS // 64 if ROWS > 64 else 1
        W: tl.constexpr = ROWS // T // 16
        dim = dim_pieces * PIECE
        t = tl.arange(0, T)[:, None, None] * (64 * D)
        w = tl.arange(0, C // 64)[None, :, None] * 4096
        pieces = dq_pieces + place // 64 * 64 * D + place % 64 * 64 + t + w + tl.arange(0, W * 1024)[None, None, :]
        i = first + tl.arange(0, ROWS)
        row = (sequence.to(tl.int64) * seqlen + start + i) * heads + head
        for first_column in tl.static_range(0, D, C):
            x = tl.load(pieces + 64 * first_column)  # [T, C / 64, 64 W * 16]
            # tile, 64 columns, warp, 8 columns, row, lane, half, pair
            x = tl.reshape(x, [T, C // 64, W, 8, 8, 4, 2, 2])
            x = tl.permute(x, (0, 2, 6, 4, 1, 3, 5, 7))
            x = tl.reshape(x, [ROWS, C])
            c = first_column + tl.arange(0, C)
            inside = (i < length)[:, None] & (c < dim)[None, :]
            tl.store(dq_ptr + row[:, None] * dim + c[None, :], (x * scale).to(dq_ptr.dtype.element_ty), mask=inside)
