"""What a backend says about a kernel that can be tuned, and which configuration a measurement chooses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kilat.tune.lookup import fields, replaced
from kilat.tune.table import Bucket, Row, Values

if TYPE_CHECKING:
    from kilat.problem import Operands, Problem

WORTH = 0.02
"""A bucket gets a configuration of its own, and so a kernel of its own, if that is so much faster than its family's."""

KEPT = 0.01
"""The built-in configuration stays unless another is so much faster: less than that is noise."""


@dataclass(frozen=True)
class Tunable:
    """A kernel with knobs; `bucket` is None for Problems that its tables say nothing about."""

    kernel: str
    direction: Literal["forward", "backward"]
    bucket: Callable[[Problem], Bucket | None]
    built_in: Callable[[Problem, Operands], Any]
    choices: Callable[[Problem], Mapping[str, Sequence[int]]]
    legal: Callable[[Problem, Any], bool]

    def candidates(self, problem: Problem, operands: Operands) -> list[Values]:
        """The built-in values of the knobs, then every other combination that is legal."""
        made = self.built_in(problem, operands)
        known = fields(made)
        choices = {name: values for name, values in self.choices(problem).items() if name in known}
        first = {name: known[name] for name in choices}
        found = [first]
        for values in itertools.product(*choices.values()):
            candidate = dict(zip(choices, values, strict=True))
            if candidate != first and self.legal(problem, replaced(made, candidate)):
                found.append(candidate)
        return found


@dataclass
class Trial:
    """A candidate on one bucket: seconds, or why there are none; `error` is the largest over what is allowed."""

    config: Values
    seconds: float | None = None
    error: float | None = None
    reason: str = ""


@dataclass
class Measured:
    """All candidates of one bucket, the built-in one first."""

    bucket: Bucket
    trials: list[Trial] = field(default_factory=list[Trial])

    def seconds(self, config: Values) -> float:
        """What a configuration took; infinity if it was not timed."""
        return next((t.seconds for t in self.trials if t.config == config and t.seconds is not None), math.inf)


def choose(measured: Sequence[Measured], run: int = 0) -> list[Row]:
    """One row a bucket.

    Buckets that differ in seqlen alone are a family, which gets one configuration, so that a new length seldom compiles
    a new kernel: the one with the least geometric mean of time over the best time of each bucket. It is the built-in
    one unless another is faster by more than `KEPT`; a bucket departs from its family for more than `WORTH`.
    A bucket where nothing was right gets no row.
    """
    families: dict[tuple[Any, ...], list[Measured]] = {}
    for one in measured:
        if any(trial.seconds is not None for trial in one.trials):
            b = one.bucket
            families.setdefault((b.kernel, b.dtype, b.dims, b.mask), []).append(one)
    return [_row(one, _common(some), run) for some in families.values() for one in some]


def _best(one: Measured) -> Trial:
    return min((t for t in one.trials if t.seconds is not None), key=lambda t: t.seconds or math.inf)


def _common(some: Sequence[Measured]) -> Values:
    """The configuration of a family."""
    built_in = some[0].trials[0].config

    def loss(config: Values) -> float:
        return sum(math.log(one.seconds(config) / (_best(one).seconds or math.inf)) for one in some) / len(some)

    least = min((trial.config for trial in some[0].trials), key=loss)
    return built_in if loss(built_in) - loss(least) <= KEPT else least


def _row(one: Measured, common: Values, run: int) -> Row:
    best, built_in = _best(one), one.trials[0].config
    faster = (best.seconds or math.inf) * (1.0 + WORTH) < one.seconds(common)
    config = best.config if faster or not math.isfinite(one.seconds(common)) else common
    timed = sum(trial.seconds is not None for trial in one.trials)
    was = one.seconds(built_in)
    seconds = one.seconds(config)
    # a built-in configuration that was refused has no time: the row says 0, as JSON knows no infinity
    return Row(
        one.bucket,
        config,
        seconds,
        built_in,
        was if math.isfinite(was) else 0.0,
        tried=timed,
        refused=len(one.trials) - timed,
        run=run,
    )
