"""Compiled user functions of the CPU backend against the evaluation of the same expressions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tile_harness import Place, geometries, geometry_id, guarded, numpy_type

from kilat import math as kmath
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import Geometry
from kilat.backends.cpu.tiles_mask import NONE, PARTIAL, build_mask_bits
from kilat.backends.cpu.tiles_scores import USER, USER_TENSORS, build_scores_backward, build_scores_forward
from kilat.backends.cpu.user import (
    dtype_names,
    environment,
    predicate_function,
    score_backward_function,
    score_function,
    score_tensors_function,
)
from kilat.symbolic import Expr, derivative, evaluate, trace

Host = tuple[Isa, Geometry]
# Widths make no difference here: one of each instruction set, type and orientation is enough.
HOSTS = [(isa, geo) for isa, geo in geometries() if geo.vectors in (3, 4)]
every_geometry = pytest.mark.parametrize("host", HOSTS, ids=geometry_id)
MASK_NAMES, SCORE_NAMES = ("b", "h", "q_pos", "j"), ("s", "b", "h", "q_pos", "j")


def tile_place(geo: Geometry) -> Place:
    nr, nb = min(geo.width, 13), min(geo.width, 7)
    return Place(geo, 40, 29, 3, nr, 5, nb, b=1, h=2)  # more queries than keys: q_pos starts below 0


def grid(place: Place, s: np.ndarray | None = None) -> dict[str, Any]:
    """The variables of every pair of a tile, as int64 arrays that broadcast to [nr][nb]."""
    q_pos = place.queries()[:, None] + place.kv_len - place.q_len
    env = {"b": np.array(place.b), "h": np.array(place.h), "q_pos": q_pos, "j": place.keys()[None, :]}
    return env if s is None else {**env, "s": s}


# ---- predicates ------------------------------------------------------------------------------------------------------
PREDICATES: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, j: j <= q,
    "arithmetic": lambda b, h, q, j: ((q * 3 - j) % 5 < 3) | (q // 4 == -j // 3),
    "by a variable": lambda b, h, q, j: ((q // (j - 6) > -2) & (q % (j - 6) < 3)) | ((j - 7) // (q - q) == 0),
    "negative divisors": lambda b, h, q, j: (q // -3 + j % -4) < (j // -1),
    "float": lambda b, h, q, j: (q - j) / 3 < kmath.sqrt(abs(q) + 0.5) * (h + 1),
    "float division": lambda b, h, q, j: ((q * 0.7) % 1.9 < 1.0) & ((q * 0.7) // 0.3 > j * -0.9),
    "where": lambda b, h, q, j: kmath.where(h > 1, ~(q == j), b == 1) & (kmath.maximum(q, j) != kmath.minimum(q, 3)),
    "bits": lambda b, h, q, j: ((q & 3) | (j & ~1)) != 2,
    "constant": lambda b, h, q, j: False,
    "head": lambda b, h, q, j: h != 2,
}


def run_predicate(place: Place, isa: Isa, expr: Expr, tensors: tuple[Any, ...] = ()) -> np.ndarray:
    env = environment(tensors)
    address = predicate_function(expr, dtype_names(tensors), place.geo, isa)
    place.set(n_predicates=1, predicates=np.array([address, env.ctypes.data], np.int64))
    bits = place.bits_tile()
    shown = place.run(build_mask_bits, isa, bits.ctypes.data)
    if shown != PARTIAL:
        return np.full((place.nr, place.nb), shown != NONE)
    return place.from_tile(place.unpack(bits))


@every_geometry
@pytest.mark.parametrize("name", PREDICATES)
def test_predicates(host: Host, name: str) -> None:
    isa, geo = host
    place = tile_place(geo)
    expr = trace(PREDICATES[name], MASK_NAMES)
    expected = np.broadcast_to(evaluate(expr, grid(place)), (place.nr, place.nb))
    np.testing.assert_array_equal(run_predicate(place, isa, expr), expected)


@every_geometry
def test_predicates_read_tensors_of_any_integer_type(host: Host) -> None:
    """Document ids and tables; indices beyond the tensor are clamped, and nothing behind it is read."""
    isa, geo = host
    rng = np.random.default_rng(0)
    for dtype in (np.bool_, np.int8, np.uint8, np.int16, np.int32, np.int64):
        ids = guarded(rng.integers(0, 2, (2, 11)).astype(dtype))
        table = guarded(rng.integers(0, 200, 9).astype(dtype))[::2]

        def compare(b: Any, h: Any, q: Any, j: Any, ids: Any, table: Any) -> Any:
            return (ids[b, j] == ids[b][q - j]) | (table[j - 5] == table[2 * q])

        def either(b: Any, h: Any, q: Any, j: Any, ids: Any, table: Any) -> Any:
            return ids[b, j] | table[q]

        place = tile_place(geo)
        expr = trace(either if dtype == np.bool_ else compare, MASK_NAMES, (ids, table))
        expected = np.broadcast_to(evaluate(expr, grid(place), (ids, table)), (place.nr, place.nb))
        np.testing.assert_array_equal(run_predicate(place, isa, expr, (ids, table)), expected)


# ---- scores ----------------------------------------------------------------------------------------------------------
SCORES: dict[str, Callable[..., Any]] = {
    "identity": lambda s, b, h, q, j: s,
    "relative": lambda s, b, h, q, j: s + 0.25 * (q - j) / (h + 1),
    "functions": lambda s, b, h, q, j: kmath.tanh(s / 3) * 2 + kmath.exp(-abs(s)) + kmath.log(1 + s * s),
    "root": lambda s, b, h, q, j: kmath.sqrt(s * s + 1) - kmath.minimum(s, 0.5) + kmath.maximum(s, j * 0.1),
    "hide": lambda s, b, h, q, j: kmath.where(j <= q, s * (1 + b), -math.inf),
    "constant": lambda s, b, h, q, j: 1.5,
    "integer": lambda s, b, h, q, j: q - j,
    "huge": lambda s, b, h, q, j: kmath.minimum(s, 1e300),
}


class Call:
    """One call with user scores: their functions, environments, and tiles."""

    def __init__(self, place: Place, isa: Isa, exprs: list[Expr], tensors: tuple[Any, ...] = (), wanted: bool = True):
        geo = place.geo
        self.place, self.isa = place, isa
        self.gradients = [self.gradient(t) if wanted else None for t in tensors]
        names = dtype_names(tensors)
        records, self.environments = [], []
        for expr in exprs:
            env = environment(tensors, self.gradients, score_tensors_function(expr, names, geo, isa))
            forward = score_function(expr, names, geo, isa)
            backward = score_backward_function(derivative(expr), names, geo, isa)
            self.environments.append(env)
            records.append([forward, backward, env.ctypes.data])
        place.set(n_scores=len(exprs), scores=np.array(records, np.int64))

    def gradient(self, tensor: Any) -> np.ndarray | None:
        """Zeros in a layout of their own."""
        if "float" not in str(tensor.dtype):
            return None
        shape = tuple(tensor.shape)
        return np.zeros(shape[::-1], numpy_type(self.place.geo)).T

    def forward(self, s: np.ndarray) -> np.ndarray:
        tile = self.place.score_tile(s)
        self.place.run(build_scores_forward, self.isa, tile.ctypes.data)
        return self.place.from_tile(tile)

    def backward(self, s: np.ndarray, ds: np.ndarray, stage: int) -> np.ndarray:
        tiles = [self.place.score_tile(x) for x in (s, ds, np.full_like(s, np.nan))]
        self.place.run(build_scores_backward, self.isa, *(t.ctypes.data for t in tiles), stage)
        return self.place.from_tile(tiles[1])


def close(got: np.ndarray, expected: np.ndarray, digits: float = 64) -> None:
    eps = np.finfo(got.dtype).eps
    np.testing.assert_allclose(got, expected, rtol=digits * eps, atol=digits * eps)


@every_geometry
@pytest.mark.parametrize("name", SCORES)
def test_scores(host: Host, name: str) -> None:
    isa, geo = host
    rng = np.random.default_rng(1)
    place = tile_place(geo)
    s = (rng.standard_normal((place.nr, place.nb)) * 3).astype(numpy_type(geo))
    ds = rng.standard_normal(s.shape).astype(s.dtype)
    ds[0, 0] = 0.0
    expr = trace(SCORES[name], SCORE_NAMES)
    call = Call(place, isa, [expr])
    env = grid(place, s.astype(np.float64))
    close(call.forward(s), np.broadcast_to(evaluate(expr, env), s.shape).astype(s.dtype))
    factor = np.broadcast_to(evaluate(derivative(expr), env), s.shape)
    close(call.backward(s, ds, USER), (ds * factor).astype(s.dtype))


@every_geometry
def test_scores_chain_behind_the_built_in_ones(host: Host) -> None:
    isa, geo = host
    rng = np.random.default_rng(2)
    place = tile_place(geo).set(softcap=6.0)
    s = (rng.standard_normal((place.nr, place.nb)) * 3).astype(numpy_type(geo))
    ds = rng.standard_normal(s.shape).astype(s.dtype)
    exprs = [trace(SCORES[n], SCORE_NAMES) for n in ("functions", "relative", "root")]
    call = Call(place, isa, exprs)
    x = 6.0 * np.tanh(s.astype(np.float64) / 6.0)
    factor: Any = 1.0
    for expr in exprs:
        factor = factor * evaluate(derivative(expr), grid(place, x))
        x = evaluate(expr, grid(place, x))
    close(call.forward(s), x)
    close(call.backward(s, ds, USER), ds * factor, 256)


@every_geometry
def test_a_hidden_pair_stays_out_and_a_visible_nan_shows(host: Host) -> None:
    isa, geo = host
    place = tile_place(geo)
    s = np.full((place.nr, place.nb), np.nan, numpy_type(geo))
    ds = np.zeros_like(s)
    ds[0, 0] = 1.0
    table = np.ones(3, np.float32)
    call = Call(place, isa, [trace(lambda s, b, h, q, j, t: s * s * t[j - 5], SCORE_NAMES, (table,))], (table,))
    got = call.backward(s, ds, USER_TENSORS)
    assert np.isnan(got[0, 0])
    assert not got.ravel()[1:].any()
    assert np.isnan(call.gradients[0][0])
    assert not call.gradients[0][1:].any()


# ---- tensors of scores -----------------------------------------------------------------------------------------------
def float_tensors(kind: str) -> list[Any]:
    if kind == "numpy":
        rng = np.random.default_rng(3)
        return [guarded(rng.standard_normal((3, 9))), guarded(rng.standard_normal((2, 1, 3, 2)).astype(np.float16))]
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(18, 3, generator=generator)[::2].T  # strided in both axes
    return [table, torch.randn(2, 1, 3, 2, generator=generator).to(torch.bfloat16)]


def table_score(s: Any, b: Any, h: Any, q: Any, j: Any, table: Any, other: Any) -> Any:
    return s * (1 + table[h, q - j + 4]) + kmath.tanh(other[b, 0, h, j % 2] * s) * table[0][q]


@every_geometry
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_tensors_and_their_gradients(host: Host, kind: str) -> None:
    isa, geo = host
    rng = np.random.default_rng(5)
    place = tile_place(geo)
    s = (rng.standard_normal((place.nr, place.nb)) * 2).astype(numpy_type(geo))
    ds = rng.standard_normal(s.shape).astype(s.dtype)
    tensors = tuple(float_tensors(kind))
    expr = trace(table_score, SCORE_NAMES, tensors)
    call = Call(place, isa, [expr], tensors)

    leaves = [torch.as_tensor(t).to(torch.float64).clone().requires_grad_() for t in tensors]
    score = torch.tensor(s.astype(np.float64), requires_grad=True)
    env = {n: torch.as_tensor(v) for n, v in grid(place).items()}
    out = evaluate(expr, {**env, "s": score}, leaves, torch)
    out.backward(torch.tensor(ds.astype(np.float64)))

    close(call.forward(s), out.detach().numpy())
    close(call.backward(s, ds, USER_TENSORS), score.grad.numpy(), 256)
    for got, leaf in zip(call.gradients, leaves, strict=True):
        close(got, leaf.grad.numpy(), 512)
    before = [g.copy() for g in call.gradients]
    call.backward(s, ds, USER)
    for got, old in zip(call.gradients, before, strict=True):
        np.testing.assert_array_equal(got, old)


@every_geometry
def test_an_empty_tensor_and_an_unwanted_gradient_are_left_alone(host: Host) -> None:
    isa, geo = host
    place = tile_place(geo)
    s = np.ones((place.nr, place.nb), numpy_type(geo))
    for tensor, wanted in itertools.product((np.zeros((0, 3)), np.full((1, 1), 2.0)), (True, False)):
        expr = trace(lambda s, b, h, q, j, t: s + t[q, j], SCORE_NAMES, (tensor,))
        call = Call(place, isa, [expr], (tensor,), wanted)
        value = 2.0 if tensor.size else 0.0
        np.testing.assert_array_equal(call.forward(s), s + value)
        np.testing.assert_array_equal(call.backward(s, s, USER_TENSORS), s)
        if wanted and tensor.size:
            assert call.gradients[0].item() == place.nr * place.nb
        np.testing.assert_array_equal(call.forward(s), s + value)


def test_scalars_and_extreme_integers() -> None:
    isa, geo = geometries()[0]
    place = tile_place(geo)
    numbers, three = np.array([-(2**31), 2**31 - 1, -(2**40), 2**40, 0]), np.array(3, np.int32)

    def predicate(b: Any, h: Any, q: Any, j: Any, numbers: Any, three: Any) -> Any:
        # -2^31 // -1 wraps around to itself; an int64 beyond int32 is the nearest end of it; anything % 0 is 0
        quotient = numbers[j - 5] // (three - 4)
        return (quotient <= numbers[4]) & (numbers[2] % (j - j) == 0) & (numbers[2] == numbers[0])

    expr = trace(predicate, MASK_NAMES, (numbers, three))
    assert run_predicate(place, isa, expr, (numbers, three)).all()


def test_what_cannot_be_compiled_is_refused_with_names() -> None:
    isa, geo = geometries()[0]
    with pytest.raises(TypeError, match="must return a bool; got kind int"):
        predicate_function(trace(lambda b, h, q, j: q, MASK_NAMES), (), geo, isa)
    with pytest.raises(TypeError, match=r"tensors\[0\] must have one of the types .*; got complex64"):
        score_function(trace(lambda s, b, h, q, j: s, SCORE_NAMES), ("complex64",), geo, isa)
    with pytest.raises(ValueError, match="at most 4 axes; got shape"):
        environment((np.zeros((1,) * 5),))
    with pytest.raises(ValueError, match=r"gradients\[0\] must have the tensor's shape \(2,\); got \(3,\)"):
        environment((np.zeros(2),), (np.zeros(3),))


def test_the_same_function_compiles_once() -> None:
    isa, geo = geometries()[0]
    expr = trace(PREDICATES["causal"], MASK_NAMES)
    again = trace(lambda b, h, q, k: k <= q, MASK_NAMES)
    assert predicate_function(expr, (), geo, isa) == predicate_function(again, (), geo, isa)
