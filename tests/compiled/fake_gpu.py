"""A process in which CPU tensors lie on a GPU that is not there, for `test_gluon_launching.py`.

Triton compiles and launches in earnest, with its own launchers in C, and so does kilat; the driver is
`fake_libcuda.c`. Run as a program it compares what both hand to the driver and prints what it found as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_calls
import triton
from fake_calls import CASES, STREAM, call, run
from offline import Driver, target_of
from triton.backends.nvidia import driver as nvidia

from kilat.backends.gluon import launching


class Gpu(Driver):
    """Triton's driver on the fake library."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        super().__init__(target_of("sm_90"))
        self.utils = nvidia.CudaUtils()

    def get_current_device(self) -> Any:
        return 0

    def get_current_stream(self, device: Any) -> int:
        return STREAM


def load(folder: Path) -> Any:
    """The fake driver, built in a folder; Triton and kilat find it."""
    library = fake_calls.load(folder)
    triton.knobs.nvidia.libcuda_path = str(folder)
    return library


def pretend() -> None:
    """Every tensor lies on GPU 0, which is an H200."""
    fake_calls.pretend()
    triton.runtime.driver.set_active(Gpu())


def comparing(library: Any, found: list[str]) -> Callable[..., None]:
    """What stands in for `Steps.__call__`: launches each kernel by Triton, then by kilat, and compares."""
    from kilat.backends.gluon._compat import parameter_sizes

    def launched() -> bytes:
        memory = ctypes.create_string_buffer(1 << 16)
        size = library.fake_launched(memory)
        return memory.raw[:size]

    def launch(steps: Any, tensors: Any, addresses: tuple[int, ...]) -> None:
        if not steps.packed:
            found.append("a kernel is launched by Triton")
        for step in steps._steps:
            compiled = step.of_triton(tensors)
            name, sizes = compiled.metadata.name, parameter_sizes(compiled)
            library.fake_expect(len(sizes), (ctypes.c_size_t * len(sizes))(*sizes))
            step.through_triton(tensors)
            theirs = launched()
            for _ in range(2):
                step.start(STREAM, addresses)
                ours = launched()
                places = [n for n, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b]
                good = len(ours) == len(theirs) == 48 + sum(sizes) and not places
                found.append(name if good else f"{name}: {len(theirs)} and {len(ours)} bytes differ at {places}")

    return launch


def of_other_lengths() -> list[str]:
    """The kernels that Triton is asked for when lengths and batches differ from those of `CASES`."""
    asked: list[str] = []

    def listen(*, metadata: dict[str, Any], **rest: Any) -> None:
        asked.append(metadata["name"])

    triton.knobs.compilation.listener = listen
    for name in ("d128-causal", "d64-window", "d72-deterministic", "ragged"):
        for seqlen in (1, 63, 128, 1000):
            run(*call(**{**CASES[name], "seqlen": seqlen}))
    triton.knobs.compilation.listener = None
    return asked


def main(folder: str) -> None:
    """Compare all cases; then launch with a hook, which only Triton's launcher calls."""
    library = load(Path(folder))
    pretend()
    real, found = launching.Steps.__call__, dict[str, Any]()
    for name, arguments in CASES.items():
        found[name] = []
        launching.Steps.__call__ = comparing(library, found[name])  # type: ignore[method-assign]
        run(*call(**arguments))
    launching.Steps.__call__ = real  # type: ignore[method-assign]
    found["other lengths"] = of_other_lengths()
    names: list[str] = []

    def hook(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    problem, operands = call(**CASES["d128-causal"])
    triton.knobs.runtime.launch_enter_hook.add(hook)
    run(problem, operands)
    found["hooked"] = names.copy()
    triton.knobs.runtime.launch_enter_hook.remove(hook)
    run(problem, operands)
    found["not hooked any more"] = names[len(found["hooked"]) :]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
