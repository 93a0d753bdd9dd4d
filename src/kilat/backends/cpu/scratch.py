"""Scratch memory that is kept between calls: fresh pages cost more than a short kernel."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

# Free buffers, the most recently used last. `list.pop` and `append` are atomic, so concurrent callers get their own.
_free: list[Tensor] = []
_KEPT = 4
_LARGEST = 64 << 20  # bytes that are worth keeping; more is given back


@contextmanager
def borrow(size: int) -> Generator[int]:
    """The address of `size` bytes, aligned to 64, that nobody else has until the block ends."""
    try:
        buffer = _free.pop()
    except IndexError:
        buffer = None
    if buffer is None or buffer.numel() < size + 64:
        buffer = torch.empty(max(size + 64, 1 << 20), dtype=torch.uint8, device="cpu")
    yield -(-buffer.data_ptr() // 64) * 64
    if len(_free) < _KEPT and buffer.numel() <= _LARGEST:
        _free.append(buffer)
