"""One suite: check every contender on a cell, time those that are right in turn, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kilat.bench.cells import Cell
from kilat.bench.contenders import MAKERS, Contender, Inputs, make_inputs
from kilat.bench.gpu_timing import Sustained
from kilat.bench.limits import matmul_rate, read_bandwidth
from kilat.bench.spent import Stopwatch
from kilat.bench.timing import Timing, geometric_mean, interleave
from kilat.bench.verify import Verdict, expect, verify

Makers = Mapping[str, Callable[[Cell, Inputs], Contender]]
OURS = "kilat"
# On a quiet machine medians of these calls stay within a few percent of the minimum.
UNSTEADY = 1.5


def is_peer(name: str) -> bool:
    """Whether a contender is somebody else; `kilat-...` is kilat with other options."""
    return not name.startswith(OURS)


@dataclass
class Row:
    """A cell's outcome: errors and times by contender, and the reason of every contender that was not timed.

    GPU suites also have host_seconds, extra_bytes (peak above inputs and outputs), for some cells sustained, and spent:
    where the seconds of the whole cell went.
    """

    cell: Cell
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict[str, list[Verdict]])
    timings: dict[str, Timing] = field(default_factory=dict[str, Timing])
    not_timed: dict[str, str] = field(default_factory=dict[str, str])
    limit: float | None = None
    backend: str = ""
    host_seconds: dict[str, float] = field(default_factory=dict[str, float])
    extra_bytes: dict[str, int] = field(default_factory=dict[str, int])
    sustained: dict[str, Sustained] = field(default_factory=dict[str, Sustained])
    spent: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def ok(self) -> bool:
        """Whether kilat was right and timed; a peer that fails is noted, but is no fault of ours."""
        return OURS in self.timings

    @property
    def best_peer(self) -> str | None:
        """The peer with the smallest median, None where none was timed."""
        peers = [name for name in self.timings if is_peer(name)]
        return min(peers, key=lambda name: self.timings[name].median, default=None)

    @property
    def ratio(self) -> float | None:
        """The fastest peer's median over kilat's: above 1, kilat is faster."""
        if OURS not in self.timings or self.best_peer is None:
            return None
        return self.timings[self.best_peer].median / self.timings[OURS].median

    @property
    def ratio_of_minima(self) -> float | None:
        """The same from the shortest calls, which other programs disturb least."""
        peers = [timing.minimum for name, timing in self.timings.items() if is_peer(name)]
        return min(peers) / self.timings[OURS].minimum if OURS in self.timings and peers else None

    @property
    def unsteady(self) -> bool:
        """Whether some contender's median is far above its minimum: something else had the cores."""
        return any(timing.median > UNSTEADY * timing.minimum for timing in self.timings.values())

    @property
    def work(self) -> int:
        """What the limit counts: bytes read for a decode, floating-point operations otherwise."""
        return self.cell.bytes_read if self.cell.direction == "decode" else self.cell.flops

    def achieved(self, name: str) -> float | None:
        """Work a second of a contender, from its median."""
        return self.work / self.timings[name].median if name in self.timings else None

    def to_json(self) -> dict[str, object]:
        """Return the row as plain values; times in seconds."""
        achieved = self.achieved(OURS)
        found: dict[str, object] = {
            "cell": self.cell.to_json(),
            "errors": {name: {v.result: v.error for v in verdicts} for name, verdicts in self.verdicts.items()},
            "allowed": {v.result: v.allowed for verdicts in self.verdicts.values() for v in verdicts},
            "seconds": {name: vars(timing) for name, timing in self.timings.items()},
            "not_timed": self.not_timed,
            "best_peer": self.best_peer,
            "ratio": self.ratio,
            "ratio_of_minima": self.ratio_of_minima,
            "unsteady": self.unsteady,
            "achieved": {name: self.achieved(name) for name in self.timings},
            "limit": self.limit,
            "share_of_limit": achieved / self.limit if achieved is not None and self.limit else None,
        }
        if self.cell.device != "cpu" or self.host_seconds:
            found |= {"backend": self.backend, "host_seconds": self.host_seconds, "extra_bytes": self.extra_bytes}
            found |= {"sustained": {name: vars(sustained) for name, sustained in self.sustained.items()}}
            found |= {"spent": self.spent}
        return found

    @staticmethod
    def from_json(values: dict[str, Any]) -> Row:
        """Rebuild a row from what `to_json` returned, or the part of it that is no result of another."""
        allowed = values["allowed"]

        def verdict(result: str, error: float | None) -> Verdict:
            return Verdict(result, torch.inf if error is None else error, allowed[result])

        return Row(
            Cell.from_json(values["cell"]),
            {name: [verdict(*item) for item in errors.items()] for name, errors in values["errors"].items()},
            {name: Timing(**timing) for name, timing in values["seconds"].items()},
            dict(values["not_timed"]),
            values["limit"],
            values.get("backend", ""),
            dict(values.get("host_seconds", {})),
            dict(values.get("extra_bytes", {})),
            {name: Sustained(**sustained) for name, sustained in values.get("sustained", {}).items()},
            dict(values.get("spent", {})),
        )


def prepare(cell: Cell, makers: Makers) -> tuple[Row, dict[str, Contender]]:
    """Check every contender on a cell; return a row without times, and those contenders that may be timed.

    A contender that refuses the cell or computes something else is not among them; the row says why.
    """
    watch = Stopwatch.of(cell.device)
    row = Row(cell, spent=watch.spent)
    with watch.part("inputs"):
        inputs = make_inputs(cell)
    with watch.part("oracle"):
        expected = expect(cell, inputs)
    ready: dict[str, Contender] = {}
    for name, make in makers.items():
        try:
            with watch.part(f"first call, {name}"):  # a backward's forward, too, and what they compile
                contender = make(cell, inputs)
                with torch.set_grad_enabled(cell.direction == "backward"), contender.context():
                    results = contender.results()
            with watch.part(f"check, {name}"):
                verdicts = verify(results, expected)
            del results  # or the next contender would have that much less memory
        except Exception as error:  # noqa: BLE001  whatever a contender raises is why it was not timed
            row.not_timed[name] = f"{type(error).__name__}: {error}"
            continue
        row.verdicts[name] = verdicts
        if name == OURS:
            row.backend = contender.backend
        wrong = [f"{v.result} off by {v.error:.2e}, allowed {v.allowed:.2e}" for v in verdicts if not v.ok]
        if wrong:
            row.not_timed[name] = "wrong: " + "; ".join(wrong)
        else:
            ready[name] = contender
    return row, ready


def measure(cell: Cell, *, reps: int, seconds: float, makers: Makers = MAKERS) -> Row:
    """Check and time one cell on the CPU."""
    row, ready = prepare(cell, makers)
    if ready:
        calls = {name: contender.call for name, contender in ready.items()}
        with torch.set_grad_enabled(cell.direction == "backward"):
            row.timings = interleave(calls, reps=reps, seconds=seconds)
    return row


def measure_limits(cells: Sequence[Cell]) -> dict[str, float]:
    """Measure what bounds these cells: `matmul_<dtype>` in operations a second, `read` in bytes a second."""
    limits: dict[str, float] = {}
    for cell in cells:
        key = "read" if cell.direction == "decode" else f"matmul_{cell.dtype}"
        if key not in limits:
            limits[key] = read_bandwidth() if key == "read" else matmul_rate(cell.dtype)
    return limits


def run_cells(
    cells: Sequence[Cell],
    *,
    reps: int,
    seconds: float = 0.2,
    makers: Makers = MAKERS,
    on_cell: Callable[[Row], None] | None = None,
) -> tuple[list[Row], dict[str, float]]:
    """Measure all cells and, before and after them, the limits of the machine (the better of the two counts)."""
    limits = measure_limits(cells)
    rows: list[Row] = []
    for cell in cells:
        rows.append(measure(cell, reps=reps, seconds=seconds, makers=makers))
        if on_cell is not None:
            on_cell(rows[-1])
    for key, value in measure_limits(cells).items():
        limits[key] = max(limits[key], value)
    for row in rows:
        row.limit = limits["read" if row.cell.direction == "decode" else f"matmul_{row.cell.dtype}"]
    return rows, limits


@dataclass(frozen=True)
class Group:
    """Geometric mean of the ratios of some cells, with the smallest and the number of cells that have one."""

    name: str
    cells: int
    measured: int
    ratio: float
    smallest: float


def members(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by direction and dtype, then also by head_dim and mask, in order of appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        cell = row.cell
        found.setdefault(f"{cell.direction} {cell.dtype}", []).append(row)
    for row in rows:
        cell = row.cell
        if cell.direction != "decode":
            found.setdefault(f"{cell.direction} {cell.dtype} {_kind(cell)}", []).append(row)
    return found


def group_rows(rows: Sequence[Row]) -> list[Group]:
    """The groups of `members`, with the means of their ratios."""
    groups: list[Group] = []
    for name, some in members(rows).items():
        ratios = [row.ratio for row in some if row.ratio is not None]
        groups.append(Group(name, len(some), len(ratios), geometric_mean(ratios), min(ratios, default=float("nan"))))
    return groups


def _kind(cell: Cell) -> str:
    """What a group has in common beside direction and dtype."""
    grouped = "" if cell.num_heads_q == cell.num_heads_kv else f" H={cell.num_heads_q}/{cell.num_heads_kv}"
    return f"D={cell.dims}{grouped} {cell.mask}{' ragged' if cell.lengths else ''}"


def report(
    rows: Sequence[Row], limits: Mapping[str, float], suite: str, about: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Put rows, group means, limits and provenance (`about`, or this moment's) into one JSON-ready document."""
    from kilat.bench.machine import provenance

    groups = [{**vars(g), "ratio": _number(g.ratio), "smallest": _number(g.smallest)} for g in group_rows(rows)]
    return {
        "schema": 1,
        "suite": suite,
        **(provenance() if about is None else about),
        "limits": dict(limits),
        "groups": groups,
        "rows": [row.to_json() for row in rows],
    }


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if value == value else None
