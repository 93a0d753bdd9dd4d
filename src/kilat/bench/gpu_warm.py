"""Compiling before the clock: contenders whose kernels are kept on disk, in several processes on the same GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing import TimeoutError, get_context
from typing import TypeVar

import torch

from kilat.bench.cells import Cell
from kilat.bench.contenders import make_inputs
from kilat.bench.h200 import COMPILE_SECONDS, WARMED, family, why_left_out
from kilat.bench.peers import AbsentError, load_fa4, makers

MOST_SECONDS = 120.0
"""A contender that hangs, and one that takes its process with it, are left to the measurement after so long."""

Work = TypeVar("Work")
Task = tuple[Cell, str, str]  # cell, contender, kilat's backend


def tasks(cells: Sequence[Cell], names: Sequence[str], backend: str) -> list[Task]:
    """What is compiled, what takes longest first.

    The least cell of every family and direction; flex compiles lengths in, so every cell.
    """
    found: dict[tuple[object, ...], Task] = {}
    for cell in sorted(cells, key=lambda cell: cell.flops):
        for name in names:
            if name in WARMED and not why_left_out(cell, name):
                key = (name, cell.direction, family(cell), cell.name if name == "flex" else "")
                found.setdefault(key, (cell, name, backend))
    return sorted(found.values(), key=lambda task: (-COMPILE_SECONDS[task[1]], task[0].direction))


def warm_one(task: Task) -> str:
    """Make a contender and call it once; why that failed, or ""."""
    cell, name, backend = task
    try:
        contender = makers(backend)[name](cell, make_inputs(cell))
        with torch.set_grad_enabled(cell.direction == "backward"), contender.context():
            contender.call()
        if cell.device == "cuda":
            torch.cuda.synchronize()
            del contender
            torch.cuda.empty_cache()
    except AbsentError:  # every row says so
        return ""
    except Exception as error:  # noqa: BLE001  the measurement meets the same, and says so in its row
        return f"{cell.name}, {name}: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def warm(some: Sequence[Task], processes: int) -> list[str]:
    """Do the tasks in processes of their own; what went wrong, each in a sentence."""
    loads = any(name == "fa4" for _, name, _ in some)
    return aside(some, warm_one, processes, meanwhile=load_fa4 if loads else None)


def aside(
    some: Sequence[Work],
    work: Callable[[Work], str],
    processes: int,
    seconds: float = MOST_SECONDS,
    meanwhile: Callable[[], None] | None = None,
) -> list[str]:
    """Do `work` in processes of their own, for so many seconds at most; what it said, where that is not "".

    `meanwhile` is done here.

    A process that hangs or dies costs the time until then, and what nobody has done by then is left.
    """
    reasons: list[str] = []
    end = time.monotonic() + seconds
    with get_context("spawn").Pool(processes, initializer=_alone) as pool:  # leaving it ends the processes
        found = pool.imap_unordered(work, some)
        if meanwhile is not None:
            meanwhile()
        for done in range(len(some)):
            try:
                reasons.append(found.next(max(0.0, end - time.monotonic())))
            except TimeoutError:
                reasons.append(f"{len(some) - done} of {len(some)} were not done after {seconds:.0f} s")
                break
    return [reason for reason in reasons if reason]


def _alone() -> None:
    """Tell inductor that the processes beside this one use the other cores."""
    from torch._inductor import config

    config.compile_threads = 1
