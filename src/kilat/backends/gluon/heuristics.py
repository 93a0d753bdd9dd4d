"""From a Problem to the shape of its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kilat.problem import Problem

MAX_DIM = 256
MAX_SHARED = 232_448 - 2_048  # bytes of shared memory that a CTA may have, less what the compiler needs for itself
L2_BUDGET = 24 << 20  # bytes of keys and values that all CTAs together work on
STAGES = 2

_BOXES = {64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0), 160: (128, 32), 192: (128, 64), 256: (256, 0)}
"""Head dimensions that kernels work in, as widths of the one or two boxes that a row is loaded in."""


def boxes(dim: int) -> tuple[int, int]:
    """The boxes of the smallest kernel dimension that holds `dim`."""
    return next(pair for width, pair in _BOXES.items() if dim <= width)


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward kernel is compiled for a head dimension (see `forward_kernel`)."""

    d: tuple[int, int]
    v: tuple[int, int]
    consumers: int
    block_kv: int
    staging: int

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's thread, and of every thread at the launch: 65,536 in all, the producer takes 24."""
        return (240, 168) if self.consumers == 2 else (160, 128)


def forward_config(problem: Problem) -> ForwardConfig:
    """Measured on an H200: three consumers win at 64, since a tile of 192 queries reads fewer keys a query."""
    d, v = boxes(problem.head_dim), boxes(problem.head_dim_v)
    consumers = 3 if max(sum(d), sum(v)) <= 64 else 2
    block_kv = 128 if sum(v) <= 128 and sum(d) <= 192 else 64
    shared = 2 * (64 * consumers * sum(d) + STAGES * block_kv * (sum(d) + sum(v)))
    boxable = problem.out_dtype == problem.dtype and problem.head_dim_v % 8 == 0
    if not boxable:
        staging = 0
    elif shared + 2 * 64 * consumers * sum(v) <= MAX_SHARED:
        staging = 1
    else:
        staging = 2 if d[0] == v[0] and not v[1] else 0
    return ForwardConfig(d, v, consumers, block_kv, staging)


def heads_together(problem: Problem, budget: int = L2_BUDGET) -> int:
    """Query heads worked on at a time where tiles are equally long, so that their keys and values fit the L2 cache.

    Whole groups. Where tiles are not equal (causal), all heads go together: the tiles of a few heads do not even out
    over the CTAs, which cost 20 and 36 % (16k, head_dim 128 and 64), and neighbouring tiles share what they read.
    """
    row = 2 * (problem.head_dim + problem.head_dim_v)
    fit = max(1, budget // max(problem.seqlen_kv * row, 1))
    return fit * problem.group


def grid(problem: Problem, processors: int, tiles: int, *, unequal: bool) -> int:
    """CTAs: one a processor; but one a tile where only the hardware can even out lengths that the host does not know.

    16 sequences of 512 to 4,096, causal: 459 TFLOP/s with a CTA a tile, 445 persistent; full: 535 and 540.
    """
    return tiles if unequal and problem.layout == "ragged" else min(processors, tiles)
