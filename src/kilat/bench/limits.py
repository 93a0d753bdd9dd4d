"""Limits of the machine as measured in the same run: the matmul rate of a dtype and the rate of reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kilat.bench.memory import available_bytes

MATMUL_SIZE = 2048
READ_BYTES = 1 << 30


def _best(call: Callable[[], object], reps: int) -> float:
    """Shortest of `reps` calls, in seconds, after one that is not counted."""
    call()
    best = float("inf")
    for _ in range(reps):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def matmul_rate(dtype: str, size: int = MATMUL_SIZE, reps: int = 5) -> float:
    """Floating-point operations a second of torch.matmul on square matrices, the best of some calls."""
    a = torch.randn(size, size).to(getattr(torch, dtype))
    out = torch.empty_like(a)
    return 2 * size**3 / _best(lambda: torch.matmul(a, a, out=out), reps)


def read_bandwidth(reps: int = 5) -> float:
    """Bytes a second of summing one large float32 tensor, the best of some calls: reading without writing."""
    free = available_bytes()
    size = READ_BYTES if free is None else min(READ_BYTES, free // 4)
    x = torch.ones(size // 4)
    return x.numel() * 4 / _best(x.sum, reps)
