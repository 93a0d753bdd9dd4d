"""Compiling Triton kernels for a GPU that is not there, and reading what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kilat.backends.triton import launch

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")

SHARED_MEMORY = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
SHARED_MEMORY |= {"gfx942": 64, "gfx950": 160}
"""KiB that a block can have."""

MATRIX_INSTRUCTIONS = {"sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma"}


class Driver:
    """Stands in for Triton's driver: it knows a target, and nothing is ever launched."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # kernels are remembered by device

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def target_of(architecture: str) -> GPUTarget:
    """Triton's name of an architecture."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


@contextmanager
def compiling(architecture: str) -> Iterator[dict[str, Any]]:
    """Kernels that are launched on CPU tensors are compiled for `architecture` instead; yields them by name."""
    found: dict[str, Any] = {}
    target = target_of(architecture)
    run, capability, driver = JITFunction.run, launch.capability, triton.runtime.driver
    active = driver._active  # None where there is no GPU, and then reset_active() raises

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found[self.fn.__name__] = kernel
        return kernel

    driver.set_active(Driver(target))
    JITFunction.run = compile_only
    version = (target.arch // 10, target.arch % 10) if target.backend == "cuda" else None
    launch.capability = lambda x: version
    try:
        yield found
    finally:
        JITFunction.run, launch.capability = run, capability
        driver._active = active


def measured(kernel: Any, architecture: str) -> dict[str, int]:
    """Registers, spilled bytes (AMD: registers), shared memory and matrix instructions of a compiled kernel."""
    if architecture.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        return {
            "registers": _largest(r"\.vgpr_count:\s*(\d+)", text),
            "spilled": _largest(r"\.vgpr_spill_count:\s*(\d+)", text),
            "shared": kernel.metadata.shared,
            "matrix": len(re.findall(r"\bv_mfma_", text)),
        }
    usage = _resources(kernel.asm["cubin"])
    few_rows = kernel.metadata.name == "decode_kernel"
    pattern = r"mma\.sync" + (r"|wgmma\.mma_async|tcgen05\.mma" if few_rows else "")
    pattern = pattern if few_rows else MATRIX_INSTRUCTIONS.get(architecture, pattern)
    return {
        "registers": _largest(r"REG:(\d+)", usage),
        "spilled": _largest(r"STACK:(\d+)", usage),
        "shared": kernel.metadata.shared,
        "matrix": len(re.findall(pattern, kernel.asm["ptx"])),
    }


def _largest(pattern: str, text: str) -> int:
    return max((int(n) for n in re.findall(pattern, text)), default=0)


def _resources(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
