"""Compiling the Gluon kernels for sm_90 where there is no GPU, and reading ptxas' log and the machine code."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import triton
from offline import Driver, target_of
from triton import knobs
from triton.runtime.jit import JITFunction

VERSION = tuple(int(n) for n in triton.__version__.split(".")[:2])
Value = TypeVar("Value")


def of_version(values: dict[tuple[int, int], Value]) -> Value:
    """What holds for the Triton that compiles, and its ptxas: the entry of the last version up to it."""
    return values[max(version for version in values if version <= VERSION)]


@dataclass
class Compiled:
    """What ptxas made of a kernel."""

    spilled: int  # bytes stored
    in_loops: int  # spill instructions in the main loops of both consumers
    products: int  # HGMMA instructions
    loads: int  # UTMALDG
    reductions: int  # UTMAREDG
    vector_reductions: int  # REDG of 16 bytes
    narrow: int  # loads from global memory, and stores to it, of 2 bytes
    serialised: bool  # ptxas gave up on overlapping products
    shared: int  # bytes


@contextmanager
def compiling(consumers: int = 2, products: int = 20) -> Iterator[dict[str, Compiled]]:
    """Kernels that are launched on CPU tensors are compiled for sm_90 instead; yields them by name.

    Each of `consumers` has a main loop of at least `products` HGMMA instructions.
    """
    found: dict[str, Compiled] = {}
    run, driver = JITFunction.run, triton.runtime.driver
    active = driver._active  # None where there is no GPU

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        log = io.StringIO()
        self.device_caches.clear()  # a kernel that is known leaves no log
        with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
            knobs.nvidia.dump_ptxas_log = True
            knobs.compilation.always_compile = True
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        found[self.fn.__name__] = read(kernel, log.getvalue(), consumers, products)
        return kernel

    driver.set_active(Driver(target_of("sm_90")))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = active


def read(kernel: Any, log: str, consumers: int = 2, products: int = 20) -> Compiled:
    """The figures of a compiled kernel."""
    code = disassembled(kernel.asm["cubin"]).splitlines()
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert spills, f"no log of ptxas: {log}"

    def count(name: str) -> int:
        return sum(bool(re.search(rf"\b{name}\b", line)) for line in code)

    return Compiled(
        spilled=sum(spills),
        in_loops=spills_in_loops(code, consumers, products),
        products=count("HGMMA"),
        loads=count("UTMALDG"),
        reductions=count("UTMAREDG"),
        vector_reductions=sum("REDG.E.ADD.F32x4" in line for line in code),
        narrow=sum(bool(re.search(r"\b(LDG|STG)\b.*\.U?16\b", line)) for line in code),
        serialised=bool(re.search(r"C751[245]|serialized", log)),
        shared=kernel.metadata.shared,
    )


def spills_in_loops(code: list[str], consumers: int, products: int) -> int:
    """Spill instructions in the main loops of the consumers: the shortest loops with at least so many products.

    (Waiting loops that ptxas moved to the end of the function look like loops over everything in between.)
    """
    labels = {m.group(1): i for i, line in enumerate(code) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    loops: list[tuple[int, int]] = []
    for end, line in enumerate(code):
        jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        start = labels.get(jump.group(1), end) if jump else end
        if start < end and sum("HGMMA" in x for x in code[start:end]) >= products:
            loops.append((start, end))
    main = sorted(loops, key=lambda loop: loop[1] - loop[0])[:consumers]
    return sum(bool(re.search(r"\b(STL|LDL)\b", x)) for start, end in main for x in code[start:end])


def disassembled(cubin: bytes) -> str:
    """SASS of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout
