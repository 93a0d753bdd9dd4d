"""What every tile function shares: its arguments, its loops, bit tiles, and reading a strided tensor tile by tile.

A tile is nr queries from i0 and nb keys from j0 of one (sequence, query head). In memory it has `geo.outer` rows of
`geo.vectors` vectors; whether a row is a key (forward) or a query (backward) is `geo.query_lanes`, and the code here
is the only place that asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kilat.backends.cpu.emit import I1, I16, I32, I64, PTR, Function, Type, Value
from kilat.backends.cpu.layout import COMMON, SEQ, Geometry
from kilat.backends.cpu.math import transpose
from kilat.backends.cpu.params import Params

COMMON_PARAMS = Params(*COMMON)
SEQ_RECORD = Params(*SEQ)

# parameters, SEQ record, b, h, i0, nr, j0, nb: the leading arguments of every tile function
TILE_ARGS = (PTR, PTR, I64, I64, I64, I64, I64, I64)


def check_geometry(geo: Geometry) -> None:
    """Raises ValueError for a tile that the functions here cannot write."""
    if geo.lanes not in (2, 4, 8, 16):
        raise ValueError(f"lanes must be 2, 4, 8 or 16, one int16 of bits; got lanes={geo.lanes}")
    if geo.vectors < 1 or geo.outer % geo.lanes:
        raise ValueError(f"outer must be a multiple of lanes; got outer={geo.outer}, lanes={geo.lanes}")


@dataclass(frozen=True)
class Cell:
    """One vector of a tile: where it lies and which (query, key) pairs its lanes are."""

    row: Value  # I64
    column: Value  # I64, of lane 0
    i: Value  # <lanes x i32>
    j: Value  # <lanes x i32>
    live: Value  # <lanes x i1>: lanes inside the tile's nr x nb


class Tile:
    """The leading arguments of the tile function that f is, by name."""

    def __init__(self, f: Function, geo: Geometry) -> None:
        self.f, self.geo = f, geo
        self.params, self.seq, self.b, self.h, self.i0, self.nr, self.j0, self.nb = f.args[:8]
        self.args = f.args[:8]
        if geo.query_lanes:
            self.first_row, self.rows, self.first_column, self.columns = self.j0, self.nb, self.i0, self.nr
        else:
            self.first_row, self.rows, self.first_column, self.columns = self.i0, self.nr, self.j0, self.nb

    def read(self, name: str) -> Value:
        """An int64 parameter that all kernels have."""
        return COMMON_PARAMS.read(self.f, self.params, name)

    def pointer(self, name: str) -> Value:
        return COMMON_PARAMS.pointer(self.f, self.params, name)

    def floating(self, name: str) -> Value:
        return COMMON_PARAMS.floating(self.f, self.params, name, self.geo.compute)

    @property
    def q_len(self) -> Value:
        return SEQ_RECORD.read(self.f, self.seq, "q_len")

    @property
    def kv_len(self) -> Value:
        return SEQ_RECORD.read(self.f, self.seq, "kv_len")

    def offset(self, base: Value, strides: tuple[Value, Value, Value, Value]) -> Value:
        """The pointer to element (b, h, i0, j0) of a tensor with byte strides (b, h, i, j)."""
        sb, sh, si, sj = strides
        return base.at(self.b * sb + self.h * sh + self.i0 * si + self.j0 * sj)

    def by_row(self, i: Value, j: Value) -> tuple[Value, Value]:
        """(what belongs to rows, what belongs to lanes) of what belongs to (queries, keys)."""
        return (j, i) if self.geo.query_lanes else (i, j)


def narrow(f: Function, x: Value) -> Value:
    """An int64 as int32."""
    return f.cast("trunc", x, I32)


def is_null(f: Function, p: Value) -> Value:
    return f.cast("ptrtoint", p, I64).eq(0)


def lanes_below(f: Function, lanes: int, count: Value) -> Value:
    """<lanes x i1>: the first `count` lanes (I64; any value below 2**31 in size)."""
    return f.iota(I32.vec(lanes)) < f.splat(narrow(f, count), lanes)


def for_each(tile: Tile, body: Callable[[Cell], None]) -> None:
    """Emit `body` in a loop over the vectors that hold at least one pair of the tile."""
    f, lanes = tile.f, tile.geo.lanes
    iota = f.iota(I32.vec(lanes))
    first_lane = iota + narrow(f, tile.first_column)
    with f.range(0, tile.rows) as row:
        outer = f.splat(narrow(f, tile.first_row + row), lanes)
        with f.range(0, tile.columns, lanes) as column:
            inner = first_lane + narrow(f, column)
            i, j = (inner, outer) if tile.geo.query_lanes else (outer, inner)
            body(Cell(row, column, i, j, lanes_below(f, lanes, tile.columns - column)))


def score_offset(geo: Geometry, row: Value, column: Value) -> Value:
    """Bytes from the start of a score tile to (row, column)."""
    return row * geo.row_bytes + column * geo.compute.bytes


def bits_offset(geo: Geometry, row: Value, column: Value) -> Value:
    """Bytes from the start of a bits tile to the vector that holds (row, column)."""
    return row * geo.bits_row_bytes + (column // geo.lanes) * 2


# ---- bits ------------------------------------------------------------------------------------------------------------
def to_bits(f: Function, mask: Value) -> Value:
    """<lanes x i1> as an i16, lane l in bit l."""
    packed = Type(f"i{mask.type.lanes}")
    bits = f.bitcast(mask, packed)
    return bits if packed == I16 else f.cast("zext", bits, I16)


def from_bits(f: Function, bits: Value, lanes: int) -> Value:
    """The i16 of `to_bits` as <lanes x i1>."""
    packed = Type(f"i{lanes}")
    if packed != I16:
        bits = f.cast("trunc", bits, packed)
    return f.bitcast(bits, I1.vec(lanes))


# ---- tensors ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class View:
    """Element (row 0, lane 0) of a tile of a strided tensor; strides in bytes, 0 where it is broadcast."""

    elem: Type
    base: Value
    row_stride: Value
    lane_stride: Value


Use = Callable[[Value, Value, Value], None]


def for_each_vector(tile: Tile, view: View, use: Use) -> None:
    """Emit `use(row, column, <lanes x elem>)` for every vector of a tensor's tile; lanes outside nr x nb hold anything.

    Nothing outside the tile's nr x nb elements is read. Elements next to each other along lanes are loaded as
    vectors, those next to each other along rows are transposed in registers, anything else is read one by one.
    """
    f, size = tile.f, view.elem.bytes
    along_lanes = view.lane_stride.eq(size)
    along_rows = view.row_stride.eq(size) & ~along_lanes
    with f.when(along_lanes):
        _load_vectors(tile, view, use)
    with f.when(along_rows):
        _load_transposed(tile, view, use)
    with f.unless(along_lanes | along_rows):
        _load_single(tile, view, use)


def load_some(f: Function, t: Type, p: Value, count: Value) -> Value:
    """The vector at p of which only the first `count` (at least 1) elements are readable; the rest becomes 0."""
    x = f.var(t)
    whole = count >= t.lanes
    with f.when(whole):
        x.set(f.load(t, p))
    with f.unless(whole):
        x.set(f.masked_load(t, p, lanes_below(f, t.lanes, count)))
    return x.get()


def _load_vectors(tile: Tile, view: View, use: Use) -> None:
    f, lanes = tile.f, tile.geo.lanes
    with f.range(0, tile.rows) as row:
        start = view.base.at(row * view.row_stride)
        with f.range(0, tile.columns, lanes) as column:
            use(
                row,
                column,
                load_some(f, view.elem.vec(lanes), start.at(column * view.elem.bytes), tile.columns - column),
            )


def _load_transposed(tile: Tile, view: View, use: Use) -> None:
    """Blocks of lanes x lanes; a lane behind the tile repeats the last one, a row behind it is not read."""
    f, lanes = tile.f, tile.geo.lanes
    with f.range(0, tile.columns, lanes) as column, f.range(0, tile.rows, lanes) as row:
        start = view.base.at(row * view.elem.bytes)
        block = []
        for lane in range(lanes):
            index = f.minimum(column + lane, tile.columns - 1)
            block.append(load_some(f, view.elem.vec(lanes), start.at(index * view.lane_stride), tile.rows - row))
        for k, x in enumerate(transpose(f, block)):
            use(row + k, column, x)


def _load_single(tile: Tile, view: View, use: Use) -> None:
    f, lanes = tile.f, tile.geo.lanes
    with f.range(0, tile.rows) as row:
        start = view.base.at(row * view.row_stride)
        with f.range(0, tile.columns, lanes) as column:
            x = f.const(0, view.elem.vec(lanes))
            for lane in range(lanes):
                index = f.minimum(column + lane, tile.columns - 1)
                x = f.insert(x, f.load(view.elem, start.at(index * view.lane_stride)), lane)
            use(row, column, x)
