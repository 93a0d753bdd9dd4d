"""`kilat.check`: its cases, its verdicts, and that it sees what is wrong."""

from __future__ import annotations

import json
import math

import pytest

import kilat
from kilat.checks import CASES, Report, Row
from kilat.checks import run as checks

BY_NAME = {case.name: case for case in CASES}
SAMPLE = ["mask: window with first tokens", "padded batch", "ragged, causal, grouped heads", "cache, pages, bfloat16"]


def test_cases_have_distinct_names() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_case_is_within_its_budget(name: str) -> None:
    rows = checks.run_case(BY_NAME[name])
    assert {"out", "lse"} <= {row.result for row in rows}
    assert [str(row) for row in rows if not row.ok] == []
    gradients = {"dq", "dk", "dv"} <= {row.result for row in rows}
    assert gradients == BY_NAME[name].gradients


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_agrees_with_itself_through_the_public_calls(case: checks.Case) -> None:
    rows = checks.run_case(case, backend="reference")
    assert [str(row) for row in rows if not row.ok] == []


def test_torch_stands_beside_where_it_can() -> None:
    assert all(row.torch_error is not None for row in checks.run_case(BY_NAME["mask: window"]) if row.result != "lse")
    assert {row.torch_note for row in checks.run_case(BY_NAME["sink"])} == {"no sink"}


def test_a_call_that_raises_is_a_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(checks, "attention", raising)
    (row,) = checks.run_case(BY_NAME["full"])
    assert not row.ok
    assert row.note == "RuntimeError: no memory"


def test_verdicts() -> None:
    good, bad, sick = Row("a", "out", 1.0, 1.0), Row("a", "lse", 2.0, 1.0), Row("b", "out", math.nan, 1.0)
    assert [row.ok for row in (good, bad, sick)] == [True, False, False]
    report = Report("cpu", (good, bad, sick))
    assert not report.ok
    assert report.worst() == [bad, sick]
    assert "WRONG" in str(report)
    assert "2 outside the error budget" in report.summary()
    assert json.dumps(report.to_json()["ok"]) == "false"
    assert not Report("cpu", ()).ok
    assert Report("cpu", (good,)).ok


def test_only_the_cpu_is_checked() -> None:
    with pytest.raises(ValueError, match="device must be cpu"):
        kilat.check("tpu")
