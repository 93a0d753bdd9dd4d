"""The decode kernel's code: tiles of the cache come by asynchronous copies of 16 bytes, and nothing is spilled."""

from __future__ import annotations

import re

import pytest
from configurations import DECODE, compiled
from offline import compiling, measured

LEAN = [name for name in DECODE if not name.endswith(("float32", "queries", "first", "window"))]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", LEAN)
def test_loads(name: str, architecture: str) -> None:
    kernel = compiled(name, architecture)["decode_kernel"]
    assert measured(kernel, architecture)["spilled"] == 0
    sizes = [int(size, 16) for size in re.findall(r"cp\.async\.\S+ \[[^]]*\], \[[^]]*\], (0x\w+)", kernel.asm["ptx"])]
    tiles = {size for size in sizes if size > 4}  # page numbers come one by one
    narrow = name.endswith(("e4m3", "int8"))  # of numbers of one byte, those of V come by 8
    assert tiles == ({8, 16} if narrow else {16})


def test_lengths_are_not_compiled_in() -> None:
    """One kernel does every batch up to 15, capacity, number of heads and page table."""
    from dataclasses import replace

    from helpers import build

    from kilat.backends.triton import BACKEND

    hashes: set[str] = set()
    base = DECODE["decode d128 page 16"]
    for shape in ({}, {"batch": 3, "seqlen": (1, 1600), "lengths_kv": (1, 2, 3)}, {"heads": (12, 3)}):
        problem, op = build(replace(base, **shape)).core()
        with compiling("sm_90") as kernels:
            BACKEND.forward(problem, op)
        hashes.add(kernels["decode_kernel"].hash)
    assert len(hashes) == 1
