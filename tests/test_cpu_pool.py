"""Kernels on several threads: torch's OpenMP threads, Python threads, after a fork, from several callers at once."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cpu_jit import exit_code_of, fork

from kilat.backends.cpu import jit, pool
from kilat.backends.cpu.emit import I64, PTR, Module
from kilat.backends.cpu.isa import supported_isas

TASKS = 3000
THREADS = [1, 2, 3, 8]


def build() -> str:
    """Slots: counter, number of tasks, out, threads seen. out[i] = i * i once, by whoever draws task i."""
    module = Module()
    with module.function("worker", [PTR], exported=True) as f:
        p = f.args[0]
        out = f.load(PTR, p, 16)
        f.atomic_add(p.at(24), 1)
        with f.forever() as end:
            i = f.atomic_add(p, 1)
            f.leave(end, i >= f.load(I64, p, 8))
            place = out.at(i * 8)
            f.store(f.load(I64, place) + i * i, place)
    return module.text()


def address() -> int:
    return jit.compile_module(build, "test pool squares", ["worker"], supported_isas()[0])["worker"]


def run_squares(threads: int, kernel: int) -> int:
    """Run and check once; the number of threads that took part."""
    out = np.zeros(TASKS, np.int64)
    slots = np.array([0, TASKS, out.ctypes.data, 0])
    pool.run(kernel, slots.ctypes.data, threads)
    np.testing.assert_array_equal(out, np.arange(TASKS) ** 2)
    return int(slots[3])


@pytest.fixture
def python_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without an OpenMP runtime."""
    monkeypatch.setattr(pool, "_state", pool._State(searched=True))


@pytest.mark.parametrize("threads", THREADS)
def test_every_task_runs_once(threads: int) -> None:
    kernel = address()
    for _ in range(20):
        assert 1 <= run_squares(threads, kernel) <= threads


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is torch's runtime on Linux only")
def test_threads_are_those_of_torch() -> None:
    assert pool.kind() == "openmp"
    assert run_squares(2, address()) == 2
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    core = next(p for p in pool._libraries() if os.path.basename(p).startswith("libtorch_cpu"))
    runtimes = [ctypes.CDLL(p) for p in mapped]
    found = ctypes.cast(ctypes.CDLL(core).GOMP_parallel, ctypes.c_void_p).value
    assert found in [ctypes.cast(r.GOMP_parallel, ctypes.c_void_p).value for r in runtimes]


@pytest.mark.usefixtures("python_threads")
@pytest.mark.parametrize("threads", THREADS)
def test_python_threads_take_over(threads: int) -> None:
    kernel = address()
    assert pool.kind() == "python"
    for _ in range(20):
        assert 1 <= run_squares(threads, kernel) <= threads


@pytest.mark.usefixtures("python_threads")
def test_python_threads_end_with_the_interpreter() -> None:
    kernel = address()
    run_squares(2, kernel)
    executor = pool._state.executor
    assert executor is not None
    executor.shutdown()
    assert run_squares(4, kernel) == 1  # no more helpers: the caller does it all


@pytest.mark.parametrize("kind", ["openmp", "python"])
def test_several_callers_at_once(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "python":
        request.getfixturevalue("python_threads")
    kernel, errors = address(), []

    def caller() -> None:
        try:
            for _ in range(50):
                run_squares(3, kernel)
        except AssertionError as error:
            errors.append(error)

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    assert not errors


def test_the_gil_is_free_meanwhile() -> None:
    """A kernel that waits for Python to set a flag ends."""

    def waiting() -> str:
        module = Module()
        with module.function("worker", [PTR], exported=True) as f, f.forever() as end:
            f.leave(end, f.atomic_add(f.args[0], 0).ne(0))
        return module.text()

    kernel = jit.compile_module(waiting, "test pool waiting", ["worker"], supported_isas()[0])["worker"]
    for threads in (1, 2):
        flag = np.zeros(1, np.int64)
        thread = threading.Thread(target=pool.run, args=(kernel, flag.ctypes.data, threads))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        flag[0] = 1
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_runs_on_python_threads() -> None:
    kernel = address()
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    run_squares(4, kernel)
    pid = fork()
    if pid == 0:
        os._exit(0 if pool.kind() == "python" and run_squares(4, kernel) >= 1 else 1)
    assert exit_code_of(pid) == 0
    assert 1 <= run_squares(4, kernel) <= 4  # and the parent keeps its own


def test_a_runtime_that_comes_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_state", pool._State(searched=False))
    with monkeypatch.context() as patch:  # torch is not imported yet
        patch.delitem(sys.modules, "torch")
        patch.setattr(pool, "_libraries", list)
        assert pool.kind() == "python"
        assert 1 <= run_squares(2, address()) <= 2
    assert pool.kind() == ("openmp" if sys.platform == "linux" else "python")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process map of Linux")
def test_libraries_that_lack_the_entry_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc" in line)
    monkeypatch.setattr(pool, "_state", pool._State(searched=False))
    monkeypatch.setattr(pool, "_libraries", lambda: ["/nowhere/libgomp.so", libc])
    assert pool.kind() == "python"


def test_other_systems_use_python_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.sys, "platform", "darwin")
    assert pool._libraries() == []
