"""Kernels that are loaded without Triton, for `test_ready.py`: a process on the driver of `fake_calls.py`.

python fake_ready.py FOLDER WHAT CASES: calls the Hopper backend, forward and backward, and prints what it found as
JSON. FOLDER holds the driver, and the caches where the environment says so. WHAT is a word of `SAYS`.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import fake_calls

from kilat.backends import gluon, kernel_files
from kilat.backends.gluon import launching

SAYS = {
    "calls": "whether Triton was imported, seconds of the first forward and backward, warnings",
    "compare": "the same, then every byte of each launch beside those of Triton's launcher",
    "hook": "the same, then the kernels that a hook of Triton's is told about",
}


def with_driver(cache: Any) -> None:
    """What stands in for `kernel_files.shorten`, which is called when Triton has been imported."""
    shorten(cache)
    give_driver()


def give_driver() -> Any:
    """Let Triton work on the same driver."""
    kernel_files.shorten = shorten
    import fake_gpu
    import triton

    triton.runtime.driver.set_active(fake_gpu.Gpu())
    return fake_gpu


shorten = kernel_files.shorten


def called(names: list[str]) -> dict[str, Any]:
    """The first calls of this process, through the backend's doors."""
    seconds = [0.0, 0.0]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for name in names:
            problem, operands = of(name)
            start = time.perf_counter()
            reasons = gluon.BACKEND.unsupported(problem)
            assert not reasons, reasons
            out, lse = gluon.BACKEND.forward(problem, operands)
            middle = time.perf_counter()
            for dlse in (None, lse):
                gluon.BACKEND.backward(problem, operands, out, lse, out, dlse)
            seconds[0] += middle - start
            seconds[1] += time.perf_counter() - middle
    return {"triton": "triton" in sys.modules, "seconds": seconds, "warned": [str(x.message) for x in warned]}


_calls: dict[str, Any] = {}


def of(name: str) -> Any:
    """A Problem, with its plans, and its tensors; NAME:SEQLEN is a case at another length."""
    if name not in _calls:
        case, _, seqlen = name.partition(":")
        _calls[name] = fake_calls.call(**{**fake_calls.CASES[case], **({"seqlen": int(seqlen)} if seqlen else {})})
    return _calls[name]


def compared(library: Any, names: list[str]) -> list[str]:
    """What Triton's launcher is told by the same plans, kernel by kernel."""
    found: list[str] = []
    real, launching.Steps.__call__ = launching.Steps.__call__, give_driver().comparing(library, found)
    for name in names:
        fake_calls.run(*of(name))
    launching.Steps.__call__ = real  # type: ignore[method-assign]
    return found


def hooked(names: list[str]) -> list[str]:
    """The kernels that a hook is told about; Triton is imported for it."""
    give_driver()
    import triton

    told: list[str] = []
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: told.append(metadata.get()["name"]))
    for name in names:
        fake_calls.run(*of(name))
    return told


def main(folder: str, what: str, *names: str) -> None:
    """Run and print."""
    library = fake_calls.load(Path(folder))
    library.fake_expect(0, None)
    fake_calls.pretend()
    gluon._capabilities = lambda device: frozenset({(9, 0)})  # type: ignore[assignment]
    kernel_files.shorten = with_driver
    found = called(list(names))
    if what == "compare":
        found["bytes"] = compared(library, list(names))
    elif what == "hook":
        found["told"] = hooked(list(names))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
