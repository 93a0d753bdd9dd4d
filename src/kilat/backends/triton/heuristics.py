"""Tile sizes, warps and pipeline stages, without a measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kilat.backends.triton.arguments import Spec


class Config(NamedTuple):
    """How a kernel is compiled and launched."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


def forward_config(spec: Spec, itemsize: int, capability: tuple[int, int] | None) -> Config:
    """The forward's configuration; capability is None on AMD and in the interpreter."""
    dim = max(sum(spec.pieces), sum(spec.pieces_v))
    if itemsize == 4:  # products on the vector units, operands of twice the size
        return _float32(dim)
    large = capability is not None and (capability[0] == 9 or capability[0] == 10)  # 228 KB of shared memory
    if dim <= 64:
        return Config(128, 64, 4 if not large else 8, 3)
    if dim <= 128:
        return Config(128, 64, 8, 3 if large else 2)
    if dim <= 256:
        return Config(128, 64, 8, 2) if large else Config(64, 32, 4, 2)
    return Config(64, 32, 8, 2) if large else Config(32, 16, 4, 1)


def _float32(dim: int) -> Config:
    if dim <= 64:
        return Config(64, 32, 4, 2)
    if dim <= 128:
        return Config(32, 32, 4, 2)
    if dim <= 256:
        return Config(32, 16, 4, 1)
    return Config(16, 16, 4, 1)
