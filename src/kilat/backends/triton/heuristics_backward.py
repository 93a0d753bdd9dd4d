"""Tile sizes, warps and pipeline stages of the backward kernels, without a measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilat.backends.triton.heuristics import LARGE, Config

if TYPE_CHECKING:
    from kilat.backends.triton.arguments import Arguments


def keys_config(args: Arguments, itemsize: int, capability: tuple[int, int] | None) -> Config:
    """Of the kernel for dK and dV; capability is None on AMD and in the interpreter."""
    dim, large = _dim(args), _is_large(capability)
    return _pipelined(args, large, _keys(dim, itemsize, large, capability))


def _keys(dim: int, itemsize: int, large: bool, capability: tuple[int, int] | None) -> Config:
    if itemsize == 4:
        return _float32(dim)
    if dim <= 64:
        return Config(64, 64, 4, 2)
    if dim <= 128:
        return Config(64, 128, 8, 2) if large else Config(32, 64, 4, 2)
    if dim <= 256:
        hopper = capability is not None and capability[0] == 9
        return Config(64 if hopper else 32, 64, 8, 2) if large else Config(32, 32, 8, 1)
    return Config(16, 32, 8, 1) if large else Config(16, 16, 8, 1)


def queries_config(args: Arguments, itemsize: int, capability: tuple[int, int] | None) -> Config:
    """Of the kernel for dQ."""
    dim, large = _dim(args), _is_large(capability)
    return _pipelined(args, large, _queries(dim, itemsize, large))


def _queries(dim: int, itemsize: int, large: bool) -> Config:
    if itemsize == 4:
        found = _float32(dim)
        return found._replace(block_q=found.block_kv, block_kv=found.block_q)
    if dim <= 64:
        return Config(128, 64, 8, 2)
    if dim <= 128:
        return Config(128, 64, 8, 3) if large else Config(64, 32, 4, 2)
    if dim <= 256:
        return Config(128, 32, 8, 2) if large else Config(32, 32, 8, 1)
    return Config(32, 16, 8, 1)


def scores_config(args: Arguments, itemsize: int, capability: tuple[int, int] | None) -> Config:
    """Of the kernels for the gradients of a bias and of tensors of user scores."""
    dim, large = _dim(args), _is_large(capability)
    if itemsize == 4:
        return _float32(dim)
    if dim <= 128:
        return Config(64, 64, 8, 1) if large else Config(32, 32, 4, 1)
    if dim <= 256:
        return Config(64, 64, 8, 1) if large else Config(32, 32, 8, 1)
    return Config(32, 32, 8, 1) if large else Config(16, 16, 8, 1)


def _float32(dim: int) -> Config:
    """Products on the vector units: operands stay in registers, so tiles are small."""
    if dim <= 64:
        return Config(32, 64, 8, 1)
    if dim <= 128:
        return Config(16, 32, 8, 1)
    return Config(16, 16, 8, 1)


def _pipelined(args: Arguments, large: bool, found: Config) -> Config:
    """Fewer stages where tiles of a bias or of keep are pipelined, too: they take as much room as those of k and v."""
    pairs = args.scores.bias is not None or args.dropout.keep is not None
    return found._replace(num_stages=min(found.num_stages, 2 if large else 1)) if pairs else found


def _dim(args: Arguments) -> int:
    return max(sum(args.spec.pieces), sum(args.spec.pieces_v))


def _is_large(capability: tuple[int, int] | None) -> bool:
    return capability is not None and capability[0] in LARGE
