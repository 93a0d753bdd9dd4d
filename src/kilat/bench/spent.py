"""Where the seconds of a cell go, so that a run on a rented machine says what to shorten."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Spent = dict[str, float]


def nothing() -> None:
    """Wait for nobody: work on a CPU is done when its call returns."""


@dataclass
class Stopwatch:
    """Adds up seconds by part; `wait` makes what was queued on a GPU count where it was queued."""

    wait: Callable[[], None] = nothing
    spent: Spent = field(default_factory=Spent)

    @staticmethod
    def of(device: str) -> Stopwatch:
        """Return a stopwatch for work on `cpu` or `cuda`."""
        return Stopwatch(torch.cuda.synchronize if device == "cuda" else nothing)

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Count what is done inside as `name`, also where it raises."""
        begin = time.perf_counter()
        try:
            yield
            self.wait()
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin


def total(several: Iterable[Mapping[str, float]]) -> Spent:
    """Sum by part, the costliest first."""
    found: Spent = {}
    for one in several:
        for name, value in one.items():
            found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: -item[1]))
