"""What a check found: errors, what was allowed, and torch's errors where torch can do the case."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """The largest error of one result (out, lse, a gradient: dq) of one case against float64.

    `note` says why kilat has no number.
    """

    case: str
    result: str
    error: float
    allowed: float
    torch_error: float | None = None
    torch_note: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within what is allowed; NaN is not."""
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """Error over allowed: 1 is the limit; infinite for NaN."""
        if math.isnan(self.error):
            return math.inf
        if self.allowed == 0:
            return 0.0 if self.error == 0 else math.inf
        return self.error / self.allowed

    def to_json(self) -> dict[str, object]:
        """Return the fields and the verdict as plain values."""
        return {**vars(self), "ok": self.ok}


@dataclass(frozen=True)
class Report:
    """All rows of a check, on one device."""

    device: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every row is within what is allowed; no rows prove nothing."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def worst(self) -> list[Row]:
        """Return one row of each case: a wrong one, else the closest to its limit, of those that torch has first."""

        def rank(row: Row) -> tuple[bool, bool, float]:
            return not row.ok, row.torch_error is not None, row.share

        cases: dict[str, list[Row]] = {}
        for row in self.rows:
            cases.setdefault(row.case, []).append(row)
        return [max(rows, key=rank) for rows in cases.values()]

    def summary(self) -> str:
        """Return one line: how many cases and results, and how many are wrong."""
        wrong = sum(not row.ok for row in self.rows)
        verdict = "all within the error budget" if self.ok else f"{wrong} outside the error budget"
        return f"{len(self.worst())} cases, {len(self.rows)} results on {self.device}: {verdict}"

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {"device": self.device, "ok": self.ok, "rows": [row.to_json() for row in self.rows]}

    def __str__(self) -> str:
        lines = [f"{'case':<34} {'result':<10} {'error':>8} {'allowed':>8} {'torch':>8}"]
        for row in self.worst():
            beside = row.torch_note or "-" if row.torch_error is None else f"{row.torch_error:8.1e}"
            verdict = "" if row.ok else f"  WRONG {row.note}"
            lines.append(
                f"{row.case:<34} {row.result:<10} {row.error:8.1e} {row.allowed:8.1e} {beside:>8}{verdict}".rstrip()
            )
        return "\n".join([*lines, self.summary()])
