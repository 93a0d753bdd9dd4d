"""What every tile function shares: its arguments, its loops, bit tiles, and reading a strided tensor tile by tile.

A tile is nr queries from i0 and nb keys from j0 of one (sequence, query head). In memory it has `geo.outer` rows of
`geo.vectors` vectors; whether a row is a key (forward) or a query (backward) is `geo.query_lanes`, and the code here
is the only place that asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kilat.backends.cpu.emit import I1, I16, I32, I64, PTR, Function, Module, Operand, Type, Value
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
    """Whether a pointer parameter was left at 0."""
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
Convert = Callable[[Function, Value], Value]
Use = Callable[[Value, Value, Value], None]


@dataclass(frozen=True)
class View:
    """A tile of a strided tensor from its element (row 0, lane 0) on; strides in bytes, 0 where it is broadcast.

    `read` emits a call of a function made by `build_reader`; with `inline`, whole vectors that need no conversion are
    loaded without one.
    """

    base: Value
    row_stride: Value
    lane_stride: Value
    bytes: int | Value  # of an element
    read: Callable[[Value, Operand, Value], Value]
    inline: Type | None = None


def build_reader(m: Module, name: str, elem: Type, lanes: int, result: Type, convert: Convert) -> Function:
    """name(p, stride, count) -> converted p[0], p[stride], ...: `count` >= 1 elements, of which `lanes` are taken.

    Lanes from `count` on hold anything, and nothing is read for them.
    """
    vector = elem.vec(lanes)
    with m.function(name, [PTR, I64, I64], result.vec(lanes)) as f:
        p, stride, count = f.args
        x = f.var(vector)
        adjacent, whole = stride.eq(elem.bytes), count >= lanes
        with f.when(adjacent & whole):
            x.set(f.load(vector, p))
        with f.when(adjacent & ~whole):
            x.set(f.masked_load(vector, p, lanes_below(f, lanes, count)))
        with f.unless(adjacent):
            one_by_one = f.const(0, vector)
            for lane in range(lanes):
                at = f.minimum(count - 1, lane) * stride
                one_by_one = f.insert(one_by_one, f.load(elem, p, at), lane)
            x.set(one_by_one)
        f.ret_value(convert(f, x.get()))
    return f


def for_each_vector(tile: Tile, view: View, use: Use) -> None:
    """Emit `use(row, column, vector)` for every vector of a tensor's tile; lanes outside nr x nb hold anything.

    Nothing outside the tile's nr x nb elements is read. Elements next to each other along rows of the tile but not
    along its lanes are read as vectors along rows and transposed in registers.
    """
    f = tile.f
    transposed = view.row_stride.eq(view.bytes) & view.lane_stride.ne(view.bytes)
    with f.when(transposed):
        _read_transposed(tile, view, use)
    with f.unless(transposed), f.range(0, tile.rows) as row:
        start = view.base.at(row * view.row_stride)
        with f.range(0, tile.columns, tile.geo.lanes) as column:
            at = start.at(column * view.lane_stride)
            use(row, column, *_fetch(tile, view, [at], view.lane_stride, tile.columns - column))


def _read_transposed(tile: Tile, view: View, use: Use) -> None:
    """Blocks of lanes x lanes; a lane behind the tile repeats the last one, a row behind it is not read."""
    f, lanes = tile.f, tile.geo.lanes
    with f.range(0, tile.columns, lanes) as column, f.range(0, tile.rows, lanes) as row:
        start = view.base.at(row * view.bytes)
        last = tile.columns - 1
        starts = [start.at(f.minimum(column + lane, last) * view.lane_stride) for lane in range(lanes)]
        block = _fetch(tile, view, starts, view.bytes, tile.rows - row)
        for k, x in enumerate(transpose(f, block)):
            use(row + k, column, x)


def _fetch(tile: Tile, view: View, pointers: list[Value], stride: Operand, count: Value) -> list[Value]:
    """The first `count` elements behind each pointer."""
    if view.inline is None:
        return [view.read(p, stride, count) for p in pointers]
    f, vector = tile.f, view.inline.vec(tile.geo.lanes)
    found = [f.var(vector) for _ in pointers]
    easy = f.coerce(stride, I64).eq(view.bytes) & (count >= vector.lanes)
    with f.when(easy):
        for x, p in zip(found, pointers, strict=True):
            x.set(f.load(vector, p))
    with f.unless(easy):
        for x, p in zip(found, pointers, strict=True):
            x.set(view.read(p, stride, count))
    return [x.get() for x in found]
