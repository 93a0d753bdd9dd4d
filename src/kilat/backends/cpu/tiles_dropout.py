"""dropout_bits: which pairs of a tile dropout keeps, from Philox or from a keep tensor.

    counter = (j // 4, i, b * num_heads_q + h, offset_lo),  key = (seed_lo, seed_hi xor offset_hi)
    kept iff word j % 4 of Philox4x32-10 >= threshold

One evaluation serves the four keys of an aligned group. With queries in lanes those are four rows of the tile; with
keys in lanes the lanes run over groups, and the words are interleaved through memory into the order of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilat.backends.cpu.emit import I16, I32, PTR, VOID, Function, Module, Type, Value
from kilat.backends.cpu.layout import COMMON, Geometry
from kilat.backends.cpu.math import philox4x32
from kilat.backends.cpu.tiles import TILE_ARGS, Tile, bits_offset, check_geometry, narrow, to_bits
from kilat.backends.cpu.tiles_mask import build_and_bytes

PHILOX, KEEP = 1, 2
"""Values of the parameter `dropout`."""

_KEYS_A_GROUP = 4


def build_dropout_bits(m: Module, geo: Geometry) -> Function:
    """dropout_bits(tile, bits): 1 = kept; call it only if `dropout` is PHILOX or KEEP.

    bits: int16 [outer][vectors]; outside nr x nb they are undefined.
    """
    check_geometry(geo)
    philox = _build_philox_query_lanes(m, geo) if geo.query_lanes else _build_philox_key_lanes(m, geo)
    and_bytes = build_and_bytes(m, geo)
    with m.function("dropout_bits", [*TILE_ARGS, PTR], VOID) as f:
        tile, bits = Tile(f, geo), f.args[-1]
        kind = tile.read("dropout")
        with f.when(kind.eq(PHILOX)):
            f.call(philox, *tile.args, bits)
        with f.when(kind.eq(KEEP)):
            with f.range(0, tile.rows * geo.bits_row_bytes, 2) as o:
                f.store(f.const(-1, I16), bits, o)
            f.call(and_bytes, *tile.args, bits, tile.params.at(8 * COMMON.index("keep")))
    return f


@dataclass(frozen=True)
class _Stream:
    """What does not change within a tile."""

    head: Value  # I32: b * num_heads_q + h
    offset: Value  # I32
    key: tuple[Value, Value]  # I32
    threshold: Value  # I32
    anything: Value  # I1: false if the threshold is 2^32, which no word reaches

    def words(self, f: Function, group: Value, query: Value) -> tuple[Value, ...]:
        """The four words of groups and queries, vectors of int32 lanes."""
        t = group.type
        constants = [f.coerce(x, t) for x in (self.head, self.offset, *self.key)]
        return philox4x32(f, (group, query, constants[0], constants[1]), (constants[2], constants[3]))

    def kept(self, f: Function, words: Value) -> Value:
        """i16 of bits."""
        kept = words.uge(f.coerce(self.threshold, words.type))
        return f.select(self.anything, to_bits(f, kept), 0)


def _stream(tile: Tile) -> _Stream:
    f = tile.f
    seed, offset, threshold = tile.read("seed"), tile.read("offset"), tile.read("dropout_threshold")
    return _Stream(
        narrow(f, tile.b * tile.read("num_heads_q") + tile.h),
        narrow(f, offset),
        (narrow(f, seed), narrow(f, (seed ^ offset) >> 32)),
        narrow(f, threshold),
        threshold < 2**32,
    )


def _build_philox_query_lanes(m: Module, geo: Geometry) -> Function:
    """philox_bits(tile, bits): for each group of keys and vector of queries, four rows at once."""
    vector = I32.vec(geo.lanes)
    with m.function("philox_bits", [*TILE_ARGS, PTR], VOID) as f:
        tile, bits = Tile(f, geo), f.args[-1]
        stream = _stream(tile)
        first, end = tile.j0 >> 2, (tile.j0 + tile.nb + (_KEYS_A_GROUP - 1)) >> 2
        with f.range(first, end) as group, f.range(0, tile.nr, geo.lanes) as column:
            query = f.iota(vector) + narrow(f, tile.i0 + column)
            words = stream.words(f, f.splat(narrow(f, group), geo.lanes), query)
            for k, word in enumerate(words):
                row = group * _KEYS_A_GROUP + k - tile.j0
                with f.when((row >= 0) & (row < tile.nb)):
                    f.store(stream.kept(f, word), bits, bits_offset(geo, row, column))
    return f


def _build_philox_key_lanes(m: Module, geo: Geometry) -> Function:
    """philox_bits(tile, bits): for each query, `lanes` groups of keys at once.

    The tile's first key may stand anywhere in its group, so vectors of keys are read back from where it lies.
    """
    lanes, vector = geo.lanes, I32.vec(geo.lanes)
    most_words = _KEYS_A_GROUP * (geo.width // _KEYS_A_GROUP + 1 + lanes)
    with m.function("philox_bits", [*TILE_ARGS, PTR], VOID) as f:
        tile, bits = Tile(f, geo), f.args[-1]
        stream = _stream(tile)
        words = Value(f, f.var(Type(f"[{most_words} x i32]")).name, PTR)
        first, skipped = tile.j0 >> 2, tile.j0 & 3
        groups = (skipped + tile.nb + (_KEYS_A_GROUP - 1)) >> 2
        with f.range(0, tile.nr) as row:
            query = f.splat(narrow(f, tile.i0 + row), lanes)
            with f.range(0, groups, lanes) as start:
                four = stream.words(f, f.iota(vector) + narrow(f, first + start), query)
                for k, x in enumerate(_interleave(f, four)):
                    f.store(x, words, start * (_KEYS_A_GROUP * 4) + k * vector.bytes)
            with f.range(0, tile.nb, lanes) as column:
                some = f.load(vector, words, (skipped + column) * 4)
                f.store(stream.kept(f, some), bits, bits_offset(geo, row, column))
    return f


def _interleave(f: Function, words: tuple[Value, ...]) -> list[Value]:
    """Four vectors word-by-word to four that hold words 0, 1, 2, 3 of lane 0, then of lane 1, and so on."""
    lanes = words[0].type.lanes
    zip_low = [x for lane in range(lanes // 2) for x in (lane, lanes + lane)]
    zip_high = [x + lanes // 2 for x in zip_low]
    a, b, c, d = words
    even = [f.shuffle(a, c, zip_low), f.shuffle(a, c, zip_high)]
    odd = [f.shuffle(b, d, zip_low), f.shuffle(b, d, zip_high)]
    return [f.shuffle(x, y, order) for x, y in zip(even, odd, strict=True) for order in (zip_low, zip_high)]
