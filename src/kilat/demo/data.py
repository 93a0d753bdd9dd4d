"""Text as bytes: the document that ships with the package, or a file of the user's."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch

MIN_BYTES = 4096


def load_bytes(path: Path | None = None) -> torch.Tensor:
    """Return a document as uint8 `[length]`; without a path, the public-domain book beside this module.

    Raises ValueError if the file is missing or shorter than 4,096 bytes, which is too little to train on.
    """
    if path is None:
        data = resources.files("kilat.demo").joinpath("text", "alice.txt").read_bytes()
    elif not path.is_file():
        raise ValueError(f"file must be an existing file; got {path}")
    else:
        data = path.read_bytes()
    if len(data) < MIN_BYTES:
        raise ValueError(f"file must hold at least {MIN_BYTES} bytes of text; got {len(data)}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def first_tokens(document: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` bytes of a document as int64 `[1, length]`; a short document is read again."""
    if length < 1:
        raise ValueError(f"length must be at least 1; got {length}")
    repeats = -(-length // document.numel())
    return document.repeat(repeats)[:length].long()[None]


def random_batch(
    document: torch.Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `batch` windows and their next bytes: two int64 tensors `[batch, context]`, the second shifted by one."""
    starts = torch.randint(document.numel() - context, (batch, 1), generator=generator)
    windows = document[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
