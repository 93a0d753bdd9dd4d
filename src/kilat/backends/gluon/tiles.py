# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
"""Which tile a CTA works on next, where its sequence lies, and which keys its queries see: scalars only.

Divisions below are of numbers that are not negative, or exact: `//` truncates on the GPU.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kilat.backends.gluon._compat import aggregate


@aggregate
class Sizes:
    """The run-time numbers of a call; `left`, `right`, `right_top_left` as in `kilat.masks.affine`."""

    cu_q: gl.tensor
    cu_kv: gl.tensor
    used_q: gl.tensor
    used_kv: gl.tensor
    order: gl.tensor
    batch: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_kv: gl.tensor
    left: gl.tensor
    right: gl.tensor
    right_top_left: gl.tensor
    tiles: gl.tensor
    together: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        cu_q,
        cu_kv,
        used_q,
        used_kv,
        order,
        batch,
        heads,
        group,
        seqlen_q,
        seqlen_kv,
        left,
        right,
        right_top_left,
        tiles,
        together,
    ):
        self.cu_q = cu_q
        self.cu_kv = cu_kv
        self.used_q = used_q
        self.used_kv = used_kv
        self.order = order
        self.batch = batch
        self.heads = heads
        self.group = group
        self.seqlen_q = seqlen_q
        self.seqlen_kv = seqlen_kv
        self.left = left
        self.right = right
        self.right_top_left = right_top_left
        self.tiles = tiles
        self.together = together


@gluon.jit
def clamp(x, low, high):
    """x, moved into [low, high]."""
    return gl.minimum(gl.maximum(x, low), high)


@gluon.jit
def unit_and_slot(tile, units, tiles, together):
    """(unit, slot) of a tile: a unit is a head of a sequence (ragged: a head), a slot one of its `tiles` blocks.

    Units go through the machine `together` at a time, so that what their tiles share stays in the L2 cache.
    """
    section = tile // (together * tiles)
    rest = tile - section * (together * tiles)
    width = gl.maximum(gl.minimum(together, units - section * together), 1)  # past the last tile it would be 0
    slot = rest // width
    return section * together + rest - slot * width, slot


@gluon.jit
def nth_tile(turn, s, ORDERED: gl.constexpr, RAGGED: gl.constexpr, LONGEST_FIRST: gl.constexpr):
    """(slot, b, h, h_kv) of this CTA's tile in its turn; the slot is -1 where there is none.

    ORDERED: read from the table of `schedule`, without a division, and asked for a tile ahead.
    """
    tile = turn * gl.num_programs(0) + gl.program_id(0)
    if ORDERED:
        at = s.order + tile * 4
        slot = gl.load(at)
        b = gl.load(at + 1)
        h = gl.load(at + 2)
        h_kv = gl.load(at + 3)
    else:
        units = s.heads
        if not RAGGED:
            units = s.heads * s.batch
        unit, slot = unit_and_slot(tile, units, s.tiles, s.together)
        if LONGEST_FIRST:
            slot = s.tiles - 1 - slot
        if tile >= units * s.tiles:
            slot = -1
        b = unit // s.heads
        h = unit - b * s.heads
        h_kv = h // s.group
    return slot, b, h, h_kv


@gluon.jit
def first_slot(b, s, BLOCK_Q: gl.constexpr):
    """The first slot of ragged sequence b: cu[b] // BLOCK_Q + b leaves room for every sequence's blocks."""
    return clamp(gl.load(s.cu_q + b), 0, s.seqlen_q) // BLOCK_Q + b


@gluon.jit
def locate(slot, b, s, BLOCK_Q: gl.constexpr, RAGGED: gl.constexpr, USED: gl.constexpr):
    """(b, row_q, row_kv, i0, q_rows, q_len, kv_len) of a tile.

    b is the first coordinate of tensor boxes (0 if ragged), row_q and row_kv the rows of token 0 of the sequence
    there, i0 the first query of the tile in its sequence. Queries from q_len to q_rows are written as rows that see
    nothing; in a slot that no sequence needs, i0 >= q_rows. Tokens past the last offset are a sequence without keys.
    """
    if RAGGED:
        low = slot * 0
        high = s.batch
        while low < high:  # the last sequence that starts at or before this slot
            middle = (low + high + 1) // 2
            if first_slot(middle, s, BLOCK_Q) <= slot:
                low = middle
            else:
                high = middle - 1
        b = low
        row_q = clamp(gl.load(s.cu_q + b), 0, s.seqlen_q)
        i0 = (slot - (row_q // BLOCK_Q + b)) * BLOCK_Q
        row_kv = clamp(gl.load(s.cu_kv + b), 0, s.seqlen_kv)
        end_q = s.seqlen_q
        end_kv = row_kv
        if b < s.batch:
            end_q = clamp(gl.load(s.cu_q + b + 1), row_q, s.seqlen_q)
            end_kv = clamp(gl.load(s.cu_kv + b + 1), row_kv, s.seqlen_kv)
        q_rows = end_q - row_q
        q_len = q_rows
        if b == s.batch:
            q_len = 0
        kv_len = end_kv - row_kv
        b = slot * 0
    else:
        i0 = slot * BLOCK_Q
        row_q = 0
        row_kv = 0
        q_rows = s.seqlen_q
        q_len = s.seqlen_q
        kv_len = s.seqlen_kv
        if USED & 1:
            q_len = clamp(gl.load(s.used_q + b), 0, s.seqlen_q)
        if USED & 2:
            kv_len = clamp(gl.load(s.used_kv + b), 0, s.seqlen_kv)
    return b, row_q, row_kv, i0, q_rows, q_len, kv_len


@gluon.jit
def key_start(i, q_len, kv_len, s, BOUNDS: gl.constexpr):
    """The first key that query i sees (i: a number or a vector)."""
    start = i * 0
    if BOUNDS & 1:
        start = gl.maximum(start, i + (kv_len - q_len) - s.left)
    return start


@gluon.jit
def key_stop(i, q_len, kv_len, s, BOUNDS: gl.constexpr):
    """One past the last key that query i sees; may be negative."""
    stop = i * 0 + kv_len
    if BOUNDS & 2:
        stop = gl.minimum(stop, i + (kv_len - q_len) + s.right + 1)
    if BOUNDS & 4:
        stop = gl.minimum(stop, i + s.right_top_left + 1)
    return stop


@gluon.jit
def key_blocks(i0, q_len, kv_len, s, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, BOUNDS: gl.constexpr):
    """(low, high, n_blocks, n_right, n_masked) of the tile that starts at query i0.

    Some query of the tile sees some key in [low, high). Blocks are laid from the top, the last one overlapping its
    neighbour rather than reaching below low, so that a block never holds keys that the whole tile does not see (unless
    high - low < BLOCK_KV): a NaN in such a value must not reach the tile. n_right blocks at the top and n_masked in all
    hide some of their keys from some queries. There is always a block: one that hides everything if need be.
    """
    last = gl.minimum(i0 + BLOCK_Q, q_len) - 1
    high = clamp(key_stop(last, q_len, kv_len, s, BOUNDS), 0, kv_len)
    low = gl.minimum(key_start(i0, q_len, kv_len, s, BOUNDS), high)
    if i0 >= q_len:
        low = 0
        high = 0
    n_blocks = gl.maximum((high - low + BLOCK_KV - 1) // BLOCK_KV, 1)
    n_right = 0
    if BOUNDS & 6:
        hidden = high - key_stop(i0, q_len, kv_len, s, BOUNDS)  # keys that some query does not see
        n_right = gl.minimum((gl.maximum(hidden, 0) + BLOCK_KV - 1) // BLOCK_KV, n_blocks)
    # blocks from the top that the last query, whose first key is the highest, sees down to their ends
    open_left = gl.maximum(high - key_start(last, q_len, kv_len, s, BOUNDS), 0) // BLOCK_KV
    n_masked = n_blocks - gl.maximum(gl.minimum(open_left, n_blocks) - n_right, 0)
    return low, high, n_blocks, n_right, n_masked


@gluon.jit
def block_at(t, low, high, n_blocks, n_right, n_masked, BLOCK_KV: gl.constexpr):
    """(first key, stop) of the t-th block to work on: those with hidden keys first, then those without.

    Keys from stop on belong to the block above.
    """
    j = t
    if t >= n_masked:
        j = t - n_masked + n_right
    elif t >= n_right:
        j = t + n_blocks - n_masked
    stop = high - j * BLOCK_KV
    return gl.maximum(stop - BLOCK_KV, low), stop
