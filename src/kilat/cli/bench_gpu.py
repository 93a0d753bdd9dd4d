"""`kilat bench --suite h200`: shards into JSON files, and their merging."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilat.cli.output import seconds, show, size, table

if TYPE_CHECKING:
    from kilat.bench.cells import Cell
    from kilat.bench.run import Row

SUITES = ("h200", "h200-quick", "h200-long")
SUSTAINED_SUITES = {"h200": 1.0}
"""Suites that run some cells for seconds, and for how many: a change to a kernel is judged by bursts."""


@dataclass(frozen=True)
class Request:
    """The options of `kilat bench` that GPU suites have to themselves."""

    backend: str = "auto"
    shard: str = "1/1"
    contenders: tuple[str, ...] = ()
    deadline: float | None = None
    merge: tuple[Path, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether nothing was asked for that only a GPU suite knows."""
        return self == Request()


def _makers(request: Request) -> dict[str, Any]:
    from kilat.bench.peers import makers, not_asked_for
    from kilat.bench.run import OURS

    everyone = dict(makers(request.backend))
    for name in request.contenders:
        if name not in everyone:
            raise ValueError(f"contender must be one of {', '.join(everyone)}; got {name}")
    asked = (OURS, *request.contenders) if request.contenders else tuple(everyone)
    return {name: make if name in asked else not_asked_for for name, make in everyone.items()}


def _line(row: Row) -> str:
    """One cell in one line: who reached what, and the ratio."""
    reached = [f"{name} {rate / 1e12:.0f}" for name in row.timings if (rate := row.achieved(name)) is not None]
    ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
    wrong = "" if row.ok else f"  NOT TIMED {row.not_timed.get('kilat')}"
    ours = row.achieved("kilat")
    share = "" if ours is None or not row.limit else f", kilat at {ours / row.limit:.0%} of matmul"
    return f"{row.cell.name}: {ratio}  {', '.join(reached)} TFLOP/s{share}{wrong}"


def show_rows(rows: list[Row]) -> None:
    """Print every cell with the TFLOP/s of all contenders, geometric means, and who was not timed for what reason."""
    from kilat.bench.run import OURS

    names = list(dict.fromkeys(name for row in rows for name in row.timings))
    made = table("TFLOP/s", "cell", *names, "peer / kilat", "of matmul", "error / allowed", "host")
    for row in rows:
        rates = [row.achieved(name) for name in names]
        shares = [v.error / v.allowed if v.allowed else 0.0 for v in row.verdicts.get(OURS, [])]
        ours = row.achieved(OURS)
        made.add_row(
            row.cell.name,
            *("-" if rate is None else f"{rate / 1e12:.0f}" for rate in rates),
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            "-" if ours is None or not row.limit else f"{ours / row.limit:.0%}",
            f"{max(shares):.2f}" if shares else "-",
            seconds(row.host_seconds.get(OURS)),
        )
    show(made)
    _show_groups(rows)
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        for item in row.not_timed.items():
            reasons[item] = reasons.get(item, 0) + 1
    for (name, reason), count in reasons.items():
        show(f"not timed: {name}, {count} cells: {reason}")


def _show_groups(rows: list[Row]) -> None:
    """Print what groups of cells come to."""
    from kilat.bench.gpu_groups import summaries

    columns = ("mean", "smallest", "of matmul", "deterministic", "extra", "host", "sustained", "cells")
    made = table("Geometric means of best peer / kilat", "group", *columns)
    for group in summaries(rows):
        found: dict[str, Any] = dict(group)
        share, slower, extra = found["share_of_limit"], found["deterministic"], found["extra_bytes"]
        made.add_row(
            found["name"],
            _ratio(found["ratio"]),
            _ratio(found["smallest"]),
            "-" if share is None else f"{share:.0%}",
            "-" if slower is None else f"{slower:.2f} x, at most {found['deterministic_largest']:.2f}",
            size(extra),
            seconds(found["host_seconds"]),
            _ratio(found["sustained"]),
            f"{found['measured']} of {found['cells']}",
        )
    show(made)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _merge(suite: str, cells: list[Cell], request: Request, json_path: Path) -> bool:
    from kilat.bench.gpu import dumps, merge
    from kilat.bench.run import Row

    document: dict[str, Any] = merge(list(request.merge), cells, suite)
    json_path.write_text(dumps(document), encoding="utf-8")
    rows = [Row.from_json(row) for row in document["rows"]]
    show_rows(rows)
    for name in document["missing"]:
        show(f"missing: {name}")
    return not document["missing"] and all(row.ok for row in rows)


def _processes() -> int:
    """That compile at a time."""
    return max(1, (os.cpu_count() or 1) - 2)


def _prepare(cells: list[Cell], request: Request, names: list[str], sustained: bool) -> None:
    """Say how long the cells will take, and compile what is kept on disk in several processes."""
    from kilat.bench.gpu_warm import tasks, warm
    from kilat.bench.h200 import estimate
    from kilat.bench.run import OURS

    asked = [name for name in names if not request.contenders or name in (OURS, *request.contenders)]
    todo = tasks(cells, asked, request.backend)
    jobs = min(_processes(), len(todo))
    needed = estimate(cells, asked, jobs, sustained)
    late = request.deadline is not None and needed > request.deadline
    show(f"{len(cells)} cells, about {needed:.0f} s{', more than the deadline' if late else ''}")
    for reason in warm(todo, jobs) if jobs > 1 else ():
        show(f"while compiling: {reason}")


def run_gpu(suite: str, cells: list[Cell], request: Request, json_path: Path | None, reps: int) -> bool:
    """Measure one shard of a GPU suite into `json_path`, or merge; False if a kilat result is wrong or missing."""
    import torch

    from kilat.bench.gpu import Effort, Shard, matmul_rate, run_shard
    from kilat.bench.gpu_timing import Cuda
    from kilat.bench.h200 import deal, parse_shard

    if json_path is None or str(json_path) == "-":
        raise ValueError(f"json must be a file for suite {suite}, which is gone on with there; got {json_path}")
    if request.merge:
        return _merge(suite, cells, request, json_path)
    mine = deal(cells, *parse_shard(request.shard))
    makers = _makers(request)
    if not torch.cuda.is_available():
        raise ValueError(f"suite {suite} needs a CUDA device; torch sees none")
    begin, device = time.monotonic(), Cuda()
    shard = Shard.load(json_path, suite, request.shard)
    held = SUSTAINED_SUITES.get(suite, 0.0)
    _prepare([cell for cell in mine if cell.name not in shard.rows], request, list(makers), held > 0)
    shard.note_aside("preparation", time.monotonic() - begin)
    deadline = None if request.deadline is None else request.deadline - (time.monotonic() - begin)
    effort = Effort(reps=reps, sustained=held, deadline=deadline)
    done = run_shard(
        mine,
        shard,
        makers,
        device,
        effort,
        rate=lambda dtype: matmul_rate(dtype, device),
        on_cell=lambda row: show(_line(row)),
    )
    show_rows(list(shard.rows.values()))
    show("seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in shard.spent().items() if value >= 0.05))
    if not done:
        show(f"deadline: {len(shard.rows)} of {len(mine)} cells measured; run the same command again to go on")
    return done and all(row.ok for row in shard.rows.values())
