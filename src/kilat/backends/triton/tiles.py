# pyright: basic, reportOperatorIssue=false
# Triton's compiler reads these functions, not Python: values are tensors of Triton, which carry no types here.
"""Tile functions that forward and backward share: sequences, rows in memory, visibility, products.

Indices i (queries) and j (keys) count inside a sequence, are int32, and may have any shapes that broadcast: [block_q,
1] and [1, block_kv] for a tile of scores, [1, block_q] and [block_kv, 1] for its transpose. `at` is the tuple
(b, h, q_first, q_len, kv_len) of scalars: batch entry, query head, first row of the sequence in a ragged q (0 in a
dense one), lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plain(number):
    """The int32 behind a number that `adapt.opaque` made."""
    return ((number >> 4) - 1099511627776).to(tl.int32)


# ---- sequences -------------------------------------------------------------------------------------------------------
@triton.jit
def clamp(x, low, high):
    """x, at least low and then at most high."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def span(offsets, lengths, b, batch, rows):
    """(first row, length) of sequence b in a tensor of `rows` rows; length 0 for b = batch, the end of all sequences.

    Never outside the tensor, whatever lengths and offsets (None: there are none) hold.
    """
    owned = b < batch
    if offsets is not None:
        first = clamp(tl.load(offsets + b), 0, rows)
        length = clamp(tl.load(offsets + b + 1, mask=owned, other=0), first, rows) - first
    else:
        first = b * 0
        length = tl.where(owned, rows, 0)
    if lengths is not None:
        length = clamp(tl.load(lengths + b, mask=owned, other=0), 0, length)
    return first, length


@triton.jit
def query_span(seqs, b):
    """(first row, length) of sequence b's queries; see `span`."""
    first, length = span(seqs.cu_q, seqs.len_q, b, plain(seqs.batch), plain(seqs.seqlen_q))
    return first, length


@triton.jit
def key_span(seqs, b):
    """(first row, length) of sequence b's keys."""
    first, length = span(seqs.cu_kv, seqs.len_kv, b, plain(seqs.batch), plain(seqs.seqlen_kv))
    return first, length


@triton.jit
def find_tile(offsets, batch, tile, BLOCK: tl.constexpr):
    """(sequence, number of the tile in it) of a tile of a ragged tensor; sequence `batch` is what no sequence owns.

    Sequence b begins with tile number offsets[b] // BLOCK + b: each then has room for its own, short last ones
    included, and total // BLOCK + batch + 1 tiles are enough for all.
    """
    low = batch * 0
    high = low + batch
    while low < high:  # the last b whose first tile is not after `tile`
        middle = (low + high + 1) // 2
        if tl.load(offsets + middle) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low, tile - (tl.load(offsets + low) // BLOCK + low)


@triton.jit
def query_tile(seqs, BLOCK: tl.constexpr):
    """(b, h, i0, q_first, q_len, rows, kv_first, kv_len) of a program that owns BLOCK queries of one head.

    Grid: `adapt.query_tiles`. Rows i0 to i0 + BLOCK below `rows` are the program's to write; those from q_len on are
    padding, or tokens that no sequence owns. Tiles of one head are neighbours, and late queries come first, since with
    a causal mask they have most to do.
    """
    pid = tl.program_id(0)
    if seqs.cu_q is not None:
        tiles = plain(seqs.seqlen_q) // BLOCK + plain(seqs.batch) + 1
        h = pid // tiles
        b, tile = find_tile(seqs.cu_q, plain(seqs.batch), tiles - 1 - pid % tiles, BLOCK)
        q_first, q_len = query_span(seqs, b)
        rows = tl.where(b < plain(seqs.batch), q_len, plain(seqs.seqlen_q) - q_first)
    else:
        tiles = (plain(seqs.seqlen_q) + BLOCK - 1) // BLOCK
        head = pid // tiles
        h = head % plain(seqs.heads_q)
        b = head // plain(seqs.heads_q)
        tile = tiles - 1 - pid % tiles
        q_first, q_len = query_span(seqs, b)
        rows = q_len * 0 + plain(seqs.seqlen_q)
    kv_first, kv_len = key_span(seqs, b)
    return b, h, tile * BLOCK, q_first, q_len, rows, kv_first, kv_len


# ---- rows in memory --------------------------------------------------------------------------------------------------
@triton.jit
def row_base(x, b, first, h):
    """Pointer to row `first` of batch entry b and head h."""
    return x.ptr + b.to(tl.int64) * x.batch + first.to(tl.int64) * x.row + h.to(tl.int64) * x.head


@triton.jit
def row_offsets(x, r, spec: tl.constexpr):
    """Elements from row 0 to the rows r, a few (a tile's); int64 where a tile may span 2^31 elements."""
    if spec.wide:
        return r.to(tl.int64) * x.row
    else:
        return r * x.row


@triton.jit
def page_offsets(x, seqs, b, j, live):
    """Elements from the tensor's start to the rows of keys j in pages; keys that are not live lie anywhere inside."""
    entry = seqs.page_table + b.to(tl.int64) * plain(seqs.page_table_batch) + j // plain(seqs.page_size)
    page = clamp(tl.load(entry, mask=live, other=0), 0, plain(seqs.num_pages) - 1)
    return page.to(tl.int64) * x.batch + (j % plain(seqs.page_size)).to(tl.int64) * x.row


@triton.jit
def load_piece(base, offsets, live, FIRST: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Columns FIRST to FIRST + SIZE of rows at base + offsets [rows]: [rows, SIZE], 0 beyond DIM.

    With MASKED rows that are not live [rows] are not read, and 0.
    """
    column = FIRST + tl.arange(0, SIZE)[None, :]  # [1, SIZE]
    where = base + offsets[:, None] + column  # [rows, SIZE]
    if FIRST + SIZE > DIM:
        if MASKED:
            return tl.load(where, mask=live[:, None] & (column < DIM), other=0.0)
        else:
            return tl.load(where, mask=column < DIM, other=0.0)
    else:
        if MASKED:
            return tl.load(where, mask=live[:, None], other=0.0)
        else:
            return tl.load(where)


@triton.jit
def load_tile(base, offsets, live, spec: tl.constexpr, VALUES: tl.constexpr, MASKED: tl.constexpr):
    """All columns of rows of q or k (VALUES: of v): a tuple of [rows, piece]; see `load_piece` and `Spec.pieces`."""
    DIM: tl.constexpr = spec.head_dim_v if VALUES else spec.head_dim
    PIECES: tl.constexpr = spec.pieces_v if VALUES else spec.pieces
    tile = (load_piece(base, offsets, live, 0, PIECES[0], DIM, MASKED),)
    if len(PIECES) == 2:
        tile = (tile[0], load_piece(base, offsets, live, PIECES[0], PIECES[1], DIM, MASKED))
    return tile


@triton.jit
def store_tile(base, offsets, live, tile, spec: tl.constexpr, VALUES: tl.constexpr):
    """Write a tuple of [rows, piece] to the live rows at base + offsets [rows], in the pointer's type."""
    DIM: tl.constexpr = spec.head_dim_v if VALUES else spec.head_dim
    PIECES: tl.constexpr = spec.pieces_v if VALUES else spec.pieces
    for n in tl.static_range(len(PIECES)):
        column = PIECES[0] * n + tl.arange(0, PIECES[n])[None, :]  # [1, piece]
        x = tile[n].to(base.dtype.element_ty)
        tl.store(base + offsets[:, None] + column, x, mask=live[:, None] & (column < DIM))


@triton.jit
def zero_tile(ROWS: tl.constexpr, spec: tl.constexpr, VALUES: tl.constexpr):
    """A tuple of float32 zeros [ROWS, piece]."""
    PIECES: tl.constexpr = spec.pieces_v if VALUES else spec.pieces
    tile = (tl.full([ROWS, PIECES[0]], 0.0, tl.float32),)
    if len(PIECES) == 2:
        tile = (tile[0], tl.full([ROWS, PIECES[1]], 0.0, tl.float32))
    return tile


@triton.jit
def scale_tile(tile, factor):
    """Every row of a tuple of [rows, piece] times factor [rows]."""
    scaled = (tile[0] * factor[:, None],)
    if len(tile) == 2:
        scaled = (scaled[0], tile[1] * factor[:, None])
    return scaled


# ---- products --------------------------------------------------------------------------------------------------------
@triton.jit
def dot_nt(a, b, spec: tl.constexpr):
    """a b^T for tuples of [m, piece] and [n, piece]: float32 [m, n]."""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=spec.precision)
    if len(a) == 2:
        s = tl.dot(a[1], tl.trans(b[1]), s, input_precision=spec.precision)
    return s


@triton.jit
def dot_nn(p, x, acc, spec: tl.constexpr):
    """acc + p x for p [m, k] and tuples x of [k, piece], acc of [m, piece]."""
    new = (tl.dot(p, x[0], acc[0], input_precision=spec.precision),)
    if len(x) == 2:
        new = (new[0], tl.dot(p, x[1], acc[1], input_precision=spec.precision))
    return new


# ---- visibility ------------------------------------------------------------------------------------------------------
@triton.jit
def row_bounds(mask, numbers, i, at, spec: tl.constexpr, N: tl.constexpr):
    """(start, stop) of interval N of queries i, of i's shape: they see start <= j < stop; stop <= kv_len.

    Neither decreases with i < q_len, so the first and the last query of a block say what the block sees. A row that
    sees nothing may have stop < start, and stop < 0.
    """
    b, _, q_first, q_len, kv_len = at
    if spec.intervals == 0:
        q_pos = i + (kv_len - q_len)
        start = i * 0
        stop = start + kv_len
        if spec.left:
            start = tl.maximum(q_pos - plain(numbers.left), 0)
        if spec.right:
            stop = tl.minimum(q_pos + plain(numbers.right) + 1, stop)
        if spec.right_top_left:
            stop = tl.minimum(i + plain(numbers.right_top_left) + 1, stop)
    else:
        where = mask.bounds + b.to(tl.int64) * plain(mask.bounds_batch) + (q_first + i)
        where += tl.cast(2 * N, tl.int64) * plain(mask.bounds_rows)
        live = (i >= 0) & (i < q_len)  # the last query of an empty sequence is -1
        start = tl.load(where, mask=live, other=0)
        stop = tl.load(where + plain(mask.bounds_rows), mask=live, other=0)
    return start, stop


@triton.jit
def load_pairs(x, i, j, at, spec: tl.constexpr, other):
    """x[b, h, i, j]; `other` outside the sequence, and outside the tensor where lengths may lie."""
    b, h, _, q_len, kv_len = at
    live = (i < q_len) & (j < kv_len)
    if spec.bounded:
        live = live & (i < x.limit_i) & (j < x.limit_j)
    base = x.ptr + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head
    return tl.load(base + i.to(tl.int64) * x.i + j.to(tl.int64) * x.j, mask=live, other=other)


@triton.jit
def visible(mask, numbers, i, j, at, spec: tl.constexpr):
    """Whether the mask shows keys j to queries i: bool, of the shape that i and j broadcast to.

    False outside the sequence.
    """
    b, h, _, q_len, kv_len = at
    start, stop = row_bounds(mask, numbers, i, at, spec, 0)
    shown = (j < stop) & (i < q_len)
    if spec.from_left:
        shown = shown & (j >= start)
    if spec.intervals == 2:
        start, stop = row_bounds(mask, numbers, i, at, spec, 1)
        shown = shown | ((j >= start) & (j < stop) & (i < q_len))
    for n in tl.static_range(len(mask.dense)):
        shown = shown & (load_pairs(mask.dense[n], i, j, at, spec, 0) != 0)
    for n in tl.static_range(len(spec.predicates)):
        q_pos = i + (kv_len - q_len)
        shown = shown & spec.predicates[n](0.0, b, h, q_pos, j, mask.predicates[n])
    return shown


@triton.jit
def key_ranges(mask, numbers, i_first, i_last, at, spec: tl.constexpr, N: tl.constexpr):
    """(visit_start, full_start, full_stop, visit_stop) of interval N for queries i_first to i_last, in keys.

    Keys from visit_start to visit_stop are all that some of these queries see; those from full_start to full_stop
    (if that is larger) are seen by every one of them.
    """
    visit_start, full_stop = row_bounds(mask, numbers, i_first, at, spec, N)
    full_start, visit_stop = row_bounds(mask, numbers, i_last, at, spec, N)
    return visit_start, full_start, full_stop, visit_stop
