"""Tile sizes, warps and pipeline stages: the fastest of a few on one H200, and what fits elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kilat.backends.triton.arguments import Arguments


class Config(NamedTuple):
    """How a kernel is compiled and launched."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


INTERPRETED = Config(64, 64, 4, 1)
"""In the interpreter: few programs and steps, but more than one in the tests' cases."""

LARGE = (9, 10)
"""Major compute capabilities with 228 KB of shared memory; others have 100 to 164."""


def forward_config(args: Arguments, itemsize: int, capability: tuple[int, int] | None) -> Config:
    """The forward's configuration; capability is None on AMD."""
    dim = max(sum(args.spec.pieces), sum(args.spec.pieces_v))
    large = capability is not None and capability[0] in LARGE
    found = _float32(dim) if itemsize == 4 else _half(dim, large)
    # tiles of a bias or of keep are pipelined, too, and take as much room as those of k and v
    pairs = args.scores.bias is not None or args.dropout.keep is not None
    return found._replace(num_stages=1) if pairs and not large else found


def _half(dim: int, large: bool) -> Config:
    if dim <= 64:
        return Config(64, 64, 4, 3) if large else Config(128, 64, 4, 3)
    if dim <= 128:
        return Config(128, 32, 8, 4) if large else Config(128, 64, 8, 2)
    if dim <= 256:
        return Config(128, 64, 8, 2) if large else Config(64, 32, 8, 2)
    return Config(64, 32, 8, 2) if large else Config(32, 16, 8, 1)


def _float32(dim: int) -> Config:
    """Products on the vector units: operands stay in registers, so tiles are small."""
    if dim <= 64:
        return Config(64, 32, 8, 2)
    if dim <= 128:
        return Config(64, 16, 8, 2)
    if dim <= 256:
        return Config(32, 16, 8, 2)
    return Config(16, 16, 8, 1)
