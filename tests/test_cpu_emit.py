"""The emitter: every operator and construct against NumPy, on every instruction set of this machine."""

from __future__ import annotations

import ctypes
import mmap
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from emitted import ISAS, NUMPY_TYPES, WIDTHS, evaluate, run_module
from hypothesis import given
from hypothesis import strategies as st

from kilat.backends.cpu import isa as isa_module
from kilat.backends.cpu import jit, math
from kilat.backends.cpu.emit import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    PTR,
    VOID,
    Function,
    Module,
    Type,
    Value,
    literal,
)
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.params import Params, float_bits

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


# ---- control ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bounds", [(0, 10, 1), (3, 20, 4), (5, 5, 1), (7, 2, 1), (-9, 9, 5)])
def test_range_counts_like_python(isa: Isa, bounds: tuple[int, int, int]) -> None:
    limits, out = np.array(bounds), np.zeros(3, np.int64)

    def write(_: Module, f: Function) -> None:
        p, o = f.load(PTR, f.args[0]), f.load(PTR, f.args[0], 8)
        start, stop, step = (f.load(I64, p, 8 * i) for i in range(3))
        count, total, last = (f.var(I64, 0) for _ in range(3))
        with f.range(start, stop, step) as i:
            count.add(1)
            with f.range(0, i) as j:
                total.add(j)
            last.set(i)
        for i, v in enumerate((count, total, last)):
            f.store(v.get(), o, 8 * i)

    run_module("range", isa, write, limits, out)
    visited = list(range(*bounds))
    assert list(out) == [len(visited), sum(j for i in visited for j in range(i)), visited[-1] if visited else 0]


def test_branches_and_loops_that_leave(isa: Isa) -> None:
    """Collatz: steps until 1, by `forever`, `leave`, `when` and `unless`."""
    n = np.arange(1, 60)
    out = np.zeros_like(n)

    def write(_: Module, f: Function) -> None:
        x, o = f.load(PTR, f.args[0]), f.load(PTR, f.args[0], 8)
        with f.range(0, 8 * len(n), 8) as i:
            now, steps = f.var(I64, f.load(I64, x, i)), f.var(I64, 0)
            with f.forever() as end:
                f.leave(end, now.get().eq(1))
                v = now.get()
                odd = (v & 1).ne(0)
                with f.when(odd):
                    now.set(v * 3 + 1)
                with f.unless(odd):
                    now.set(v // 2)
                steps.add(1)
            f.store(steps.get(), o, i)

    def collatz(v: int) -> int:
        return 0 if v == 1 else 1 + collatz(3 * v + 1 if v % 2 else v // 2)

    run_module("collatz", isa, write, n, out)
    assert list(out) == [collatz(int(v)) for v in n]


def test_calls(isa: Isa) -> None:
    x, out = np.array([1.5, -2.0, 3.0, 4.0]), np.zeros(6)
    libm = ctypes.CDLL(None)
    pointer = np.array([ctypes.cast(libm.atoi, ctypes.c_void_p).value, 0])
    text = np.frombuffer(b"1234\0", np.uint8)

    def write(module: Module, f: Function) -> None:
        with module.function("axpy", [F64, F64.vec(4), F64], F64.vec(4)) as g:
            a, v, b = g.args
            g.ret_value(g.fma(v, a, b))
        with module.function("put", [PTR, F64]) as g:
            g.store(g.args[1], g.args[0])
        p = f.args[0]
        source, o, function, string = (f.load(PTR, p, 8 * i) for i in range(4))
        axpy, put = module.functions
        f.store(f.call(axpy, 2.0, f.load(F64.vec(4), source), 1.0), o)
        f.call(put, o.at(32), 9.0)
        number = f.call_pointer(f.load(PTR, function), I32, string)
        f.store(f.cast("sitofp", number, F64), o, 40)

    run_module("calls", isa, write, x, out, pointer, text)
    assert list(out) == [4.0, -3.0, 7.0, 9.0, 9.0, 1234.0]


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("t", [F32, F64, I32, I16, I8], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_masked_access_touches_no_hidden_lane(isa: Isa, t: Type, count: int) -> None:
    """`count` elements end where an unreadable page begins."""
    page, lanes = mmap.PAGESIZE, 8
    region = mmap.mmap(-1, 2 * page)
    view = np.frombuffer(region, np.uint8)
    base = view.ctypes.data
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(base + page), ctypes.c_size_t(page), 0) == 0
    data = view[page - count * t.bytes : page].view(NUMPY_TYPES[t])
    data[:] = np.arange(1, count + 1)
    start, n, out = np.array([base + page - count * t.bytes]), np.array([count]), np.zeros(lanes, NUMPY_TYPES[t])

    def write(_: Module, f: Function) -> None:
        p, number, o = (f.load(PTR, f.args[0], 8 * i) for i in range(3))
        place, vec = f.load(PTR, p), t.vec(lanes)
        mask = f.iota(I64.vec(lanes)) < f.load(I64, number)
        x = f.masked_load(vec, place, mask, 77)
        f.store(x, o)
        f.masked_store(x + x, place, mask)

    run_module(f"masked {t}", isa, write, start, n, out)
    expected = np.full(lanes, 77)
    expected[:count] = np.arange(1, count + 1)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(data, 2 * np.arange(1, count + 1))
    assert libc.mprotect(ctypes.c_void_p(base + page), ctypes.c_size_t(page), 3) == 0


def test_offsets_count_bytes_and_need_no_alignment(isa: Isa) -> None:
    raw, out = np.arange(100, dtype=np.uint8), np.zeros(20, np.float32)
    raw[5:69] = np.arange(16, dtype=np.float32).view(np.uint8)

    def write(_: Module, f: Function) -> None:
        p, o = f.load(PTR, f.args[0]), f.load(PTR, f.args[0], 8)
        f.prefetch(p.at(64))
        f.store(f.load(F32.vec(16), p, 5, align=1), o.at(8), 4, align=1)
        f.store(f.load(F32, p.at(4).at(f.const(1, I64)), 8, align=1), o)

    run_module("offsets", isa, write, raw, out)
    assert list(out) == [2.0, 0.0, 0.0, *range(16), 0.0]


def test_parameters_have_names(isa: Isa) -> None:
    names = Params("count", "ratio", "out", "small")
    out = np.zeros(4)
    values = np.array([2**40, float_bits(0.1), out.ctypes.data, -7])

    def write(_: Module, f: Function) -> None:
        p = f.load(PTR, f.args[0])
        o = names.pointer(f, p, "out")
        f.store(f.cast("sitofp", names.read(f, p, "count"), F64), o)
        f.store(names.floating(f, p, "ratio", F64), o, 8)
        f.store(f.cast("fpext", names.floating(f, p, "ratio", F32), F64), o, 16)
        f.store(f.cast("sitofp", names.integer(f, p, "small"), F64), o, 24)

    run_module("parameters", isa, write, values)
    assert names.size == 4
    with pytest.raises(ValueError, match="must differ; got a more than once"):
        Params("a", "b", "a")
    assert list(out) == [2.0**40, 0.1, float(np.float32(0.1)), -7.0]


def test_functions_that_return_nothing_return_by_themselves() -> None:
    module = Module()
    with module.function("nothing", [PTR], VOID, exported=True):
        pass
    with module.function("flag", [I64], I1) as f:
        f.ret_value(f.args[0].eq(0))
    assert "ret void" in module.functions[0].text()
    assert module.functions[1].text().startswith("define internal i1 @flag(i64 %arg0)")


# ---- machine code, documentation -------------------------------------------------------------------------------------
def test_weaker_sets_really_do_without_wider_registers() -> None:
    """The same 64-byte arithmetic compiles to registers of the set's own width."""
    module = Module()
    with module.function("worker", [PTR], exported=True) as f:
        x = f.load(F32.vec(16), f.args[0])
        f.store(f.fma(x, x, 1.0), f.args[0])
    for isa in ISAS:
        text = jit.assembly(module.text(), isa)
        if isa.lanes32 == 4 and not isa.has_fma:
            assert "ymm" not in text
            assert "zmm" not in text
            assert "fmadd" not in text
        elif isa.lanes32 == 8:
            assert "ymm" in text
            assert "zmm" not in text
        elif isa.lanes32 == 16:
            assert "zmm" in text


@pytest.mark.parametrize("triple", ["aarch64-linux-gnu", "arm64-apple-macosx"])
def test_kernels_compile_for_neon(monkeypatch: pytest.MonkeyPatch, triple: str) -> None:
    """Without running: fused multiply-adds on four lanes, and no call of a library that is not there."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    monkeypatch.setattr(isa_module, "_is_x86", lambda: False)
    neon, vec, module = Isa("generic", "generic", "", 4, False, False), F32.vec(4), Module()
    with module.function("worker", [PTR], exported=True) as f:
        p = f.args[0]
        x = f.load(vec, p)
        for i, y in enumerate((math.exp(f, x), math.exp_full(f, x), math.log(f, x), math.tanh(f, x))):
            f.store(y, p, 16 * i)
        for i, half in enumerate((F16, BF16)):
            f.store(math.widen(f, math.narrow(f, x, half, neon), half, neon), p, 64 + 16 * i)
        words = math.philox4x32(f, [f.bitcast(x, I32.vec(4))] * 4, [f.const(1, I32)] * 2)
        f.store(words[0] ^ words[1] ^ words[2] ^ words[3], p, 96)
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=2, reloc="pic")
    text = machine.emit_assembly(jit._optimised(module.text(), machine))
    assert "fmla" in text
    assert not re.search(r"\bbl\s", text)


def test_the_example_of_the_documentation_runs() -> None:
    page = Path(__file__).parent.parent / "docs" / "emitter.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(page), "exec"), {"__name__": "example"})
