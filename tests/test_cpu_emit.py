"""The emitter: every operator and value against NumPy, on every instruction set of this machine."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emitted import ISAS, NUMPY_TYPES, WIDTHS, evaluate
from hypothesis import given
from hypothesis import strategies as st

from kilat.backends.cpu.emit import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    PTR,
    Function,
    Module,
    Type,
    Value,
    literal,
)
from kilat.backends.cpu.isa import Isa

INTEGERS, FLOATS = (I8, I16, I32, I64), (F32, F64)


@pytest.fixture(params=WIDTHS, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    return request.param


def integers(t: Type) -> tuple[np.ndarray, np.ndarray]:
    """Edges against each other, then random pairs; no zero divisor and no overflowing quotient."""
    info = np.iinfo(NUMPY_TYPES[t])
    edges = np.array([info.min + 1, -8, -7, -3, -1, 1, 2, 3, 7, 8, info.max], NUMPY_TYPES[t])
    random = np.random.default_rng(0).integers(info.min + 1, info.max, (2, 90), dtype=NUMPY_TYPES[t])
    a = np.concatenate([np.repeat(edges, len(edges)), random[0]])
    b = np.concatenate([np.tile(edges, len(edges)), random[1]])
    return a, np.where(b == 0, 1, b).astype(a.dtype)


def truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotient rounded towards 0."""
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


# ---- operators -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("t", INTEGERS, ids=str)
@pytest.mark.parametrize("lanes", [0, 3, 8])
def test_integer_operators(isa: Isa, t: Type, lanes: int) -> None:
    a, b = integers(t)
    bits = t.bytes * 8
    unsigned = np.dtype(f"u{t.bytes}")

    def body(f: Function, v: list[Value]) -> list[Value]:
        x, y = v
        shift = y & (bits - 1)
        return [
            x + y, x - y, x * y, x // y, x % y, f.fdiv(x, y), x & y, x | y, x ^ y, x << shift, x >> shift,
            x.ashr(shift), -x, ~x, 3 + x, 3 - x, 3 * x, 100 // y, 100 % y, 5 & x, 5 | x, 5 ^ x,
            f.maximum(x, y), f.minimum(x, y), f.maximum(x, 2),
        ]  # fmt: skip

    s = b & (bits - 1)
    with np.errstate(over="ignore"):
        q, q100 = truncated(a, b), truncated(np.full_like(a, 100), b)
        right = (a.view(unsigned) >> s.view(unsigned)).view(a.dtype)
        expected = [
            a + b, a - b, a * b, q, a - q * b, a // b, a & b, a | b, a ^ b, a << s, right, a >> s, -a, ~a, 3 + a,
            3 - a, 3 * a, q100, 100 - q100 * b, 5 & a, 5 | a, 5 ^ a, np.maximum(a, b), np.minimum(a, b),
            np.maximum(a, 2),
        ]  # fmt: skip
    got = evaluate(f"integers {t}", isa, lanes, [(t, a), (t, b)], [t] * len(expected), body)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_array_equal(g, e, err_msg=f"operator {i}")


@pytest.mark.parametrize("t", FLOATS, ids=str)
@pytest.mark.parametrize("lanes", [0, 3, 8])
def test_float_operators(isa: Isa, t: Type, lanes: int) -> None:
    special = np.array([0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, 1e-40, 3e38], NUMPY_TYPES[t])
    random = np.random.default_rng(0).standard_normal((2, 50)).astype(special.dtype)
    a = np.concatenate([np.repeat(special, len(special)), random[0]])
    b = np.concatenate([np.tile(special, len(special)), random[1]])

    def body(f: Function, v: list[Value]) -> list[Value]:
        x, y = v
        return [x + y, x - y, x * y, x / y, -x, 2.5 + x, 2.5 - x, 2.5 * x, 2.5 / x, f.maximum(x, y), f.minimum(x, y)]

    with np.errstate(all="ignore"):
        k = a.dtype.type(2.5)
        larger, smaller = np.where(a > b, a, b), np.where(a < b, a, b)
        expected = [a + b, a - b, a * b, a / b, -a, k + a, k - a, k * a, k / a, larger, smaller]
    got = evaluate(f"floats {t}", isa, lanes, [(t, a), (t, b)], [t] * len(expected), body)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_array_equal(g, e, err_msg=f"operator {i}")
        real = ~np.isnan(e)
        np.testing.assert_array_equal(np.signbit(g[real]), np.signbit(e[real]), err_msg=f"sign of operator {i}")


@pytest.mark.parametrize("t", FLOATS, ids=str)
def test_fma_rounds_once_where_the_machine_can(isa: Isa, t: Type) -> None:
    a, b, c = np.random.default_rng(0).standard_normal((3, 200)).astype(NUMPY_TYPES[t])
    got = evaluate("fma", isa, 8, [(t, a), (t, b), (t, c)], [t], lambda f, v: [f.fma(v[0], v[1], v[2])])[0]
    wide = np.longdouble if t == F64 else np.float64
    once = (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)
    np.testing.assert_allclose(got, once if isa.has_fma else a * b + c, rtol=1e-7 if t == F32 else 3e-16)
    if isa.has_fma and t == F32:  # the exact sum of products fits a double but for rare double roundings
        assert np.count_nonzero(got != once) <= 1


@pytest.mark.parametrize("t", [I32, I64, F32, F64], ids=str)
@pytest.mark.parametrize("lanes", [0, 4, 16])
def test_comparisons_and_select(isa: Isa, t: Type, lanes: int) -> None:
    if t.is_float:
        edges = np.array([-1.0, 0.0, -0.0, 2.0, np.inf, -np.inf, np.nan], NUMPY_TYPES[t])
    else:
        edges = np.array([-5, -1, 0, 1, 7], NUMPY_TYPES[t])
    a, b = np.repeat(edges, len(edges)), np.tile(edges, len(edges))

    def body(f: Function, v: list[Value]) -> list[Value]:
        x, y = v
        tests = [x < y, x <= y, x > y, x >= y, x.eq(y), x.ne(y), x < 1, ~(x < y), (x < y) | x.eq(y)]
        if not t.is_float:
            tests += [x.ult(y), x.uge(y)]
        one = f.const(1, I32)
        return [f.select(c, one, 0) for c in tests]

    ops = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
    expected = [op(a, b) for op in ops] + [a < 1, ~(a < b), (a < b) | (a == b)]
    if not t.is_float:
        unsigned = np.dtype(f"u{t.bytes}")
        expected += [a.view(unsigned) < b.view(unsigned), a.view(unsigned) >= b.view(unsigned)]
    got = evaluate(f"compare {t}", isa, lanes, [(t, a), (t, b)], [I32] * len(expected), body)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_array_equal(g, e, err_msg=f"comparison {i}")


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_any_and_all(isa: Isa, lanes: int) -> None:
    x = np.zeros((4, lanes), np.int32)
    x[1, lanes - 1] = x[2] = 1
    x[3, 1:] = 1

    def body(f: Function, v: list[Value]) -> list[Value]:
        mask = v[0].ne(0)
        return [f.splat(f.select(c, f.const(1, I32), 0), lanes) for c in (f.any(mask), f.all(mask))]

    some, every = (g.reshape(4, lanes)[:, 0] for g in evaluate("any", isa, lanes, [(I32, x.ravel())], [I32] * 2, body))
    assert list(some) == [0, 1, 1, 1]
    assert list(every) == [0, 0, 1, 0]


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip
LEAVES = st.sampled_from(["x", "y"]) | st.integers(-(2**31), 2**31 - 1)
TREES = st.recursive(LEAVES, lambda t: st.tuples(st.sampled_from([*BINARY, "min", "max", "fdiv"]), t, t), max_leaves=12)


@given(tree=TREES)
def test_random_integer_expressions(tree: Any) -> None:
    x, y = integers(I32)

    def emitted(f: Function, v: list[Value], node: Any) -> Value:
        if isinstance(node, str):
            return v["xy".index(node)]
        if isinstance(node, int):
            return f.const(node, v[0].type)
        name, a, b = node[0], emitted(f, v, node[1]), emitted(f, v, node[2])
        if name == "fdiv":
            return f.fdiv(a, (b & 15) | 1)
        return {"min": f.minimum, "max": f.maximum}.get(name, BINARY.get(name))(a, b)

    def computed(node: Any) -> np.ndarray:
        if isinstance(node, str):
            return {"x": x, "y": y}[node]
        if isinstance(node, int):
            return np.full_like(x, node)
        a, b = computed(node[1]), computed(node[2])
        if node[0] == "fdiv":
            return a // ((b & 15) | 1)
        return {"min": np.minimum, "max": np.maximum}.get(node[0], BINARY.get(node[0]))(a, b)

    got = evaluate(f"tree {tree}", ISAS[0], 8, [(I32, x), (I32, y)], [I32], lambda f, v: [emitted(f, v, tree)])[0]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, computed(tree))


# ---- values ----------------------------------------------------------------------------------------------------------
def test_conversions(isa: Isa) -> None:
    x = np.array([-3.7, 0.0, 2.5, 1e9, -1.0])

    def body(f: Function, v: list[Value]) -> list[Value]:
        lanes = v[0].type
        whole = f.cast("fptosi", v[0], lanes.like(I64))
        single, byte = f.cast("fptrunc", v[0], lanes.like(F32)), f.cast("trunc", whole, lanes.like(I8))
        return [
            whole, f.cast("trunc", whole, lanes.like(I16)), f.cast("sext", byte, lanes.like(I32)),
            f.cast("zext", byte, lanes.like(I32)), f.cast("sitofp", whole, lanes.like(F32)),
            f.cast("fpext", single, lanes), f.bitcast(single, lanes.like(I32)),
        ]  # fmt: skip

    got = evaluate("conversions", isa, 4, [(F64, x)], [I64, I16, I32, I32, F32, F64, I32], body)
    whole, single = x.astype(np.int64), x.astype(np.float32)
    expected = [
        whole, whole.astype(np.int16), whole.astype(np.int8), whole.astype(np.uint8), whole.astype(np.float32),
        single.astype(np.float64), single.view(np.int32),
    ]  # fmt: skip
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_array_equal(g, e)


@pytest.mark.parametrize("lanes", [2, 8, 16])
def test_lanes(isa: Isa, lanes: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, lanes)).astype(np.float32)
    order = list(np.random.default_rng(1).permutation(lanes))

    def body(f: Function, v: list[Value]) -> list[Value]:
        a = v[0]
        bits = f.bitcast(a, a.type.like(I32))
        return [
            f.splat(f.extract(a, 1), lanes), f.insert(a, 7.0, lanes - 1), f.shuffle(a, None, order),
            f.shuffle(a, f.const(1.0, a.type), [i + lanes if i % 2 else i for i in range(lanes)]),
            f.cast("sitofp", f.iota(I32.vec(lanes)), a.type), a + f.extract(a, 0), f.reduce(a, "max"),
            f.reduce(a, "min"), f.reduce(a, "add"), f.bitcast(f.splat(f.reduce(bits, "or"), lanes), a.type),
            f.const_vector(range(lanes), F32), f.select(f.extract(a, 0) > 0.0, a, 5.0),
        ]  # fmt: skip

    got = [g.reshape(3, lanes) for g in evaluate("lanes", isa, lanes, [(F32, x.ravel())], [F32] * 12, body)]
    inserted, mixed = x.copy(), x.copy()
    inserted[:, -1], mixed[:, 1::2] = 7, 1
    total = x
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    ones = np.ones_like(x)
    expected = [
        x[:, 1:2] * ones, inserted, x[:, order], mixed, np.arange(lanes) * ones, x + x[:, :1],
        x.max(1, keepdims=True) * ones, x.min(1, keepdims=True) * ones, total * ones,
        np.bitwise_or.reduce(x.view(np.int32), 1, keepdims=True).view(np.float32) * ones, np.arange(lanes) * ones,
        np.where(x[:, :1] > 0, x, 5),
    ]  # fmt: skip
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_array_equal(g, e, err_msg=f"operation {i}")


def test_literals_are_exact_and_checked() -> None:
    assert literal(1.0, F32) == "0x3FF0000000000000"
    assert literal(0.1, F32) == literal(float(np.float32(0.1)), F64)
    assert literal(float("-inf"), F16) == "0xHFC00"
    assert literal(1 + 2**-8, BF16) == "0xR3F80"  # a tie, to even
    assert literal(1 + 3 * 2**-8, BF16) == "0xR3F82"
    assert literal(float("nan"), BF16) == "0xR7FC0"
    assert literal(0, PTR) == "null"
    assert literal(2**32 - 1, I32) == "4294967295"
    with pytest.raises(TypeError, match=r"must be an integer; got 0\.5"):
        literal(0.5, I32)
    with pytest.raises(OverflowError, match="must fit in 8 bits; got 256"):
        literal(256, I8)
    with pytest.raises(OverflowError, match="must fit in 4 bits; got -9"):
        literal(-9, Type("i4"))
    with pytest.raises(TypeError, match="the only literal pointer is 0"):
        literal(8, PTR)


def test_types_know_their_size_and_name() -> None:
    assert (F32.vec(16).bytes, I64.bytes, PTR.bytes, F16.vec(8).bytes) == (64, 8, 8, 16)
    assert (F32.vec(16).suffix, I64.suffix, BF16.vec(4).suffix) == ("v16f32", "i64", "v4bf16")
    assert str(F64.vec(4)) == "<4 x double>"
    assert F64.vec(4).like(I32) == I32.vec(4)
    assert F64.vec(4).scalar == F64


def test_misuse_is_refused_while_the_kernel_is_written() -> None:
    module = Module()
    with module.function("helper", [I64], I64) as helper:
        helper.ret_value(helper.args[0])
    with module.function("worker", [PTR, I64, F32]) as f:
        p, i, x = f.args
        with pytest.raises(TypeError, match="known only when the kernel runs"):
            bool(i < 3)
        with pytest.raises(TypeError, match="expected a value of type i64; got float"):
            _ = i + x
        with pytest.raises(TypeError, match="operator not defined for float"):
            _ = x % 2
        with pytest.raises(TypeError, match="comparison not defined for float"):
            x.ult(2)
        with pytest.raises(TypeError, match="takes 1 arguments; got 2"):
            f.call(helper, i, i)
        with pytest.raises(TypeError, match="does not say its type"):
            f.select(i < 3, 1.0, 2.0)
        with pytest.raises(TypeError, match="must be an integer"):
            _ = i + 0.5
        with pytest.raises(TypeError, match="expected a value of type i64; got ptr"):
            f.range(p, i).__enter__()
