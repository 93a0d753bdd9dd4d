"""Instruction sets, environment variables, and the compiler with its object cache."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kilat import config
from kilat.backends import store
from kilat.backends.cpu import isa as isa_module
from kilat.backends.cpu import jit, pool
from kilat.backends.cpu.emit import I64, PTR, Module
from kilat.backends.cpu.isa import Isa, host_isa, supported_isas

ISA = supported_isas()[-1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that has forgotten what it compiled."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KILAT_CACHE_DIR", str(folder))
    monkeypatch.setattr(jit._state, "addresses", {})
    return folder


def adds(number: int) -> Callable[[], str]:
    """IR of a kernel that adds `number` to an int64."""

    def build() -> str:
        module = Module()
        with module.function("worker", [PTR], exported=True) as f:
            p = f.args[0]
            f.store(f.load(I64, p) + number, p)
        return module.text()

    return build


def value_after(address: int) -> int:
    x = np.array([100])
    pool.run(address, x.ctypes.data, 1)
    return int(x[0])


def compile_again(build: Callable[[], str] | None = None, name: str = "adds", isa: Isa = ISA) -> tuple[str, int]:
    """Compile in a process that has forgotten everything; says where the code came from, and what it computes."""
    jit._state.addresses.clear()
    before = jit.stats()
    address = jit.compile_module(build or adds(1), name, ["worker"], isa)["worker"]
    after = jit.stats()
    origin = {(1, 0): "compiled", (0, 1): "loaded"}
    return origin[after.compiled - before.compiled, after.loaded - before.loaded], value_after(address)


# ---- environment -----------------------------------------------------------------------------------------------------
def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert config.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("KILAT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.cache_dir() == tmp_path / "kilat"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.cache_dir() == tmp_path / ".cache" / "kilat"


def test_instruction_set_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KILAT_CPU_ISA", raising=False)
    assert host_isa() == supported_isas()[0]
    for isa in supported_isas():
        monkeypatch.setenv("KILAT_CPU_ISA", isa.name.upper())
        assert host_isa() == isa
    monkeypatch.setenv("KILAT_CPU_ISA", "avx3")
    with pytest.raises(ValueError, match=r"must be one of amx, .*, generic \(unset it for the best\); got 'avx3'"):
        host_isa()


def test_unsupported_instruction_set_names_the_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILAT_CPU_ISA", "avx2")
    monkeypatch.setattr(isa_module, "supported_isas", lambda: (ISA,))
    with pytest.raises(ValueError, match=r"one that this machine supports \(generic\); got 'avx2'"):
        host_isa()


@pytest.mark.parametrize(("text", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_check_values(monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool) -> None:
    monkeypatch.delenv("KILAT_CHECK_VALUES", raising=False)
    if text is not None:
        monkeypatch.setenv("KILAT_CHECK_VALUES", text)
    assert config.check_values() is expected
    monkeypatch.setenv("KILAT_CHECK_VALUES", "yes")
    with pytest.raises(ValueError, match="KILAT_CHECK_VALUES must be 0 or 1; got 'yes'"):
        config.check_values()


def test_instruction_sets_are_consistent() -> None:
    names = [isa.name for isa in supported_isas()]
    assert names == [n for n in config.CPU_ISAS if n in names]
    assert names[-1] == "generic"
    for isa in supported_isas():
        assert isa.lanes64 * 2 == isa.lanes32
        assert isa.has_amx <= isa.has_dot_bf16
        switched_on = {f[1:] for f in isa.features.split(",") if f.startswith("+")}
        assert not isa.has_amx or "amx-bf16" in switched_on
        if isa.name == "avx2":
            assert not any(f.startswith(("avx512", "amx")) for f in switched_on)
        if isa.name in ("avx512", "avx512_bf16"):
            assert not any(f.startswith("amx") for f in switched_on)
            assert ("avx512bf16" in switched_on) == isa.has_dot_bf16


def test_tiles_need_the_permission_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa_module, "_tiles_allowed", lambda: False)
    names = [isa.name for isa in supported_isas.__wrapped__()]
    assert "amx" not in names
    assert names[-1] == "generic"


# ---- compiling and the cache -----------------------------------------------------------------------------------------
def test_a_kernel_compiles_once_and_then_loads(cache: Path) -> None:
    assert compile_again() == ("compiled", 101)
    (entry,) = cache.iterdir()
    assert list(store.entries()) == [entry]
    assert compile_again() == ("loaded", 101)

    def never() -> str:
        raise AssertionError("a known kernel is not built again")

    assert compile_again(never) == ("loaded", 101)
    assert jit.compile_module(never, "adds", ["worker"], ISA)  # from this process


def test_every_part_of_the_key_counts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_again(adds(1), "adds 1") == ("compiled", 101)
    assert compile_again(adds(2), "adds 2") == ("compiled", 102)
    for isa in supported_isas()[:-1]:
        assert compile_again(adds(3), "adds 1", isa) == ("compiled", 103)
    if ISA.features:
        assert compile_again(adds(4), "adds 1", replace(ISA, features="")) == ("compiled", 104)
    monkeypatch.setattr(jit, "_source_hash", lambda: b"edited")
    assert compile_again(adds(5), "adds 1") == ("compiled", 105)
    monkeypatch.setattr(jit.llvmlite, "__version__", "999")
    assert compile_again(adds(6), "adds 1") == ("compiled", 106)
    assert len(list(cache.iterdir())) == len(supported_isas()) + 3 + bool(ISA.features)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "header", "magic", "longer"])
def test_a_damaged_entry_is_rebuilt(cache: Path, damage: str) -> None:
    compile_again()
    (entry,) = cache.iterdir()
    data = bytearray(entry.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    elif damage == "magic":
        data[0] ^= 1
    cut = {"truncated": -7, "empty": -len(data), "header": 20 - len(data)}.get(damage, len(data))
    entry.write_bytes(bytes(data[:cut]) + (b"x" if damage == "longer" else b""))
    assert compile_again() == ("compiled", 101)
    assert compile_again() == ("loaded", 101)


def test_an_entry_appears_whole_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jit.os, "replace", full_disk)
        assert compile_again() == ("compiled", 101)
        assert list(cache.iterdir()) == []
    assert compile_again() == ("compiled", 101)
    assert len(list(cache.iterdir())) == 1


def test_without_a_writable_folder_kernels_still_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    assert compile_again() == ("compiled", 101)
    assert compile_again() == ("compiled", 101)
    assert list(store.entries()) == []
    monkeypatch.setenv("KILAT_CACHE_DIR", "/proc/nowhere")
    assert compile_again() == ("compiled", 101)


def test_an_error_names_the_kernel() -> None:
    with pytest.raises(RuntimeError, match="LLVM refuses the kernel 'nonsense' for generic"):
        jit.compile_module(lambda: "define nonsense", "nonsense", ["worker"], ISA)
    with pytest.raises(RuntimeError, match="expected instruction opcode"):
        jit.compile_module(lambda: "define void @worker() { wrong }", "wrong", ["worker"], ISA)


def test_threads_that_want_one_kernel_compile_it_once() -> None:
    jit._state.addresses.clear()
    before, found, barrier = jit.stats(), [0] * 8, threading.Barrier(8)

    def ask(i: int) -> None:
        barrier.wait()
        found[i] = jit.compile_module(adds(7), "shared", ["worker"], ISA)["worker"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(found)) == 1
    assert value_after(found[0]) == 107
    assert jit.stats().compiled == before.compiled + 1
    assert jit.stats().compile_seconds > before.compile_seconds


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_share_a_cold_cache(cache: Path) -> None:
    children: list[int] = []
    for _ in range(3):
        pid = fork()
        if pid == 0:
            results = [compile_again(adds(i), f"adds {i}")[1] for i in range(20)]
            os._exit(0 if results == list(range(100, 120)) else 1)
        children.append(pid)
    assert [exit_code_of(pid) for pid in children] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 20  # and no temporary file is left
    assert compile_again(adds(5), "adds 5") == ("loaded", 105)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_compiles_although_a_thread_held_the_lock() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow() -> str:
        entered.set()
        leave.wait(30)
        return adds(1)()

    thread = threading.Thread(target=lambda: jit.compile_module(slow, "slow", ["worker"], ISA))
    thread.start()
    entered.wait(30)
    pid = fork()
    if pid == 0:
        address = jit.compile_module(adds(2), "in the child", ["worker"], ISA)["worker"]
        os._exit(0 if value_after(address) == 102 else 1)
    leave.set()
    thread.join()
    assert exit_code_of(pid) == 0


def fork() -> int:
    """os.fork without the warning that the parent has threads, which is what these tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def exit_code_of(pid: int, seconds: float = 60.0) -> int:
    """The child's exit code; a child that hangs is killed, which gives -9."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
