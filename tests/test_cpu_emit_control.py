"""The emitter: loops, branches, calls, memory and machine code, on every instruction set of this machine."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from emitted import ISAS, NUMPY_TYPES, WIDTHS, run_module

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
)
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.params import Params, float_bits


@pytest.fixture(params=WIDTHS, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    return request.param


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
