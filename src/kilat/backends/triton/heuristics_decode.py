"""The decode kernel's tile sizes, and how many parts keys are cut into; not measured on a GPU yet."""

from __future__ import annotations

from typing import NamedTuple

from kilat.backends.triton.heuristics import LARGE


class DecodeConfig(NamedTuple):
    """How the decode kernel is compiled and how its work is shared out."""

    block_rows: int
    block_kv: int
    num_warps: int
    num_stages: int
    programs: int  # a multiprocessor's, that parts of keys are made for
    least: int  # keys of a part, if there are so many


class Rows(NamedTuple):
    """What a tile of rows must hold."""

    group: int
    seqlen_q: int  # queries of a sequence, on average where they differ
    columns: int  # of k and of v, with their padding
    columns_v: int
    shared: bool  # v is a part of k
    itemsize: int  # of stored keys
    compute: int  # of q
    paged: bool


INTERPRETED = DecodeConfig(16, 32, 4, 1, 2, 32)
"""In the interpreter: several parts in the tests' cases."""

STAGE = 36 << 10
"""Bytes of K and V that a program loads at a time: some of them together keep a multiprocessor's memory pipe full."""


def decode_config(rows: Rows, capability: tuple[int, int] | None) -> DecodeConfig:
    """The decode kernel's configuration; capability is None on AMD."""
    if rows.compute == 4:  # products on the vector units: operands stay in registers
        return DecodeConfig(16, 16, 8, 2, 2, 256)
    need = rows.group * max(rows.seqlen_q, 1)
    large = capability is not None and capability[0] in LARGE
    most = 64 if rows.columns_v <= 256 else 32 if large else 16  # by registers; by shared memory
    block_rows = min(16 if need <= 16 else 32 if need <= 32 else 64, most)
    columns = rows.columns + (0 if rows.shared else rows.columns_v)
    # numbers of one byte take as many registers when they are widened
    fits = STAGE // (columns * max(rows.itemsize, 2))
    block_kv = 1 << max(4, min(7, fits.bit_length() - 1))
    # sums of products in 64 registers a thread; tiles that `wgmma` does not multiply take more beside them
    num_warps = 8 if rows.columns_v > 256 or block_rows * rows.columns_v >= 64 * (256 if large else 128) else 4
    return DecodeConfig(block_rows, block_kv, num_warps, _stages(rows, block_rows, capability), 3, 256)


def _stages(rows: Rows, block_rows: int, capability: tuple[int, int] | None) -> int:
    """Triton counts the loads of page numbers as stages, too: it takes 5 to have two tiles on their way, and not 3."""
    if capability is None:
        return 2
    stages = 3 if capability[0] in LARGE and block_rows < 64 else 2
    stages += rows.itemsize == 1
    return 2 * stages - 1 if rows.paged else stages
