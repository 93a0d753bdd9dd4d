"""The knobs of the Hopper kernels, and their values from a tuning table where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kilat.backends.gluon import heuristics
from kilat.masks.affine import affine
from kilat.tune.lookup import configure
from kilat.tune.space import Tunable
from kilat.tune.table import Bucket

if TYPE_CHECKING:
    from kilat.problem import Operands, Problem

SPARE_REGISTERS = 30
"""Of a consumer's thread, beside its accumulators and the halves of P."""

LONGEST = 1 << 20
"""Sequence length of the bucket of calls whose bits may not depend on their companions."""


@dataclass(frozen=True)
class Schedule:
    """The order in which the forward's tiles are worked on.

    megabytes: of keys and values of the heads that are worked on at a time, at most. persistent: one CTA a processor
    rather than a tile.
    """

    megabytes: int
    persistent: bool


def bucket(problem: Problem, kernel: str) -> Bucket | None:
    """What a Problem is looked up by; no row serves a mask that this backend does not take."""
    found = affine(problem.mask)
    if found is None:
        return None
    left, right, top_left = found.kind
    dims = (sum(heuristics.boxes(problem.head_dim)), sum(heuristics.boxes(problem.head_dim_v)))
    mask = "window" if left else "causal" if right or top_left else "full"
    return Bucket(kernel, problem.dtype, dims, mask, seqlen(problem))


def seqlen(problem: Problem) -> int:
    """Keys of a sequence, on the average of a ragged batch."""
    if problem.batch_invariant:
        return LONGEST
    return problem.seqlen_kv // max(problem.batch, 1) if problem.layout == "ragged" else problem.seqlen_kv


def architecture() -> str | None:
    """That of the current GPU; None where there is none and kernels are only compiled."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def forward_config(problem: Problem) -> heuristics.ForwardConfig:
    """The forward's tiles; a table's staging is what is legal for this output's type and rows."""
    built_in = heuristics.forward_config(problem)
    found = configure("gluon", architecture(), bucket(problem, "forward"), built_in)
    return found if forward_is_legal(problem, found) else built_in


def forward_is_legal(problem: Problem, config: heuristics.ForwardConfig) -> bool:
    """Whether registers and shared memory suffice, and the output can leave that way."""
    accumulators = sum(config.v) // 2 + 3 * config.block_kv // 4
    fits = config.shared_bytes <= heuristics.MAX_SHARED
    return heuristics.can_leave(problem, config) and fits and accumulators + SPARE_REGISTERS <= config.registers[0]


def forward_is_candidate(problem: Problem, config: heuristics.ForwardConfig) -> bool:
    """Whether to measure it: a third buffer of K and V only with the tiles of the built-in configuration."""
    built_in = heuristics.forward_config(problem)
    same = (config.consumers, config.block_kv, config.turns) == (built_in.consumers, built_in.block_kv, built_in.turns)
    return forward_is_legal(problem, config) and (same or config.stages == built_in.stages)


def schedule(problem: Problem) -> Schedule:
    """The order of tiles."""
    found = bucket(problem, "forward schedule")
    return configure("gluon", architecture(), found, _built_in_schedule(problem))


def _built_in_schedule(problem: Problem) -> Schedule:
    """One CTA a tile only where the hardware alone can even out lengths: ragged under a causal mask.

    16 sequences of 512 to 4,096, causal: 459 TFLOP/s with a CTA a tile, 445 persistent; full: 535 and 540.
    """
    found = affine(problem.mask)
    unequal = found is not None and (found.kind[1] or found.kind[2]) and not found.kind[0]
    return Schedule(heuristics.L2_BUDGET >> 20, persistent=not (unequal and problem.layout == "ragged"))


def _built_in(function: Any) -> Any:
    def of_operands(problem: Problem, operands: Operands) -> Any:
        del operands
        return function(problem)

    return of_operands


TUNABLES = (
    Tunable(
        "forward",
        "forward",
        lambda problem: bucket(problem, "forward"),
        _built_in(heuristics.forward_config),
        lambda problem: {
            "consumers": (2, 3),
            "block_kv": (64, 128),
            "staging": (0, 1, 2, 3),
            "q_stages": (1, 2),
            "turns": (False, True),
            "stages": (2, 3),
        },
        forward_is_candidate,
    ),
    Tunable(
        "forward schedule",
        "forward",
        lambda problem: bucket(problem, "forward schedule"),
        _built_in(_built_in_schedule),
        lambda problem: {"megabytes": (8, 16, 24, 40), "persistent": (False, True)},
        lambda problem, config: True,
    ),
)
"""What `kilat tune` measures, each with the choices of those before it; the backward has no choices left."""
