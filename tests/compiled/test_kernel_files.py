"""A damaged cache of Triton's, a killed compilation and two at once: the same kernel, a recompilation or an error."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton.experimental.gluon")

from compiled import fake_cache, test_gluon_launching
from triton.runtime.errors import OutOfResources

from kilat.backends import kernel_files
from kilat.backends.gluon import _compat

needs_compiler = test_gluon_launching.needs_compiler


def started(folder: Path, what: str) -> subprocess.Popen[str]:
    """A process that shares the files in a folder."""
    path = os.pathsep.join([str(Path(fake_cache.__file__).parent), *sys.path])
    command = [sys.executable, fake_cache.__file__, str(folder), what]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, text=True, **pipes)


def result(process: subprocess.Popen[str]) -> Any:
    """What it printed."""
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(printed.splitlines()[-1])


@functools.cache
def damaged() -> Any:
    """What became of all kinds of damage."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return result(started(Path(folder), "damage"))


SEEN_AFTER_LAUNCH = ("cubin-truncated", "cubin-flipped", "json-other-number", "ptx-truncated", "digest-flipped")
"""What Triton and the driver take as it is: there the triton backend can only tell when it has launched."""


@needs_compiler
@pytest.mark.parametrize("backend", ["gluon", "triton"])
@pytest.mark.parametrize("kind", fake_cache.DAMAGE)
def test_damage(kind: str, backend: str) -> None:
    """Said, compiled anew, and well from then on; where the triton backend launched it, an error first."""
    good = damaged()["gluon"]["first"]["digest"]
    attempts = damaged()[backend][kind]
    first, *rest = attempts
    if backend == "triton" and kind in SEEN_AFTER_LAUNCH:
        assert "twice_kernel" in first["error"]
        assert "not to be trusted" in first["error"]
        first, *rest = rest
    else:
        assert kind == "json-gone" or "twice_kernel are damaged" in first["warned"][0]
    assert first["digest"] == good
    assert first["compiled"] == 1
    assert all(x == {"digest": good, "compiled": 0, "warned": []} for x in rest)


@needs_compiler
def test_files_are_kept() -> None:
    assert damaged()["gluon"]["first"]["compiled"] == 1
    for backend in ("gluon", "triton"):
        assert damaged()[backend]["known"]["compiled"] == 0
        assert damaged()[backend]["known"]["warned"] == []


@needs_compiler
def test_a_process_that_dies_while_it_compiles(tmp_path: Path) -> None:
    process = started(tmp_path, "die")
    process.communicate(timeout=120)
    assert process.returncode == 9
    assert list(tmp_path.rglob("tmp.pid_*"))
    after = result(started(tmp_path, "once"))
    assert after["gluon"]["compiled"] == 1
    assert after["gluon"]["warned"] == []
    assert after["triton"]["compiled"] == 0


@needs_compiler
def test_two_processes_at_once(tmp_path: Path) -> None:
    """Both compile, both launch the same, and a third reads what they left."""
    both = [started(tmp_path, "slow") for _ in range(2)]
    found = [result(process) for process in both]
    after = result(started(tmp_path, "once"))
    assert [x["gluon"]["compiled"] for x in found] == [1, 1]
    assert len({x["gluon"]["digest"] for x in (*found, after)}) == 1
    assert all(x[backend]["warned"] == [] for x in (*found, after) for backend in ("gluon", "triton"))
    assert after["gluon"]["compiled"] == 0


def test_the_key_is_that_of_triton() -> None:
    """And so are the folders in which kernels lie, whoever compiled them."""
    from triton.runtime import cache

    program = "from triton.runtime.cache import triton_key; print(triton_key())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert hasattr(cache.triton_key, "shortened")
    assert cache.triton_key() == done.stdout.strip()


KERNELS = {
    "gluon.forward": ["forward_kernel"],
    "gluon.backward": ["backward_kernel"],
    "gluon.backward_broad": ["backward_broad_kernel"],
    "gluon.backward_dq": ["backward_dq_kernel"],
    "gluon.backward_rows": ["prepare_kernel", "finish_kernel"],
    "triton.forward": ["forward_kernel"],
    "triton.backward": ["delta_kernel", "keys_kernel", "queries_kernel"],
    "triton.backward_scores": ["bias_kernel", "table_kernel"],
}


@pytest.mark.parametrize("module", KERNELS)
def test_keys_do_not_depend_on_addresses(module: str) -> None:
    """Triton sorts the constants in a kernel's key by name and by where the module lies in memory.

    A name that has two values in two modules gives a process one of several keys: some compile what lies on disk.
    """
    for name in KERNELS[module]:
        kernel = getattr(importlib.import_module(f"kilat.backends.{module}"), name)
        assert kernel.cache_key
        values: dict[str, set[str]] = {}
        for (constant, _), (value, _) in kernel.used_global_vals.items():
            values.setdefault(constant, set()).add(str(value))
        assert {constant: found for constant, found in values.items() if len(found) > 1} == {}


def test_other_errors_are_no_damage() -> None:
    others = [
        TypeError("x"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        OutOfResources(2, 1, "memory"),
        ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"),
    ]
    for error in others:
        assert not kernel_files.is_damage(error)


@pytest.mark.parametrize("what", ["shared memory", "threads"])
def test_too_much_asked_of_a_gpu(what: str) -> None:
    """The error says what is needed and what there is."""
    kernel = SimpleNamespace(name="f", kernel=b"", metadata=SimpleNamespace(shared=101, num_warps=4))
    limits = {"max_shared_mem": 100 if what == "shared memory" else 101}
    utils = mock.Mock(get_device_properties=lambda device: limits, load_binary=lambda *args: (1, 2, 3, 0, 127))
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    needed = "101, Hardware limit: 100" if what == "shared memory" else "128, Hardware limit: 127"
    with (
        mock.patch.object(_compat.triton.runtime, "driver", driver),
        pytest.raises(OutOfResources, match=f"{what}, Required: {needed}"),
    ):
        _compat._loaded(kernel, 0)


def test_loaded_once() -> None:
    """A kernel that many plans share takes memory of a GPU once; another of the same name has its own."""
    kernels = [SimpleNamespace(name="f", kernel=b"", metadata=SimpleNamespace(shared=0, num_warps=4)) for _ in range(2)]
    load = mock.Mock(side_effect=[(1, function, 3, 0, 128) for function in (16, 32, 48)])
    utils = mock.Mock(get_device_properties=lambda device: {"max_shared_mem": 0}, load_binary=load)
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    with mock.patch.object(_compat.triton.runtime, "driver", driver):
        for _ in range(2):
            found = [_compat._loaded(kernel, device) for kernel, device in zip(kernels[:1] * 2, (0, 1), strict=True)]
            assert [*found, _compat._loaded(kernels[1], 0)] == [16, 32, 48]
    assert load.call_count == 3
