"""From a Problem to the shape of its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kilat.backends.gluon.schedule import key_blocks
from kilat.masks.affine import affine

if TYPE_CHECKING:
    from kilat.problem import Problem

MAX_DIM = 256
MAX_SHARED = 232_448 - 2_048  # bytes of shared memory that a CTA may have, less what the compiler needs for itself
L2_BUDGET = 24 << 20  # bytes of keys and values that all CTAs together work on
STAGES = 2
PIECE = 64  # columns of the output that leave at a time where it has small buffers
DQ_BLOCK_Q = 128  # queries of a CTA of the kernel that makes dQ alone

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
    q_stages: int
    turns: bool  # consumers issue their products one after the other
    stages: int = STAGES  # buffers of K and V

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's thread, and of every thread at the launch: 65,536 in all, the producer takes 24."""
        return (240, 168) if self.consumers == 2 else (160, 128)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles; barriers and what the compiler needs come on top."""
        dim, dim_v, rows = sum(self.d), sum(self.v), 64 * self.consumers
        numbers = self.q_stages * rows * dim + self.stages * self.block_kv * (dim + dim_v)
        staged = {1: dim_v, 3: 2 * PIECE}.get(self.staging, 0)  # columns
        return 2 * (numbers + rows * staged)


def forward_config(problem: Problem) -> ForwardConfig:
    """Measured on an H200; docs/lab/gluon-forward.md has the numbers."""
    d, v = boxes(problem.head_dim), boxes(problem.head_dim_v)
    narrow = max(sum(d), sum(v)) <= 64
    consumers = 3 if narrow and _three_pay(problem) else 2
    block_kv = 128 if sum(v) <= 128 and sum(d) <= 192 else 64

    def of(staging: int, q_stages: int) -> ForwardConfig:
        return ForwardConfig(d, v, consumers, block_kv, staging, q_stages, turns=narrow)

    configs = (of(*ways) for ways in ((1, 2), (1, 1), (3, 1), (2, 1), (0, 2)))
    good = (config for config in configs if can_leave(problem, config) and config.shared_bytes <= MAX_SHARED)
    return next(good, of(0, 1))


def can_leave(problem: Problem, config: ForwardConfig) -> bool:
    """Whether the output has the type, rows and widths for the way out that `staging` is (see `forward_kernel`)."""
    boxable = problem.out_dtype == problem.dtype and problem.head_dim_v % 8 == 0
    through_q = config.d[0] == config.v[0] and not config.v[1] and config.q_stages == 1
    in_pieces = config.v == (4 * PIECE, 0)
    return (True, boxable, boxable and through_q, boxable and in_pieces)[config.staging]


def _three_pay(problem: Problem) -> bool:
    """Whether three consumers are faster than two at 64: rows are done 1.25 times as fast, but more of them is wasted.

    A tile of 192 queries costs 2.3 blocks beside its own, one of 128 costs 1.5; ends of sequences and the edge of a
    mask are rounded up to whole tiles and blocks. Causal at 512: 270 TFLOP/s with two, 195 with three; at 16k 448, 537.
    """
    bounds = affine(problem.mask)
    if problem.layout == "ragged" or bounds is None:
        return True
    two, three = (key_blocks(bounds, rows, 128, problem.seqlen_q, problem.seqlen_kv) for rows in (128, 192))
    return 192 * (three + 2.3).sum() < 1.25 * 128 * (two + 1.5).sum()


@dataclass(frozen=True)
class BackwardConfig:
    """How the backward kernels are compiled: boxes of a row of q and k, and of v and dout; tiles."""

    d: tuple[int, int]
    v: tuple[int, int]
    block_q: int
    block_kv: int
    dq_block_kv: int  # of the kernel that makes dQ alone
    down: bool  # blocks of queries from the last to the first

    @property
    def broad(self) -> bool:
        """Whether `backward_broad` does it."""
        return self.block_kv == 64


def backward_config(problem: Problem) -> BackwardConfig:
    """Up to 128, v is padded to the width of q or the other way round; above, both to multiples of 64.

    Blocks of queries upwards or downwards: causal 16k at 64 522 and 538 TFLOP/s, at 128 597 and 584. With 8 query heads
    for one, 8k at 128, 463 and 521. Without a mask it makes no difference.
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest <= 128:
        width = 64 if widest <= 64 else 128
        down = widest <= 64 or problem.group > 1
        return BackwardConfig((width, 0), (width, 0), 8192 // width, 128, 8192 // width, down)
    d, v = (boxes(-(-dim // 64) * 64) for dim in (problem.head_dim, problem.head_dim_v))
    return BackwardConfig(d, v, 64, 64, 64 if sum(d) + sum(v) <= 320 else 32, problem.group > 1)


def has_foreign_rows(problem: Problem) -> bool:
    """Whether behind a sequence may lie what is not its own, or rows are no multiple of 16 bytes (TMA stores none)."""
    p = problem
    return p.layout == "ragged" or p.padded_q or p.padded_kv or p.head_dim % 8 > 0 or p.head_dim_v % 8 > 0


def heads_together(problem: Problem, budget: int = L2_BUDGET) -> int:
    """Query heads worked on at a time where tiles are equally long, so that their keys and values fit the L2 cache.

    Whole groups; fewer where a table says which CTA works on what (see `schedule`).
    """
    row = 2 * (problem.head_dim + problem.head_dim_v)
    fit = max(1, budget // max(problem.seqlen_kv * row, 1))
    return fit * problem.group
