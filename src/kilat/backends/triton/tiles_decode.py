# pyright: basic, reportOperatorIssue=false
# Triton's compiler reads these functions, not Python: values are tensors of Triton, which carry no types here.
"""Tile functions of the decode kernel: which program does which part of which keys, and keys as they are stored.

A tile has BLOCK_ROWS rows of one sequence and one kv head: row r is query r // group of head r % group of the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kilat.backends.triton.forward import count, key_blocks
from kilat.backends.triton.tiles import clamp, key_span, load_tile, plain, query_span, row_offsets


# ---- who does what ---------------------------------------------------------------------------------------------------
@triton.jit
def written_rows(seqs, b, q_first, q_len):
    """How many queries of sequence b are written; those beyond q_len, or of no sequence (b = batch), hold nothing."""
    if seqs.cu_q is not None:
        return tl.where(b < plain(seqs.batch), q_len, plain(seqs.seqlen_q) - q_first)
    else:
        return tl.where(b < plain(seqs.batch), plain(seqs.seqlen_q), 0)


@triton.jit
def visits(mask, numbers, i_first, i_last, at, spec: tl.constexpr, BLOCK_KV: tl.constexpr):
    """((lo, n, lo_2, n_2), key_blocks of interval 0): the blocks that queries i_first to i_last visit, each once.

    Those are n blocks from key lo on, and n_2 from key lo_2 on.
    """
    one = key_blocks(mask, numbers, i_first, i_last, at, spec, BLOCK_KV, 0)
    lo = one[0]
    n = count(lo, one[3], BLOCK_KV)
    lo_2 = lo
    n_2 = n * 0
    if spec.intervals == 2:
        other = key_blocks(mask, numbers, i_first, i_last, at, spec, BLOCK_KV, 1)
        swap = other[0] < lo
        n = tl.where(swap, count(other[0], other[3], BLOCK_KV), n)
        lo = tl.where(swap, other[0], lo)
        lo_2 = tl.maximum(tl.where(swap, one[0], other[0]), lo + n * BLOCK_KV)
        n_2 = count(lo_2, tl.where(swap, one[3], other[3]), BLOCK_KV)
    return (lo, n, lo_2, n_2), one


@triton.jit
def shares(seqs, mask, numbers, split, spec: tl.constexpr, ROWS: tl.constexpr, BLOCK_KV: tl.constexpr, B: tl.constexpr):
    """(programs, parts, end) of sequences 0 to B - 1, int32 [B]; sequence `batch` is what no sequence owns.

    A tile's keys are cut into `parts`; `programs` is tiles times parts, for each kv head, and `end` its running sum.
    Parts are as long as all programs together make them (Lean attention, arXiv 2405.10480), but in [least, ...) blocks
    and not more than `most` a tile: with split.programs out of reach, a sequence's parts depend on that sequence alone.
    """
    n = tl.arange(0, B)
    b = tl.minimum(n, plain(seqs.batch))
    q_first, q_len = query_span(seqs, b)
    _, kv_len = key_span(seqs, b)
    rows = tl.where(n <= plain(seqs.batch), written_rows(seqs, b, q_first, q_len), 0)
    tiles = (rows * seqs.group + ROWS - 1) // ROWS
    visited, _ = visits(mask, numbers, b * 0, q_len - 1, (b, b, q_first, q_len, kv_len), spec, BLOCK_KV)
    steps = visited[1] + visited[3]
    total = tl.sum(tiles.to(tl.int64) * steps, 0) * (plain(seqs.heads_q) // seqs.group)
    share = clamp((total + plain(split.programs) - 1) // plain(split.programs), plain(split.least), 1073741824)
    share = tl.maximum(share.to(tl.int32), (steps + plain(split.most) - 1) // plain(split.most))
    parts = tl.maximum((steps + share - 1) // share, 1)
    programs = tiles * parts
    return programs, parts, tl.cumsum(programs, 0)


@triton.jit
def find_part(number, programs, parts, end):
    """(b, first row tile's slot, parts of a tile, tile, part) of program `number` of a kv head; see `shares`."""
    b = tl.sum((end <= number).to(tl.int32), 0)
    here = tl.arange(0, end.shape[0]) == b
    first = tl.sum(tl.where(here, end - programs, 0), 0)
    of_tile = tl.maximum(tl.sum(tl.where(here, parts, 0), 0), 1)
    return b, first, of_tile, (number - first) // of_tile, (number - first) % of_tile


# ---- keys ------------------------------------------------------------------------------------------------------------
@triton.jit
def places(seqs, b, j, live, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """(page, row in it) of keys j [block_kv]; PAGE: the size of a page, 1 stands for one that is not compiled in."""
    entries = seqs.page_table + b.to(tl.int64) * plain(seqs.page_table_batch)
    size = PAGE if PAGE > 1 else plain(seqs.page_size)
    if MASKED:
        page = tl.load(entries + j // size, mask=live, other=0)
    else:
        page = tl.load(entries + j // size)
    return clamp(page, 0, plain(seqs.num_pages) - 1).to(tl.int64), j % size


@triton.jit
def stored(x, base, at_j, live, spec: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Rows of K (or V) as they are stored: a tuple of [block_kv, piece]; with MASKED those not live are 0.

    at_j: the first key, or for pages their `places`.
    """
    if PAGE == 0:
        r = tl.arange(0, live.shape[0])
        return load_tile(base + at_j.to(tl.int64) * x.row, row_offsets(x, r, spec), live, spec, VALUES, MASKED)
    else:
        return load_tile(base, at_j[0] * x.batch + at_j[1].to(tl.int64) * x.row, live, spec, VALUES, MASKED)


@triton.jit
def token_scales(x, b, h, at_j, live, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """The scales of a block of keys [block_kv], 0 where not live."""
    if PAGE == 0:
        where = b.to(tl.int64) * x.batch + (at_j + tl.arange(0, live.shape[0])).to(tl.int64) * x.row
    else:
        where = at_j[0] * x.batch + at_j[1].to(tl.int64) * x.row
    if MASKED:
        return tl.load(x.ptr + h.to(tl.int64) * x.head + where, mask=live, other=0.0)
    else:
        return tl.load(x.ptr + h.to(tl.int64) * x.head + where)


@triton.jit
def number_of(x, FORM: tl.constexpr):
    """The numbers that stored bytes stand for; all of them are exact in every type of q."""
    if FORM.stored == "e4m3":
        return x.to(tl.float8e4nv, bitcast=True)
    elif (
        FORM.stored == "e4m3 bits"
    ):  # where the GPU knows no such type: exponent and mantissa moved, the bias by a product
        bits = x.to(tl.uint32)
        size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120
        size = tl.where((bits & 0x7F) == 0x7F, float("nan"), size)
        return tl.where(bits >= 0x80, -size, size)
    else:
        return x.to(tl.float32)


@triton.jit
def widened(tile, FORM: tl.constexpr, like):
    """A tuple of tiles in the type `like`."""
    if FORM.stored == "":
        return tile
    else:
        wide = (number_of(tile[0], FORM).to(like),)
        if len(tile) == 2:
            wide = (wide[0], number_of(tile[1], FORM).to(like))
        return wide
