"""Vector mathematics of the CPU backend against NumPy in a wider format, on every instruction set of this machine."""

from __future__ import annotations

import math as pymath
from collections.abc import Callable

import numpy as np
import pytest
import torch
from emitted import ISAS, NUMPY_TYPES, WIDTHS, evaluate

from kilat.backends.cpu import math
from kilat.backends.cpu.emit import BF16, F16, F32, F64, I16, I32, Function, Type, Value
from kilat.backends.cpu.isa import Isa

LONG = np.longdouble
SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0])
# NaNs whose low bits are set: arithmetic on bits instead of numbers turns them into numbers
POISON = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00001, 0xFFC00001], np.uint32).view(np.float32)
FLOATS = pytest.mark.parametrize("t", [F32, F64], ids=str)


@pytest.fixture(params=WIDTHS, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    return request.param


EVERY_ISA = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


def apply(name: str, isa: Isa, t: Type, x: np.ndarray, function: Callable[[Function, Value], Value]) -> np.ndarray:
    lanes = isa.lanes32 if t == F32 else isa.lanes64
    return evaluate(f"{name} {t}", isa, lanes, [(t, x)], [t], lambda f, v: [function(f, v[0])])[0]


def ulps(got: np.ndarray, exact: np.ndarray) -> float:
    """Largest error in units of the last place of the exact result."""
    spacing = np.spacing(np.abs(exact).astype(got.dtype)).astype(LONG)
    return float(np.max(np.abs(got.astype(LONG) - exact) / spacing))


def grid(t: Type, *ranges: tuple[float, float]) -> np.ndarray:
    return np.concatenate([np.linspace(low, high, 60_001) for low, high in ranges]).astype(NUMPY_TYPES[t])


# ---- exponentials ----------------------------------------------------------------------------------------------------
def fit_exp(degree: int) -> np.ndarray:
    """c1, c2, ... of p(r) = 1 + c1 r + ... with the smallest max |p(r)/e^r - 1| on |r| <= ln(2)/2 and a margin."""
    half, count = pymath.log(2) / 2 * (1 + 2**-10), 2000
    r = half * np.cos((np.arange(count) + 0.5) * np.pi / count)
    basis, target = r[:, None] ** np.arange(1, degree + 1) / np.exp(r)[:, None], -np.expm1(-r)
    weight, best = np.ones(count), (np.inf, np.zeros(degree))
    for _ in range(400):
        root = np.sqrt(weight)
        c = np.linalg.lstsq(basis * root[:, None], target * root, rcond=None)[0]
        error = np.abs(basis @ c - target)
        if error.max() < best[0]:
            best = error.max(), c
        weight *= error / error.max() + 1e-3
        weight /= weight.max()
    return best[1]


@pytest.mark.parametrize("degree", [3, 5])
def test_exp_coefficients_are_the_fit(degree: int) -> None:
    np.testing.assert_allclose(math.EXP_COEFFICIENTS[degree], fit_exp(degree), rtol=1e-4 * 10.0 ** (3 - degree))


@pytest.mark.parametrize(("degree", "error"), [(3, 1.1e-4), (4, 3e-6), (5, 1e-7), (6, 2.1e-9), (11, 1e-17)])
def test_exp_coefficients_reach_their_error(degree: int, error: float) -> None:
    r = np.linspace(-pymath.log(2) / 2, pymath.log(2) / 2, 2001).astype(LONG)
    p = 1 + sum(LONG(c) * r**k for k, c in enumerate(math.EXP_COEFFICIENTS[degree], 1))
    assert np.max(np.abs(p / np.exp(r) - 1)) < max(error, 4 * float(np.finfo(LONG).eps))


@FLOATS
def test_exp_is_accurate_over_its_domain(isa: Isa, t: Type) -> None:
    x = grid(t, (-87.33, 80.0), (-1.0, 1.0)) if t == F32 else grid(t, (-708.0, 700.0), (-1.0, 1.0))
    exact = np.exp(x.astype(LONG))
    assert ulps(apply("exp", isa, t, x, math.exp), exact) < 1.5
    assert ulps(apply("exp_full", isa, t, x, math.exp_full), exact) < 1.5


@pytest.mark.parametrize(("degree", "error"), [(3, 1.1e-4), (4, 3.6e-6), (5, 7e-7), (6, 7e-7)])
def test_fast_exp_is_accurate_where_softmax_has_weight(isa: Isa, degree: int, error: float) -> None:
    x = grid(F32, (-10.0, 0.0))
    got = apply(f"fast exp {degree}", isa, F32, x, lambda f, v: math.exp(f, v, accurate=False, degree=degree))
    assert np.max(np.abs(got / np.exp(x.astype(LONG)) - 1)) < error


@FLOATS
def test_exp2_is_accurate_over_its_domain(isa: Isa, t: Type) -> None:
    x = grid(t, (-126.0, 126.0), (-1.0, 1.0)) if t == F32 else grid(t, (-1022.0, 1022.0), (-1.0, 1.0))
    assert ulps(apply("exp2", isa, t, x, math.exp2), np.exp2(x.astype(LONG))) < 1.5


@FLOATS
@pytest.mark.parametrize("accurate", [True, False])
def test_exp_is_0_below_the_normal_numbers_1_at_0_and_keeps_nan(isa: Isa, t: Type, accurate: bool) -> None:
    low = np.array([-87.4, -88.0, -103.0, -1e4, -3e38] if t == F32 else [-708.5, -745.0, -1e4, -1.7e308])
    x = np.concatenate([SPECIAL[3:], low, SPECIAL[:2], POISON])
    got = apply(f"exp {accurate}", isa, t, x, lambda f, v: math.exp(f, v, accurate=accurate))
    assert got[0] == 0
    assert (got[1:3] == 1).all()
    assert (got[3 : 3 + len(low)] == 0).all()
    assert not np.signbit(got[: 3 + len(low)]).any()
    assert np.isnan(got[3 + len(low) :]).all()


@FLOATS
def test_exp_full_overflows_and_underflows_like_numpy(isa: Isa, t: Type) -> None:
    x = np.concatenate([SPECIAL, POISON, grid(t, (-110.0, 95.0), (-750.0, 715.0))]).astype(NUMPY_TYPES[t])
    got = apply("exp_full", isa, t, x, math.exp_full)
    with np.errstate(all="ignore"):
        exact = np.exp(x.astype(np.float64 if t == F32 else LONG)).astype(NUMPY_TYPES[t])
    least = np.finfo(NUMPY_TYPES[t]).smallest_subnormal
    np.testing.assert_allclose(got, exact, rtol=3e-7 if t == F32 else 5e-16, atol=float(least))


# ---- logarithm, hyperbolic tangent -----------------------------------------------------------------------------------
@FLOATS
def test_log_is_accurate_over_the_whole_line(isa: Isa, t: Type) -> None:
    wide = np.geomspace(1e-44, 1e38, 60_001) if t == F32 else np.geomspace(5e-323, 1e308, 60_001)
    x = np.concatenate([wide.astype(NUMPY_TYPES[t]), grid(t, (0.5, 2.0), (0.999, 1.001))])
    assert ulps(apply("log", isa, t, x, math.log), np.log(x.astype(LONG))) < 1.1
    special = np.concatenate([SPECIAL, POISON, [-1.0, 1.0]])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(apply("log", isa, t, special, math.log), np.log(special))


@FLOATS
def test_tanh_is_accurate_over_the_whole_line(isa: Isa, t: Type) -> None:
    x = np.concatenate([grid(t, (-22.0, 22.0), (-0.6, 0.6)), np.geomspace(1e-37, 1.0, 10_001)])
    x = x.astype(NUMPY_TYPES[t])
    assert ulps(apply("tanh", isa, t, x, math.tanh), np.tanh(x.astype(LONG))) < 2.6
    special = np.concatenate([SPECIAL, POISON, [-1e30, 1e30]])
    got = apply("tanh", isa, t, special, math.tanh)
    np.testing.assert_array_equal(got, np.tanh(special))
    assert np.signbit(got[5])


@FLOATS
def test_absolute_copysign_and_sqrt(isa: Isa, t: Type) -> None:
    x, y = np.array([-2.5, 3.0, -0.0, np.inf, -np.inf, 0.3, 2.0]), np.array([1.0, -1.0, 0.0, -0.0, 5.0, -7.0, 2.0])
    x, y = x.astype(NUMPY_TYPES[t]), y.astype(NUMPY_TYPES[t])
    got = evaluate(
        f"abs {t}", isa, isa.lanes64, [(t, x), (t, y)], [t, t, t],
        lambda f, v: [math.absolute(f, v[0]), math.copysign(f, v[0], v[1]), math.sqrt(f, math.absolute(f, v[0]))],
    )  # fmt: skip
    for result, exact in zip(got, (np.abs(x), np.copysign(x, y), np.sqrt(np.abs(x))), strict=True):
        np.testing.assert_array_equal(result, exact)
    integers = np.array([-5, 0, 7, 1 - 2**31])
    got = evaluate("abs int", isa, 4, [(I32, integers)], [I32], lambda f, v: [math.absolute(f, v[0])])
    np.testing.assert_array_equal(got[0], np.abs(integers))


# ---- half types ------------------------------------------------------------------------------------------------------
@EVERY_ISA
@pytest.mark.parametrize("lanes", [0, 4, 16])
def test_every_half_widens_exactly(isa: Isa, lanes: int) -> None:
    bits = np.arange(65536).astype(np.uint16).view(np.int16)
    f16, bf16 = evaluate(
        "widen", isa, lanes, [(I16, bits)], [F32, F32],
        lambda f, v: [math.widen(f, v[0], F16, isa), math.widen(f, v[0], BF16, isa)],
    )  # fmt: skip
    np.testing.assert_array_equal(f16, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(bf16, torch.from_numpy(bits).view(torch.bfloat16).float().numpy())


@EVERY_ISA
@pytest.mark.parametrize("lanes", [0, 4, 16])
def test_narrow_rounds_to_nearest_even(isa: Isa, lanes: int) -> None:
    halves = np.arange(65536).astype(np.uint16)
    f16 = halves.view(np.float16).astype(np.float32)
    bf16 = (halves.astype(np.uint32) << 16).view(np.float32)
    rng = np.random.default_rng(0)
    with np.errstate(invalid="ignore"):  # signalling NaNs among them
        around = [np.nextafter(x, np.float32(d)) for x in (f16, bf16) for d in (np.inf, -np.inf)]
    ties = ((halves.astype(np.uint32) << 16) + 0x8000).view(np.float32)
    f16_ties = (f16.view(np.uint32) + 0x1000).view(np.float32)
    edges = np.array([65519.0, 65520.0, 2.0**-25, 1.5 * 2.0**-25], np.float32)
    random = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([f16, bf16, *around, ties, f16_ties, random, edges])
    got16, gotbf = evaluate(
        "narrow", isa, lanes, [(F32, x)], [I16, I16],
        lambda f, v: [math.narrow(f, v[0], F16, isa), math.narrow(f, v[0], BF16, isa)],
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(got16.view(np.float16), x.astype(np.float16))
    exact = torch.from_numpy(x).bfloat16().float().numpy()
    got = torch.from_numpy(gotbf).view(torch.bfloat16).float().numpy()
    if isa.has_dot_bf16:  # the instruction takes denormals for 0
        tiny = np.abs(x) < 2.0**-126
        got, exact = np.where(tiny & (got == 0), 0, got), np.where(tiny & (got == 0), 0, exact)
    np.testing.assert_array_equal(got, exact)


# ---- lanes, Philox ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("t", "w"), [(F32, 2), (F32, 4), (F32, 8), (F32, 16), (F64, 4), (F64, 8), (I32, 16)])
def test_transpose(isa: Isa, t: Type, w: int) -> None:
    rows = [np.arange(w) + 100 * i for i in range(w)]
    got = evaluate(f"transpose {t}", isa, w, [(t, r) for r in rows], [t] * w, math.transpose)
    np.testing.assert_array_equal(np.stack(got), np.stack(rows).T)


def philox_numpy(counter: np.ndarray, key: np.ndarray, rounds: int) -> np.ndarray:
    """Philox4x32 by the definition, counters [n, 4] and keys [n, 2]."""
    c, k = counter.astype(np.uint64), key.astype(np.uint64)
    word = np.uint64(0xFFFFFFFF)
    for i in range(rounds):
        if i:
            k = (k + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & word
        p0, p1 = c[:, 0] * np.uint64(0xD2511F53), c[:, 2] * np.uint64(0xCD9E8D57)
        shift = np.uint64(32)
        c = np.stack([(p1 >> shift) ^ c[:, 1] ^ k[:, 0], p1 & word, (p0 >> shift) ^ c[:, 3] ^ k[:, 1], p0 & word], 1)
    return c.astype(np.uint32)


# counter, key and answer of the known-answer file of Random123, ten rounds
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("lanes", [0, 4, 8, 16])
@pytest.mark.parametrize("rounds", [7, 10])
def test_philox_equals_its_definition(isa: Isa, lanes: int, rounds: int) -> None:
    counter = np.random.default_rng(1).integers(0, 2**32, (61, 4), dtype=np.uint32)
    key = np.random.default_rng(2).integers(0, 2**32, (61, 2), dtype=np.uint32)
    for i, (c, k, _) in enumerate(KNOWN_ANSWERS):
        counter[i], key[i] = c, k
    words = [(I32, column.view(np.int32)) for column in np.ascontiguousarray(np.hstack([counter, key]).T)]
    got = evaluate(
        f"philox {rounds}", isa, lanes, words, [I32] * 4, lambda f, v: math.philox4x32(f, v[:4], v[4:], rounds)
    )
    got = np.stack([g.view(np.uint32) for g in got], 1)
    np.testing.assert_array_equal(got, philox_numpy(counter, key, rounds))
    if rounds == 10:
        np.testing.assert_array_equal(got[:3], np.array([a for _, _, a in KNOWN_ANSWERS], np.uint32))


def test_philox_takes_scalars_among_vectors(isa: Isa) -> None:
    x = np.arange(64)

    def words(f: Function, v: list[Value]) -> tuple[Value, ...]:
        c1, c2, c3, k0, k1 = (f.const(c, I32) for c in (5, 6, 7, 8, 9))
        return math.philox4x32(f, [v[0], c1, c2, c3], [k0, k1])

    got = evaluate("philox scalar", isa, 16, [(I32, x)], [I32] * 4, words)
    counter = np.stack([x, np.full(64, 5), np.full(64, 6), np.full(64, 7)], 1)
    exact = philox_numpy(counter, np.full((64, 2), [8, 9]), 10)
    np.testing.assert_array_equal(np.stack([g.view(np.uint32) for g in got], 1), exact)
