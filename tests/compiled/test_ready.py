"""Kernels that start without Triton: the same launches, never a wrong kernel, and Triton where it must be asked."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from compiled import fake_calls, fake_ready, test_gluon_launching

needs_compiler = test_gluon_launching.needs_compiler
MASKED = ("d128-causal", "d64-window", "ragged")


def process(folder: Path, what: str, *names: str, **environment: str) -> dict[str, Any]:
    """What a new process says whose kilat keeps kernels in a folder."""
    with tempfile.TemporaryDirectory() as own:
        path = os.pathsep.join([str(Path(fake_ready.__file__).parent), *sys.path])
        command = [sys.executable, fake_ready.__file__, own, what, *names]
        places = {"PYTHONPATH": path, "KILAT_CACHE_DIR": str(folder), "TRITON_LIBCUDA_PATH": own}
        environment = {**os.environ, **places, **environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def filled() -> Path:
    """A folder with the kernels of all cases, compiled by a process that found none."""
    folder = Path(tempfile.mkdtemp())
    assert process(folder, "calls", *fake_calls.CASES)["triton"]
    return folder


@needs_compiler
def test_same_bytes() -> None:
    """Triton is not imported, and grid, shared memory, function and arguments are those of its launcher."""
    found = process(filled(), "compare", *fake_calls.CASES)
    assert not found["triton"]
    assert found["warned"] == []
    wrong = [text for text in found["bytes"] if not text.endswith("_kernel")]
    assert not wrong
    assert len(found["bytes"]) == 14 * len(fake_calls.CASES)


@needs_compiler
def test_other_lengths_need_no_triton() -> None:
    """But full attention, see `test_gluon_launching`."""
    names = [f"{name}:{seqlen}" for name in MASKED for seqlen in (1, 63, 1000)]
    assert not process(filled(), "calls", *names)["triton"]


@needs_compiler
def test_hooks_are_called() -> None:
    """By kernels that were loaded without Triton, which is imported later."""
    found = process(filled(), "hook", "d128-causal")
    assert not found["triton"]
    assert found["told"] == ["forward_kernel", *("prepare_kernel", "backward_kernel", "finish_kernel") * 2]
