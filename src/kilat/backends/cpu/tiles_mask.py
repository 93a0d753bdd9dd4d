"""mask_bits: which pairs of a tile the mask shows.

Every query sees one or two intervals of keys (`SEQ.bounds`), thinned by dense masks and by compiled predicates. The
answer is a class, NONE, PARTIAL or ALL, and for PARTIAL a tile of bits. Bounds never decrease from query to query, so
the first and the last query of a tile decide the class of the intervals without a look at the others.
"""

from __future__ import annotations

from kilat.backends.cpu.emit import I8, I16, I32, I64, PTR, VOID, Function, Module, Value
from kilat.backends.cpu.layout import Geometry
from kilat.backends.cpu.tiles import (
    SEQ_RECORD,
    TILE_ARGS,
    Tile,
    View,
    bits_offset,
    build_reader,
    check_geometry,
    for_each_vector,
    lanes_below,
    narrow,
    to_bits,
)

NONE, PARTIAL, ALL = 0, 1, 2

_DENSE_RECORD = 5 * 8  # data pointer, strides b h i j
_PREDICATE_RECORD = 2 * 8  # function pointer, environment pointer


def build_mask_bits(m: Module, geo: Geometry) -> Function:
    """mask_bits(tile, bits) -> NONE, PARTIAL or ALL; raises ValueError for a geometry without int16 bits.

    bits: int16 [outer][vectors], written whole if the answer is PARTIAL (clear outside nr x nb), else undefined.
    """
    check_geometry(geo)
    classify, fill, narrow_down = _interval_class(m, geo), _fill(m, geo), _narrow_down(m, geo)
    with m.function("mask_bits", [*TILE_ARGS, PTR], I64) as f:
        tile, bits = Tile(f, geo), f.args[-1]
        shown = f.var(I64, ALL)
        with f.when(tile.read("n_intervals") > 0):
            shown.set(f.call(classify, *tile.args))
        more = (tile.read("n_dense") + tile.read("n_predicates")) > 0
        with f.when(shown.get().eq(PARTIAL) | (more & shown.get().ne(NONE))):
            f.call(fill, *tile.args, bits)
            with f.when(more):
                shown.set(f.call(narrow_down, *tile.args, bits))
        f.ret_value(shown.get())
    return f


def build_and_bytes(m: Module, geo: Geometry) -> Function:
    """and_bytes(tile, bits, record): clear the bits of pairs where a bool tensor is false.

    record: data pointer, then strides b, h, i, j in bytes (0: broadcast); indexed (i, j) inside the sequence.
    """
    for known in m.functions:
        if known.name == "and_bytes":
            return known
    reader = build_reader(m, "read_bytes", I8, geo.lanes, I8, lambda f, x: x)
    with m.function("and_bytes", [*TILE_ARGS, PTR, PTR], VOID) as f:
        tile, bits, record = Tile(f, geo), f.args[-2], f.args[-1]
        sb, sh, si, sj = (f.load(I64, record, 8 * k) for k in range(1, 5))
        start = tile.offset(f.load(PTR, record), (sb, sh, si, sj))
        row_stride, lane_stride = tile.by_row(si, sj)

        def clear(row: Value, column: Value, flags: Value) -> None:
            at = bits.at(bits_offset(geo, row, column))
            f.store(f.load(I16, at) & to_bits(f, flags.ne(0)), at)

        view = View(start, row_stride, lane_stride, 1, lambda *args: f.call(reader, *args), I8)
        for_each_vector(tile, view, clear)
    return f


# ---- intervals -------------------------------------------------------------------------------------------------------
def _bounds(f: Function, tile: Tile, interval: int | Value) -> tuple[Value, Value]:
    """Pointers to the starts and the stops of one interval, int32 [q_len] each, at the tile's first query."""
    q_len, bounds = tile.q_len, SEQ_RECORD.pointer(f, tile.seq, "bounds")
    starts = bounds.at((q_len * interval * 2 + tile.i0) * 4)
    return starts, starts.at(q_len * 4)


def _interval_class(m: Module, geo: Geometry) -> Function:
    """interval_class(tile) -> NONE, PARTIAL or ALL from the first and the last query; needs n_intervals > 0.

    Two intervals that only together cover the tile count as PARTIAL.
    """
    with m.function("interval_class", TILE_ARGS, I64) as f:
        tile = Tile(f, geo)
        shown = f.var(I64, NONE)
        last, stop_key = (tile.nr - 1) * 4, tile.j0 + tile.nb
        with f.range(0, tile.read("n_intervals")) as interval:
            starts, stops = _bounds(f, tile, interval)
            lowest, highest = _key(f, starts), _key(f, stops.at(last))
            covers = (_key(f, starts.at(last)) <= tile.j0) & (_key(f, stops) >= stop_key)
            touches = (lowest < stop_key) & (highest > tile.j0)
            this = f.select(covers, f.const(ALL, I64), f.select(touches, f.const(PARTIAL, I64), f.const(NONE, I64)))
            shown.set(f.maximum(shown.get(), this))
        f.ret_value(shown.get())
    return f


def _key(f: Function, p: Value) -> Value:
    return f.cast("sext", f.load(I32, p), I64)


def _fill(m: Module, geo: Geometry) -> Function:
    """fill_bits(tile, bits): the intervals' bits, clear outside nr x nb."""
    with m.function("fill_bits", [*TILE_ARGS, PTR], VOID) as f:
        tile, bits = Tile(f, geo), f.args[-1]
        n = tile.read("n_intervals")
        for count in (0, 1, 2):
            with f.when(n.eq(count)):
                if geo.query_lanes:
                    _fill_query_lanes(f, tile, bits, count)
                else:
                    _fill_key_lanes(f, tile, bits, count)
        with f.range(tile.rows, geo.outer) as row:
            for v in range(geo.vectors):
                f.store(f.const(0, I16), bits, row * geo.bits_row_bytes + 2 * v)
    return f


def _inside(key: Value, start: Value, length: Value) -> Value:
    """start <= key < start + length by one unsigned comparison; length 0 holds nothing."""
    return (key - start).ult(length)


def _fill_query_lanes(f: Function, tile: Tile, bits: Value, count: int) -> None:
    """Lanes are queries: each vector's bounds stay in registers while the keys go by."""
    geo, lanes = tile.geo, tile.geo.lanes
    vector = I32.vec(lanes)
    seen: list[list[tuple[Value, Value]]] = []  # by vector, by interval: (start, length)
    for v in range(geo.vectors):
        live = lanes_below(f, lanes, tile.nr - v * lanes)
        if count == 0:
            keys = f.splat(narrow(f, tile.kv_len), lanes)
            seen.append([(f.const(0, vector), f.select(live, keys, 0))])
            continue
        seen.append([])
        for interval in range(count):
            starts, stops = _bounds(f, tile, interval)
            start = f.masked_load(vector, starts.at(4 * v * lanes), live)
            seen[v].append((start, f.masked_load(vector, stops.at(4 * v * lanes), live) - start))
    with f.range(0, tile.nb) as row:
        key = f.splat(narrow(f, tile.j0 + row), lanes)
        for v in range(geo.vectors):
            _store_union(f, key, seen[v], bits.at(row * geo.bits_row_bytes + 2 * v))


def _fill_key_lanes(f: Function, tile: Tile, bits: Value, count: int) -> None:
    """Lanes are keys: each query's bounds, clipped to the tile, are broadcast."""
    geo, lanes = tile.geo, tile.geo.lanes
    keys = [(f.iota(I32.vec(lanes)) + v * lanes) + narrow(f, tile.j0) for v in range(geo.vectors)]
    first, end = narrow(f, tile.j0), narrow(f, tile.j0 + tile.nb)
    with f.range(0, tile.nr) as row:
        seen: list[tuple[Value, Value]] = []
        for interval in range(max(count, 1)):
            start, stop = first, end
            if count:
                starts, stops = _bounds(f, tile, interval)
                start, stop = f.load(I32, starts, row * 4), f.minimum(f.load(I32, stops, row * 4), end)
            length = f.maximum(stop - start, 0)
            seen.append((f.splat(start, lanes), f.splat(length, lanes)))
        for v in range(geo.vectors):
            _store_union(f, keys[v], seen, bits.at(row * geo.bits_row_bytes + 2 * v))


def _store_union(f: Function, key: Value, seen: list[tuple[Value, Value]], at: Value) -> None:
    mask = _inside(key, *seen[0])
    for interval in seen[1:]:
        mask = mask | _inside(key, *interval)
    f.store(to_bits(f, mask), at)


# ---- dense masks and predicates --------------------------------------------------------------------------------------
def _narrow_down(m: Module, geo: Geometry) -> Function:
    """narrow_down(tile, bits) -> class: apply dense masks and predicates to filled bits, then look at what is left."""
    and_bytes, scan = build_and_bytes(m, geo), _scan(m, geo)
    with m.function("narrow_down", [*TILE_ARGS, PTR], I64) as f:
        tile, bits = Tile(f, geo), f.args[-1]
        dense = tile.pointer("dense")
        with f.range(0, tile.read("n_dense")) as k:
            f.call(and_bytes, *tile.args, bits, dense.at(k * _DENSE_RECORD))
        predicates = tile.pointer("predicates")
        with f.range(0, tile.read("n_predicates")) as k:
            record = predicates.at(k * _PREDICATE_RECORD)
            f.call_pointer(f.load(PTR, record), VOID, *tile.args, bits, f.load(PTR, record, 8))
        f.ret_value(f.call(scan, *tile.args, bits))
    return f


def _scan(m: Module, geo: Geometry) -> Function:
    """scan_bits(tile, bits) -> NONE, PARTIAL or ALL; bits are clear outside nr x nb."""
    with m.function("scan_bits", [*TILE_ARGS, PTR], I64) as f:
        tile, bits = Tile(f, geo), f.args[-1]
        some, missing = f.var(I16, 0), f.var(I16, 0)
        whole = [to_bits(f, lanes_below(f, geo.lanes, tile.columns - v * geo.lanes)) for v in range(geo.vectors)]
        with f.range(0, tile.rows) as row:
            for v in range(geo.vectors):
                x = f.load(I16, bits, row * geo.bits_row_bytes + 2 * v)
                some.set(some.get() | x)
                missing.set(missing.get() | (x ^ whole[v]))
        any_shown, any_missing = some.get().ne(0), missing.get().ne(0)
        full = f.select(any_missing, f.const(PARTIAL, I64), f.const(ALL, I64))
        f.ret_value(f.select(any_shown, full, f.const(NONE, I64)))
    return f
