"""The GPU suite: cells measured one by one into a JSON file that a later command goes on with; files are merged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kilat.bench.cells import Cell
from kilat.bench.gpu_groups import summaries
from kilat.bench.gpu_timing import Cost, Device, cost_of, extra_bytes, host_seconds, sustain, take_turns
from kilat.bench.h200 import SUSTAINED, why_left_out
from kilat.bench.machine import gpu, gpu_versions, provenance, without_folder
from kilat.bench.run import OURS, Makers, Row, is_peer, prepare, report
from kilat.bench.spent import Stopwatch, total

MATMUL_SIZE = 8192
# A cell that the process did not survive so often is given up.
MAX_ATTEMPTS = 2


class LostDeviceError(RuntimeError):
    """The GPU no longer answers this process; the row says which cell it was in."""

    def __init__(self, row: Row, reason: str) -> None:
        super().__init__(f"the GPU was lost in {row.cell.name}: {reason}; run the same command again to go on")
        self.row = row


@dataclass(frozen=True)
class Effort:
    """How long is measured: rounds at least, seconds a contender, seconds of a sustained run, and of everything."""

    reps: int = 7
    seconds: float = 0.1
    sustained: float = 1.0
    deadline: float | None = None


def measure(cell: Cell, makers: Makers, device: Device, effort: Effort) -> Row:
    """Check and time one cell on the GPU; raises LostDeviceError if a contender took the device down."""
    reasons = {name: why_left_out(cell, name) for name in makers}
    row, ready = prepare(cell, {name: make for name, make in makers.items() if not reasons[name]})
    row.not_timed |= {name: reason for name, reason in reasons.items() if reason}
    watch = Stopwatch(device.synchronize, row.spent)
    try:
        device.synchronize()
        with torch.set_grad_enabled(cell.direction == "backward"):
            with watch.part("warm-up"):
                costs = {name: cost_of(contender, device) for name, contender in ready.items()}
            with watch.part("rounds"):
                if ready:
                    row.timings = take_turns(ready, device, costs, reps=effort.reps, seconds=effort.seconds)
            with watch.part("host time"):
                for name, contender in ready.items():
                    row.host_seconds[name] = host_seconds(contender, device, costs[name])
            with watch.part("memory"):
                for name, contender in ready.items():
                    row.extra_bytes[name] = extra_bytes(contender, device)
            with watch.part("sustained"):
                for name in held_for_seconds(row) if effort.sustained else ():
                    row.sustained[name] = sustain(ready[name], device, costs[name], seconds=effort.sustained)
    except RuntimeError as error:
        row.not_timed.setdefault(OURS, f"{type(error).__name__}: {error}")
        raise LostDeviceError(row, str(error)) from error
    return row


def held_for_seconds(row: Row) -> list[str]:
    """Who also runs for seconds in a cell: kilat and the fastest peer, in the cells of SUSTAINED."""
    if row.cell.name not in SUSTAINED:
        return []
    return [name for name in row.timings if name == OURS or (is_peer(name) and name == row.best_peer)]


def matmul_rate(dtype: str, device: Device, size: int = MATMUL_SIZE, where: str = "cuda") -> float:
    """Floating-point operations a second of torch.matmul on square matrices, median, timed like a contender."""
    from kilat.bench.contenders import Contender

    a, b = (torch.randn(size, size, device=where).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    contender = Contender(lambda: torch.matmul(a, b, out=out), dict)
    cost: Mapping[str, Cost] = {"matmul": cost_of(contender, device)}
    timing = take_turns({"matmul": contender}, device, cost, reps=7, seconds=0.1)["matmul"]
    return 2 * size**3 / timing.median


@dataclass
class Shard:
    """The file of one command: its rows so far, what was measured beside them, and how often cells were begun."""

    path: Path
    suite: str
    shard: str
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    limits: dict[str, float] = field(default_factory=dict[str, float])
    attempts: dict[str, int] = field(default_factory=dict[str, int])
    about: dict[str, object] = field(default_factory=dict[str, object])
    elapsed: dict[str, float] = field(default_factory=dict[str, float])  # seconds of each cell, checks included
    aside: dict[str, float] = field(default_factory=dict[str, float])  # seconds that belong to no cell

    @staticmethod
    def load(path: Path, suite: str, shard: str) -> Shard:
        """Take up a file, or begin one; raises ValueError if it holds another suite, shard or revision."""
        made = Shard(path, suite, shard, about=gpu_provenance())
        if not path.exists():
            return made
        document = json.loads(path.read_text(encoding="utf-8"))
        here = {"suite": suite, "shard": shard, "git": made.about["git"]}
        for name, value in here.items():
            if document.get(name) != value:
                raise ValueError(f"{path} must hold {name} {value} to be gone on with; got {document.get(name)}")
        made.rows = {row.cell.name: row for row in map(Row.from_json, document["rows"])}
        made.limits, made.attempts = dict(document["limits"]), dict(document["attempts"])
        made.elapsed = dict(document.get("cell_seconds", {}))
        made.aside = dict(document.get("seconds_aside", {}))
        return made

    def save(self) -> None:
        """Write the file anew; a reader or a killed process never sees half of it."""
        begin = time.monotonic()
        for row in self.rows.values():
            row.limit = self.limits.get(f"matmul_{row.cell.dtype}")
        document = report(list(self.rows.values()), self.limits, self.suite, self.about)
        document |= {"shard": self.shard, "attempts": self.attempts, "cell_seconds": self.elapsed}
        document |= {"seconds_aside": self.aside, "spent": self.spent()}
        document["groups"] = summaries(list(self.rows.values()))
        part = self.path.with_suffix(".part")
        part.write_text(dumps(document), encoding="utf-8")
        part.replace(self.path)
        self.note_aside("saving", time.monotonic() - begin)

    def spent(self) -> dict[str, float]:
        """Seconds by part, of all cells and beside them, the costliest first."""
        return total([self.aside, *(row.spent for row in self.rows.values())])

    def note_aside(self, name: str, elapsed: float) -> None:
        """Add seconds that belong to no cell."""
        self.aside[name] = self.aside.get(name, 0.0) + elapsed

    def note_limits(self, dtypes: Sequence[str], rate: Callable[[str], float]) -> None:
        """Measure the matmul rates of these dtypes; the best of all measurements counts."""
        begin = time.monotonic()
        for dtype in dtypes:
            key = f"matmul_{dtype}"
            self.limits[key] = max(rate(dtype), self.limits.get(key, 0.0))
        self.note_aside("matmul", time.monotonic() - begin)


def gpu_provenance() -> dict[str, object]:
    """Command, date, versions, GPU and revision."""
    return provenance() | {"versions": gpu_versions(), "device": gpu()}


def dumps(document: Mapping[str, object]) -> str:
    """JSON with a row a line, so that a grid of hundreds of cells stays readable; infinities become null."""
    rows = document["rows"]
    head = {name: value for name, value in document.items() if name != "rows"}
    text = json.dumps(_finite(head), indent=1)[:-2]
    listed = ",\n".join("  " + json.dumps(_finite(row), allow_nan=False) for row in _list(rows))
    return f'{text},\n "rows": [\n{listed}\n ]\n}}\n'


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity; five digits are more than a clock resolves."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < float("inf") else None
    return value


def run_shard(
    cells: Sequence[Cell],
    shard: Shard,
    makers: Makers,
    device: Device,
    effort: Effort,
    *,
    rate: Callable[[str], float],
    on_cell: Callable[[Row], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Measure the cells that the shard does not hold yet, saving after each; False if the deadline left some.

    A cell that ended the process twice is given up, with that reason.
    """
    begin = clock()
    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    todo = [cell for cell in cells if cell.name not in shard.rows]
    if todo:
        shard.note_limits(dtypes, rate)
    for cell in todo:
        if effort.deadline is not None and clock() - begin > effort.deadline:
            break
        attempts = shard.attempts.get(cell.name, 0)
        shard.attempts[cell.name] = attempts + 1
        if attempts >= MAX_ATTEMPTS:
            reason = f"given up: the process ended {attempts} times in this cell"
            shard.rows[cell.name] = Row(cell, not_timed={OURS: reason})
            continue
        shard.save()  # the row before, and that this one was begun
        begun = clock()
        try:
            row = measure(cell, makers, device, effort)
        except LostDeviceError as error:
            shard.rows[cell.name] = error.row
            shard.save()
            raise
        row.limit = shard.limits.get(f"matmul_{cell.dtype}")
        shard.rows[cell.name] = row
        shard.elapsed[cell.name] = clock() - begun
        if on_cell is not None:
            on_cell(row)
    shard.save()
    if todo:
        shard.note_limits(dtypes, rate)
        shard.save()
    return all(cell.name in shard.rows for cell in cells)


def merge(paths: Sequence[Path], cells: Sequence[Cell], suite: str) -> dict[str, object]:
    """Put the files of several commands into one document, in the order of `cells`; a later file's row wins.

    Every row keeps the limit of its own run. Raises ValueError if the files disagree on suite, revision or GPU; cells
    that none of them has are listed under `missing`.
    """
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for document in documents:
        document["command"] = " ".join(map(without_folder, document["command"].split()))
    if not documents:
        raise ValueError("merge must be given at least one file; got none")
    for path, document in zip(paths, documents, strict=True):
        if document.get("suite") != suite:
            raise ValueError(f"{path} must hold suite {suite}; got {document.get('suite')}")
        for name, of in (("git", _whole), ("device", _model), ("versions", _whole)):
            first, here = of(documents[0].get(name)), of(document.get(name))
            if first != here:
                raise ValueError(f"{path} must have the {name} of {paths[0]}, {first}; got {here}")
    rows: dict[str, Row] = {}
    limits: dict[str, float] = {}
    for document in documents:
        rows |= {row.cell.name: row for row in map(Row.from_json, document["rows"])}
        for name, value in document["limits"].items():
            limits[name] = max(value, limits.get(name, 0.0))
    ordered = [rows[cell.name] for cell in cells if cell.name in rows]
    about = ("command", "date", "versions", "device", "git")
    runs = [{name: d[name] for name in (*about, "shard", "limits")} for d in documents]
    merged = report(ordered, limits, suite) | {name: documents[0][name] for name in about}
    merged["groups"] = summaries(ordered)
    return merged | {"runs": runs, "missing": [cell.name for cell in cells if cell.name not in rows]}


def _whole(value: Any) -> Any:
    return value


def _model(value: Any) -> Any:
    return value.get("model") if isinstance(value, dict) else value
