"""Fair timing: contenders take turns call by call, so that all of them see the same machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of the calls of one contender."""

    median: float
    minimum: float
    calls: int


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    reps: int,
    seconds: float = 0.0,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time contenders in turn for `reps` rounds, and further until `seconds` have passed (at most 50 times the rounds).

    Every other round runs in reverse order, so that nobody always follows the same neighbour's cache and clock.
    """
    if reps < 1:
        raise ValueError(f"reps must be at least 1; got {reps}")
    for call in contenders.values():
        for _ in range(warmup):
            call()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    start = clock()
    done = 0
    while done < reps or (clock() - start < seconds and done < 50 * reps):
        for name in names if done % 2 == 0 else reversed(names):
            before = clock()
            contenders[name]()
            samples[name].append(clock() - before)
        done += 1
    return {name: Timing(statistics.median(times), min(times), len(times)) for name, times in samples.items()}


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log(values))), the mean of ratios; NaN of nothing."""
    if not values:
        return math.nan
    return math.exp(sum(math.log(value) for value in values) / len(values))
