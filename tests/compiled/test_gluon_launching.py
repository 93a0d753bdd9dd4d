"""Launches of the Hopper kernels, byte for byte beside those of Triton's own launcher, on a driver without a GPU."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton.experimental.gluon")

import torch
from compiled import fake_gpu

from kilat.backends.gluon import _compat, launching, ready

HEADER = Path(sysconfig.get_paths()["include"]) / "Python.h"
FORWARD, BEFORE, MAIN, AFTER = "forward_kernel", "prepare_kernel", "backward_kernel", "finish_kernel"
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or not HEADER.exists() or torch.cuda.is_available(),
    reason="Triton's launchers need a C compiler and Python's headers; where there is a GPU there is a real driver",
)


@functools.cache
def found() -> dict[str, Any]:
    """What a process with the fake driver compared."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(Path(fake_gpu.__file__).parent), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, fake_gpu.__file__, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_compiler
@pytest.mark.parametrize("name", fake_gpu.CASES)
def test_same_bytes(name: str) -> None:
    """Grid, block, shared memory, stream, function and every argument, tensor maps included; twice from one block."""
    last = "backward_dq_kernel" if "deterministic" in name else AFTER
    twice = [kernel for kernel in (FORWARD, *(BEFORE, MAIN, last) * 2) for _ in range(2)]
    assert found()[name] == twice


@needs_compiler
def test_no_length_is_compiled_in() -> None:
    """But that full attention has one more backward, for keys whose number is a multiple of 128."""
    assert found()["other lengths"] == ["backward_kernel"]


@needs_compiler
def test_hooks_are_called() -> None:
    assert found()["hooked"] == [FORWARD, *(BEFORE, MAIN, AFTER) * 2]
    assert found()["not hooked any more"] == []


def compiled(**metadata: Any) -> Any:
    """A kernel of one pointer and one number, as Triton describes it."""
    parameters = (".u64 .ptr .global .align 1 f_0", ".u32 f_1", ".u64 f_2", ".u64 f_3")
    ptx = f".visible .entry f({','.join(f' .param {x}' for x in parameters)})"
    usual = {"name": "f", "num_warps": 4, "num_ctas": 1, "shared": 0, "global_scratch_size": 0}
    usual |= {"profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": False, "tensordesc_meta": None}
    src = SimpleNamespace(signature={"x_ptr": "*fp32", "n": "i32", "SIZE": "constexpr"})
    return SimpleNamespace(
        metadata=SimpleNamespace(**(usual | metadata)), src=src, asm={"ptx": ptx}, run=print, function=16
    )


def test_arguments() -> None:
    assert ready.packed(_compat.parameters_of(compiled()), ["x", 5, 64]) == [
        (0, None), (1, b"\5\0\0\0"), (-1, bytes(8)), (-1, bytes(8))
    ]  # fmt: skip


@pytest.mark.parametrize("change", [{"num_ctas": 2}, {"global_scratch_size": 64}, {"launch_pdl": True}])
def test_kernels_that_need_more(change: dict[str, Any]) -> None:
    with pytest.raises(ready.UnexpectedError, match=next(iter(change))):
        _compat.kernel_of(compiled(**change), 0)


@pytest.mark.parametrize("break_it", ["type", "ptx", "size"])
def test_unknown_arguments(break_it: str) -> None:
    kernel = compiled()
    if break_it == "type":
        kernel.src.signature["n"] = "i1"
    elif break_it == "ptx":
        kernel.asm.clear()
    else:
        kernel.src.signature["n"] = "i64"
    with pytest.raises(ready.UnexpectedError):
        _compat.parameters_of(kernel)


def test_triton_launches_what_is_unknown() -> None:
    """With a warning, and with all of Triton's arguments."""
    kernel, x, launched = compiled(num_ctas=2), torch.zeros(4), mock.Mock()
    jit = mock.Mock(run=mock.Mock(return_value=mock.Mock(result=lambda: kernel)))
    with (
        mock.patch.object(torch.Tensor, "get_device", return_value=0),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=7, create=True),
        mock.patch.object(_compat, "launch_through_triton", launched),
        mock.patch.object(_compat.kernel_files, "check") as checked,
    ):
        with pytest.warns(RuntimeWarning, match="num_ctas must be 1; got 2"):
            steps = launching.Steps([launching.Step(jit, 9, [launching.Of(0), 5], [64], tensors=[x])])
        assert not steps.packed
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps([x], (x.data_ptr(),))
    checked.assert_called_once_with(kernel)
    ((made, grid, stream, arguments), _) = launched.call_args
    assert (made, grid, stream) == (kernel, 9, 7)
    assert arguments[0].data_ptr() == x.data_ptr()
    assert arguments[1:] == [5, 64]
