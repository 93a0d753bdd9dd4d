"""One suite: check every contender on a cell, time those that are right in turn, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kilat.bench.cells import Cell
from kilat.bench.contenders import MAKERS, Contender, Inputs, make_inputs
from kilat.bench.limits import matmul_rate, read_bandwidth
from kilat.bench.timing import Timing, geometric_mean, interleave
from kilat.bench.verify import Verdict, expect, verify

Makers = Mapping[str, Callable[[Cell, Inputs], Contender]]
OURS = "kilat"
# On a quiet machine medians of these calls stay within a few percent of the minimum.
UNSTEADY = 1.5


@dataclass
class Row:
    """A cell's outcome: errors and times by contender, and the reason of every contender that was not timed."""

    cell: Cell
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict[str, list[Verdict]])
    timings: dict[str, Timing] = field(default_factory=dict[str, Timing])
    not_timed: dict[str, str] = field(default_factory=dict[str, str])
    limit: float | None = None

    @property
    def ok(self) -> bool:
        """Whether kilat was right and timed; a peer that fails is noted, but is no fault of ours."""
        return OURS in self.timings

    @property
    def ratio(self) -> float | None:
        """The fastest peer's median over kilat's: above 1, kilat is faster."""
        peers = [timing.median for name, timing in self.timings.items() if name != OURS]
        if OURS not in self.timings or not peers:
            return None
        return min(peers) / self.timings[OURS].median

    @property
    def ratio_of_minima(self) -> float | None:
        """The same from the shortest calls, which other programs disturb least."""
        peers = [timing.minimum for name, timing in self.timings.items() if name != OURS]
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
        return {
            "cell": self.cell.to_json(),
            "errors": {name: {v.result: v.error for v in verdicts} for name, verdicts in self.verdicts.items()},
            "allowed": {v.result: v.allowed for verdicts in self.verdicts.values() for v in verdicts},
            "seconds": {name: vars(timing) for name, timing in self.timings.items()},
            "not_timed": self.not_timed,
            "ratio": self.ratio,
            "ratio_of_minima": self.ratio_of_minima,
            "unsteady": self.unsteady,
            "achieved": {name: self.achieved(name) for name in self.timings},
            "limit": self.limit,
            "share_of_limit": achieved / self.limit if achieved is not None and self.limit else None,
        }


def measure(cell: Cell, *, reps: int, seconds: float, makers: Makers = MAKERS) -> Row:
    """Check and time one cell.

    A contender that refuses the cell or computes something else is not timed; the row says why.
    """
    row = Row(cell)
    inputs = make_inputs(cell)
    expected = expect(cell, inputs)
    ready: dict[str, Callable[[], object]] = {}
    for name, make in makers.items():
        try:
            contender = make(cell, inputs)
            with torch.set_grad_enabled(cell.direction == "backward"):
                verdicts = verify(cell, contender.results(), expected)
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            row.not_timed[name] = f"{type(error).__name__}: {error}"
            continue
        row.verdicts[name] = verdicts
        wrong = [f"{v.result} off by {v.error:.2e}, allowed {v.allowed:.2e}" for v in verdicts if not v.ok]
        if wrong:
            row.not_timed[name] = "wrong: " + "; ".join(wrong)
        else:
            ready[name] = contender.call
    if ready:
        with torch.set_grad_enabled(cell.direction == "backward"):
            row.timings = interleave(ready, reps=reps, seconds=seconds)
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


def group_rows(rows: Sequence[Row]) -> list[Group]:
    """Group by direction and dtype, then also by head_dim and mask, in order of appearance."""
    members: dict[str, list[Row]] = {}
    for row in rows:
        cell = row.cell
        members.setdefault(f"{cell.direction} {cell.dtype}", []).append(row)
    for row in rows:
        cell = row.cell
        if cell.direction != "decode":
            members.setdefault(f"{cell.direction} {cell.dtype} D={cell.head_dim} {cell.mask}", []).append(row)
    groups: list[Group] = []
    for name, some in members.items():
        ratios = [row.ratio for row in some if row.ratio is not None]
        groups.append(Group(name, len(some), len(ratios), geometric_mean(ratios), min(ratios, default=float("nan"))))
    return groups


def report(rows: Sequence[Row], limits: Mapping[str, float], suite: str) -> dict[str, object]:
    """Put rows, group means, limits and provenance into one JSON-ready document."""
    from kilat.bench.machine import provenance

    groups = [{**vars(g), "ratio": _number(g.ratio), "smallest": _number(g.smallest)} for g in group_rows(rows)]
    return {
        "schema": 1,
        "suite": suite,
        **provenance(),
        "limits": dict(limits),
        "groups": groups,
        "rows": [row.to_json() for row in rows],
    }


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if value == value else None
