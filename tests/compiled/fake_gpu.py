"""A process in which CPU tensors lie on a GPU that is not there, for `test_gluon_launching.py`.

Triton compiles and launches in earnest, with its own launchers in C, and so does kilat; the driver is
`fake_libcuda.c`. Run as a program it compares what both hand to the driver and prints what it found as JSON.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from offline import Driver, target_of
from triton.backends.nvidia import driver as nvidia

from kilat.backends import common
from kilat.backends.gluon import backward_launch, forward_launch, launching
from kilat.backends.gluon._compat import _parameter_sizes
from kilat.masks import Causal, Window
from kilat.problem import Operands, Problem
from kilat.scores import Softcap

STREAM = 7
CASES: dict[str, dict[str, Any]] = {
    "d128-causal": {"dim": 128, "seqlen": 129, "mask": Causal()},
    "d64-window": {"dim": 64, "seqlen": 63, "mask": Window(9, 0)},
    "d96-two-boxes": {"dim": 96, "seqlen": 256, "heads": (8, 2)},
    "d72-deterministic": {"dim": 72, "seqlen": 256, "deterministic": True, "dtype": "float16"},
    "d17-rows-by-pointer": {"dim": 17, "seqlen": 1},
    "ragged": {"dim": 128, "seqlen": 129, "mask": Causal(), "ragged": True},
    "softcap": {"dim": 128, "seqlen": 128, "scores": (Softcap(20.0),)},
    "misaligned": {"dim": 64, "seqlen": 65, "offset": 3},
}


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
    """The fake driver, built in a folder; found by its name from now on."""
    source, made = Path(__file__).with_name("fake_libcuda.c"), folder / "libcuda.so.1"
    options = ("-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1")
    subprocess.run(["cc", *options, "-o", made, source], check=True)
    (folder / "libcuda.so").symlink_to(made)
    triton.knobs.nvidia.libcuda_path = str(folder)
    library = ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)
    library.fake_launched.restype = ctypes.c_size_t
    return library


def pretend() -> None:
    """Every tensor lies on GPU 0, which is an H200."""
    torch.Tensor.get_device = lambda self: 0  # type: ignore[method-assign]
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM  # type: ignore[attr-defined]
    common.empty_on_gpu = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    forward_launch._processors = lambda device: 132  # type: ignore[assignment]
    triton.runtime.driver.set_active(Gpu())


def comparing(library: Any, found: list[str]) -> Callable[..., None]:
    """What stands in for `Steps.__call__`: launches each kernel by Triton, then by kilat, and compares."""

    def launched() -> bytes:
        memory = ctypes.create_string_buffer(1 << 16)
        size = library.fake_launched(memory)
        return memory.raw[:size]

    def launch(steps: Any, tensors: Any, addresses: tuple[int, ...]) -> None:
        if not steps.packed:
            found.append("a kernel is launched by Triton")
        for step in steps._steps:
            name, sizes = step._compiled.metadata.name, _parameter_sizes(step._compiled)
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


def call(dim: int, seqlen: int, **more: Any) -> tuple[Problem, Operands]:
    """A Problem and its tensors."""
    heads, ragged, dtype = more.pop("heads", (2, 1)), more.pop("ragged", False), more.pop("dtype", "bfloat16")
    offset, batch = more.pop("offset", 0), 3
    kind = getattr(torch, dtype)

    def tensor(n: int) -> torch.Tensor:
        shape = (batch * seqlen, n, dim) if ragged else (batch, seqlen, n, dim)
        size = batch * seqlen * n * dim
        return torch.zeros(size + offset, dtype=kind)[offset:].view(shape)

    operands = Operands(tensor(heads[0]), tensor(heads[1]), tensor(heads[1]))
    if ragged:
        operands.cu_seqlens_q = operands.cu_seqlens_kv = torch.arange(batch + 1, dtype=torch.int32) * seqlen
    operands.score_tensors = ((),) * len(more.get("scores", ()))
    total = batch * seqlen if ragged else seqlen
    problem = Problem(
        layout="ragged" if ragged else "dense", dtype=dtype, out_dtype=dtype, device="cuda", head_dim=dim,
        head_dim_v=dim, num_heads_q=heads[0], num_heads_kv=heads[1], needs_grad=True, grad_of=frozenset("qkv"),
        batch=batch, seqlen_q=total, seqlen_kv=total, scale=0.3,
    )  # fmt: skip
    return replace(problem, **more), operands


def run(problem: Problem, operands: Operands) -> None:
    """Forward and backward, without and with the gradient of lse."""
    out, lse = forward_launch.forward(problem, operands)
    backward_launch.backward(problem, operands, out, lse, out, None)
    backward_launch.backward(problem, operands, out, lse, out, lse)


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
