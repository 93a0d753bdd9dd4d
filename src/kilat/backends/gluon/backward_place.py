"""Where a program of the backward works: its sequence, head and keys, and the turns over the queries that see them."""

# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# The annotations of aggregates are read when the class is made, so they must not be strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kilat.backends.gluon._compat import aggregate
from kilat.backends.gluon.tiles import unit_and_slot

FAR = gl.constexpr(2**30)  # as in kilat.masks.core
NOWHERE = gl.constexpr(2**22)  # a tile past the end of any lse


@aggregate
class Place:
    """Where a program works: coordinates, lengths, the band of its mask, and its turns."""

    sequence: gl.tensor  # batch entry
    q_batch: gl.tensor  # first coordinate of its queries in the descriptors: 0 if ragged
    q_start: gl.tensor  # second coordinate of its first query
    kv_batch: gl.tensor
    kv_start: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    head_kv: gl.tensor
    head_q: gl.tensor  # first of the group
    key: gl.tensor  # first key of the program, inside the sequence
    low: gl.tensor  # key j is visible to query i iff low <= j - i <= high
    high: gl.tensor
    first: gl.tensor  # block of queries of the first turn: the first that sees a key, with DOWN the last
    turns: gl.tensor  # blocks times query heads, or one turn outside of every tensor if no query sees these keys
    tile: gl.tensor  # of 64 rows: where lse, delta and dQ of the first head's sequence begin
    tiles: gl.tensor  # from one query head to the next
    down: gl.constexpr  # blocks of queries from the last to the first

    @gluon.constexpr_function
    def __init__(
        self, sequence, q_batch, q_start, kv_batch, kv_start, q_len, kv_len, head_kv, head_q, key, low, high, first,
        turns, tile, tiles, down,
    ):  # fmt: skip
        self.sequence = sequence
        self.q_batch = q_batch
        self.q_start = q_start
        self.kv_batch = kv_batch
        self.kv_start = kv_start
        self.q_len = q_len
        self.kv_len = kv_len
        self.head_kv = head_kv
        self.head_q = head_q
        self.key = key
        self.low = low
        self.high = high
        self.first = first
        self.turns = turns
        self.tile = tile
        self.tiles = tiles
        self.down = gl.constexpr(down)


@gluon.jit
def sequence_of(offsets, tile, batch, BLOCK: gl.constexpr):
    """Batch entry that owns a tile of a ragged batch: the last b with offsets[b] // BLOCK + b <= tile.

    Sequences start at tile offsets[b] // BLOCK + b, which leaves room for a short tile each, without a prefix sum.
    """
    low = tile * 0
    high = low + batch
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(offsets + middle) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def span(offsets, lengths, sequence, seqlen):
    """(first token, length) of a sequence: of all sequences if it has neither offsets nor a length of its own."""
    start = sequence * 0
    length = seqlen
    if offsets is not None:
        start = gl.minimum(gl.maximum(gl.load(offsets + sequence), 0), seqlen)
        length = gl.minimum(gl.maximum(gl.load(offsets + sequence + 1), start), seqlen) - start
    if lengths is not None:
        length = gl.minimum(gl.maximum(gl.load(lengths + sequence), 0), seqlen)
    return start, length


@gluon.jit
def band(q_len, kv_len, left, right, right_top_left):
    """(low, high): key j is visible to query i iff low <= j - i <= high; see `kilat.masks.affine`."""
    shift = kv_len - q_len
    low = gl.maximum(shift - left, -FAR)
    high = gl.minimum(gl.minimum(shift, FAR - right) + right, right_top_left)
    return low, high


@gluon.jit
def take_place(batch, heads, tiles, lead, together):
    """(sequence, head, tile) of this program: `lead` heads one after another, the others `together` by turns.

    together is None where all come one after another, as in a ragged batch.
    """
    pid = gl.program_id(0)
    tile = pid % tiles
    unit = pid // tiles  # head of a sequence
    if together is not None:
        rest = pid - lead * tiles
        if rest >= 0:
            unit, tile = unit_and_slot(rest, batch * heads - lead, tiles, together)
            unit += lead
    return unit // heads, unit % heads, tile


@gluon.jit
def place_of(
    offsets_q, offsets_kv, lengths_q, lengths_kv, batch, seqlen_q, seqlen_kv, num_heads_kv,
    left, right, right_top_left, tiles_kv, lead, together, tiles,
    BM: gl.constexpr, BLOCK_KV: gl.constexpr, GROUP: gl.constexpr, DOWN: gl.constexpr,
):  # fmt: skip
    """Where the program with this id works: the first keys first, which most queries see; see `take_place`.

    DOWN: blocks of queries from the last to the first. Under a causal mask programs that start together then read the
    same queries, and add to the same dQ, at the same time, so that these stay in the L2 cache.
    """
    sequence, head_kv, tile_kv = take_place(batch, num_heads_kv, tiles_kv, lead, together)
    if offsets_kv is not None:
        sequence = sequence_of(offsets_kv, tile_kv, batch, BLOCK_KV)
        tile_kv -= gl.load(offsets_kv + sequence) // BLOCK_KV + sequence
        tile = (gl.load(offsets_q + sequence) // BM + sequence) * (BM // 64)
        in_batch = sequence * 0
    else:
        tile = sequence * num_heads_kv * GROUP * tiles
        in_batch = sequence
    q_start, q_len = span(offsets_q, lengths_q, sequence, seqlen_q)
    kv_start, kv_len = span(offsets_kv, lengths_kv, sequence, seqlen_kv)
    low, high = band(q_len, kv_len, left, right, right_top_left)
    key = tile_kv * BLOCK_KV
    last_key = gl.minimum(key + BLOCK_KV, kv_len) - 1
    first_row = gl.maximum(key - high, 0)
    last_row = gl.minimum(last_key - low, q_len - 1)
    head_q = head_kv * GROUP
    first = first_row // BM
    turns = (last_row // BM + 1 - first) * GROUP
    if DOWN:
        first = last_row // BM
    tile += head_q * tiles
    if (last_key < key) | (last_row < first_row):
        # One turn whose coordinates lie outside of every tensor: loads give zeros, the sum into dQ goes nowhere.
        first = seqlen_q // BM + 1
        turns = first * 0 + 1
        tile = NOWHERE + tile * 0
    return Place(
        sequence, in_batch, q_start, in_batch, kv_start, q_len, kv_len, head_kv, head_q, key, low, high, first,
        turns, tile, tiles, DOWN,
    )  # fmt: skip


@gluon.jit
def row_and_tile(x, t, BM: gl.constexpr, GROUP: gl.constexpr):
    """(first query, tile of 64 rows) of turn t: all query heads of the group, then the next block or the last."""
    block = x.first - t // GROUP if x.down else x.first + t // GROUP
    return block * BM, x.tile + (t % GROUP) * x.tiles + block * (BM // 64)
