"""User functions (`Predicate`, `Score`) as tile functions: traced expressions to LLVM IR, one small module each.

    predicate(tile, bits, environment)            bits &= expr
    score(tile, S, environment)                   s = expr(s)
    score_backward(tile, S, dS, environment)      ds = ds * (d expr / ds)(s)
    score_tensors(tile, S, dS, environment)       gradient[indices] += ds * (d expr / d load)(s), for every load

S is always the input of the score. Kernels call these through the addresses in `predicates` and `scores`. Whatever in
an expression is the same for all lanes (the batch, the head, and the row of the tile) stays scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kilat.backends.cpu import jit
from kilat.backends.cpu.emit import F64, I16, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import Geometry
from kilat.backends.cpu.tiles import (
    TILE_ARGS,
    Cell,
    Tile,
    bits_offset,
    for_each,
    is_null,
    narrow,
    score_offset,
    to_bits,
)
from kilat.backends.cpu.tiles_scores import scale_gradient
from kilat.backends.cpu.user_expr import MAX_AXES, Translator, check_dtypes
from kilat.symbolic import Expr, partial_load, to_text

# The environment: the function for tensors' gradients or 0, the element that empty tensors are read as, the one that
# their gradients are added to, and a record a tensor: its pointer, sizes and strides (bytes), the pointer of its
# gradient (compute type; 0: not wanted) and its strides.
_TENSORS_FUNCTION, _ZERO, _RUBBISH, _FIRST_RECORD = range(4)
_RECORD = 2 + 3 * MAX_AXES
_SIZES, _STRIDES, _GRADIENT, _GRADIENT_STRIDES = 1, 1 + MAX_AXES, 1 + 2 * MAX_AXES, 2 + 2 * MAX_AXES


Body = Callable[[Function, Tile, Cell], None]


@dataclass(frozen=True)
class _Kind:
    """A kind of tile function: its name and how many tiles stand between the leading arguments and the environment."""

    name: str
    tiles: int


_PREDICATE, _SCORE = _Kind("predicate", 1), _Kind("score", 1)
_BACKWARD, _TENSORS = _Kind("score_backward", 2), _Kind("score_tensors", 2)


def predicate_function(expr: Expr, dtypes: Sequence[str], geo: Geometry, isa: Isa) -> int:
    """Address of predicate(tile, bits, environment) for a bool expression; floats in it are float64.

    dtypes: names of the tensors' types, as `dtype_names` gives them. Raises TypeError for another kind of expression.
    """
    if expr.kind != "bool":
        raise TypeError(f"a predicate must return a bool; got kind {expr.kind}")

    def body(f: Function, tile: Tile, cell: Cell) -> None:
        at = f.args[-2].at(bits_offset(geo, cell.row, cell.column))
        shown = _translator(f, tile, cell, dtypes, F64, isa).vector(expr)
        f.store(f.load(I16, at) & to_bits(f, shown), at)

    return _compile(_PREDICATE, (expr,), dtypes, geo, isa, body)


def score_function(expr: Expr, dtypes: Sequence[str], geo: Geometry, isa: Isa) -> int:
    """Address of score(tile, S, environment)."""

    def body(f: Function, tile: Tile, cell: Cell) -> None:
        at = f.args[-2].at(score_offset(geo, cell.row, cell.column))
        translator = _translator(f, tile, cell, dtypes, geo.compute, isa, f.load(geo.vector, at))
        f.store(translator.floating(expr), at)

    return _compile(_SCORE, (expr,), dtypes, geo, isa, body)


def score_backward_function(derivative: Expr, dtypes: Sequence[str], geo: Geometry, isa: Isa) -> int:
    """Address of score_backward(tile, S, dS, environment) for d expr / ds."""

    def body(f: Function, tile: Tile, cell: Cell) -> None:
        offset = score_offset(geo, cell.row, cell.column)
        s = f.load(geo.vector, f.args[-3], offset)
        factor = _translator(f, tile, cell, dtypes, geo.compute, isa, s).floating(derivative)
        scale_gradient(f, f.args[-2].at(offset), factor)

    return _compile(_BACKWARD, (derivative,), dtypes, geo, isa, body)


def score_tensors_function(expr: Expr, dtypes: Sequence[str], geo: Geometry, isa: Isa) -> int:
    """Address of score_tensors(tile, S, dS, environment), which adds into gradients; 0 if expr reads no float tensor.

    Not safe for two threads at a time on one gradient.
    """
    partials = partial_load(expr)
    if not partials:
        return 0

    def body(f: Function, tile: Tile, cell: Cell) -> None:
        offset = score_offset(geo, cell.row, cell.column)
        s, ds = f.load(geo.vector, f.args[-3], offset), f.load(geo.vector, f.args[-2], offset)
        translator = _translator(f, tile, cell, dtypes, geo.compute, isa, s)
        for load, partial in partials:
            record = f.args[-1].at(8 * (_FIRST_RECORD + load.tensor * _RECORD))
            gradient = f.load(PTR, record, 8 * _GRADIENT)
            share = f.select(ds.eq(0.0), 0.0, ds * translator.floating(partial))
            offsets = translator.offsets(load, 8 * _GRADIENT_STRIDES)
            with f.unless(is_null(f, gradient)):
                _scatter_add(f, gradient, offsets, share, tile.columns - cell.column)

    exprs = tuple(e for load, partial in partials for e in (load, partial))
    return _compile(_TENSORS, exprs, dtypes, geo, isa, body)


def _scatter_add(f: Function, base: Value, offsets: Value, x: Value, count: Value) -> None:
    """base[offsets[lane]] += x[lane], lane by lane, for the first `count` lanes."""
    elem, lanes = x.type.scalar, x.type.lanes
    offset_memory, x_memory = (Value(f, f.var(v.type, v).name, PTR) for v in (offsets, x))
    with f.range(0, f.minimum(count, lanes)) as lane:
        more = f.load(elem, x_memory, lane * elem.bytes)
        with f.when(more.ne(0.0)):
            at = base.at(f.load(I64, offset_memory, lane * 8))
            f.store(f.load(elem, at) + more, at)


def _translator(
    f: Function, tile: Tile, cell: Cell, dtypes: Sequence[str], floats: Type, isa: Isa, s: Value | None = None
) -> Translator:
    """Expressions at one cell; in a tile one of q_pos and j is the same for all lanes, so stays scalar."""
    row = narrow(f, tile.first_row + cell.row)
    shift = narrow(f, tile.kv_len - tile.q_len)
    q_pos, j = (cell.i + shift, row) if tile.geo.query_lanes else (row + shift, cell.j)
    variables = {"b": narrow(f, tile.b), "h": narrow(f, tile.h), "q_pos": q_pos, "j": j}
    if s is not None:
        variables["s"] = s
    records = f.args[-1].at(8 * _FIRST_RECORD)
    return Translator(f, variables, records, dtypes, floats, tile.geo.lanes, isa)


def _compile(kind: _Kind, exprs: tuple[Expr, ...], dtypes: Sequence[str], geo: Geometry, isa: Isa, body: Body) -> int:
    """The address of a function of the tile arguments, its tiles and the environment that runs body per cell."""
    check_dtypes(exprs, dtypes)

    def text() -> str:
        m = Module()
        with m.function(kind.name, [*TILE_ARGS, *[PTR] * kind.tiles, PTR], exported=True) as f:
            tile = Tile(f, geo)
            for_each(tile, lambda cell: body(f, tile, cell))
        return m.text()

    key = f"{kind.name} {geo} ({', '.join(dtypes)}) {' | '.join(to_text(e) for e in exprs)}"
    return jit.compile_module(text, key, [kind.name], isa)[kind.name]


# ---- the environment -------------------------------------------------------------------------------------------------
def dtype_names(tensors: Sequence[Any]) -> tuple[str, ...]:
    """Names of the types of torch tensors or NumPy arrays: float32, bool, ..."""
    return tuple(str(t.dtype).removeprefix("torch.") for t in tensors)


def environment(
    tensors: Sequence[Any], gradients: Sequence[Any | None] = (), tensors_function: int = 0
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What user functions read behind their last argument; it holds addresses only, so keep the tensors alive.

    Args:
        tensors: torch CPU tensors or NumPy arrays with any strides.
        gradients: of the same shapes in the compute type, or None where not wanted; empty: none are.
        tensors_function: address of `score_tensors_function`, for kernels that ask for these gradients.

    Raises:
        ValueError: a tensor has more than four axes, or a gradient another shape.
    """
    slots = np.zeros(_FIRST_RECORD + _RECORD * len(tensors), np.int64)
    slots[_TENSORS_FUNCTION] = tensors_function
    for n, tensor in enumerate(tensors):
        record = slots[_FIRST_RECORD + n * _RECORD :][:_RECORD]
        gradient = gradients[n] if gradients else None
        _describe(record, tensor, slots.ctypes.data + 8 * _ZERO, 0, _STRIDES)
        if gradient is not None:
            if tuple(gradient.shape) != tuple(tensor.shape):
                raise ValueError(
                    f"gradients[{n}] must have the tensor's shape {tuple(tensor.shape)}; got {tuple(gradient.shape)}"
                )
            _describe(record, gradient, slots.ctypes.data + 8 * _RUBBISH, _GRADIENT, _GRADIENT_STRIDES)
    return slots


def _describe(record: Any, tensor: Any, instead: int, pointer: int, strides: int) -> None:
    """Write pointer, sizes and strides of one tensor; an empty one becomes the single element at `instead`."""
    shape = tuple(tensor.shape)
    if len(shape) > MAX_AXES:
        raise ValueError(f"tensors of user functions must have at most {MAX_AXES} axes; got shape {shape}")
    if 0 in shape:
        record[pointer] = instead
        record[_SIZES : _SIZES + len(shape)] = 1
        return
    torch_tensor = hasattr(tensor, "data_ptr")
    record[pointer] = tensor.data_ptr() if torch_tensor else tensor.ctypes.data
    record[_SIZES : _SIZES + len(shape)] = shape
    in_bytes = [n * tensor.element_size() for n in tensor.stride()] if torch_tensor else tensor.strides
    record[strides : strides + len(shape)] = in_bytes
