"""The scripts that run on a GPU machine, as far as they can be run without one."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kilat.bench import gpu_groups, gpu_timing
from kilat.bench.cells import square
from kilat.bench.run import Row
from kilat.bench.timing import Timing

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_attempt  # noqa: E402
import gpu_cases  # noqa: E402
import gpu_pool  # noqa: E402
import gpu_random  # noqa: E402
import gpu_sanitize  # noqa: E402
import gpu_table  # noqa: E402


def work(item: Any) -> list[dict[str, Any]]:
    """Stands for a call: its item says what becomes of the process."""
    if item == "dies":
        os._exit(7)
    if item == "hangs":
        time.sleep(1000)
    if item == "lost":
        return [{"item": item, "reason": "CUDA error: an illegal memory access was encountered"}]
    return [{"item": item, "process": os.getpid()}]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_that_dies_costs_one_call(processes: int) -> None:
    groups: list[list[Any]] = [[1, "dies", 2, 3], [], [4, "lost", 5], [6, 7]]
    found = dict(gpu_pool.run(groups, work, processes, time.monotonic() + 100))
    assert set(found) == {1, 2, 3, 4, 5, 6, 7, "dies", "lost"}
    assert found["dies"] == "the process ended with 7"
    assert isinstance(found["lost"], list)
    of = {item: rows[0]["process"] for item, rows in found.items() if isinstance(item, int) and isinstance(rows, list)}
    assert of[6] == of[7]  # a group is one process's
    assert of[1] != of[2] == of[3]  # and what is left of it another's
    assert of[4] != of[5]


def test_a_process_that_hangs_costs_one_call() -> None:
    found = dict(gpu_pool.run([["hangs", 1]], work, 2, time.monotonic() + 100, hang=4.0))
    assert found["hangs"] == "no answer for 4 s"
    assert isinstance(found[1], list)


def test_nothing_is_waited_for_after_the_deadline() -> None:
    begin = time.monotonic()
    assert not list(gpu_pool.run([[1], ["hangs"]], work, 2, begin - 1))
    found = dict(gpu_pool.run([[1], ["hangs"]], work, 2, begin + 8))
    assert list(found) == [1]
    assert time.monotonic() - begin < 15


# ---- cases and random Problems ---------------------------------------------------------------------------------------
@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors stay on the CPU, whatever this machine has."""
    monkeypatch.setattr(gpu_attempt, "device", lambda: "cpu")


def in_this_process(groups: Any, work: Any, processes: int, deadline: float) -> Any:
    """`gpu_pool.run` without processes."""
    for group in groups:
        for item in group:
            yield item, work(item)


@pytest.mark.usefixtures("no_gpu")
def test_an_attempt_says_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in gpu_cases.cases() if case.name == "score-bias-causal")
    rows = gpu_attempt.attempt(case, ("cpu", "gluon"))
    assert [row["verdict"] for row in rows] == ["pass", "refused"]
    assert set(rows[0]["shares"]) == {"out", "lse", "q", "k", "v", "score.0.0"}
    assert all(0 <= share <= 1 for share in rows[0]["shares"].values())
    found = gpu_attempt.summary(rows)
    assert found["gluon"]["refusals"] == {"the gluon backend works on CUDA tensors": 1}
    assert found["cpu"]["verdicts"] == {"pass": 1}
    assert set(found["cpu"]["largest"]) == {"out", "lse", "q", "k", "v", "score"}
    whole = gpu_attempt._results

    def spoiled(*of: Any) -> dict[str, Any]:
        results = whole(*of)
        return results | {"k": results["k"] * 1.01}

    monkeypatch.setattr(gpu_attempt, "_results", spoiled)
    (row,) = gpu_attempt.attempt(case, ("cpu",))
    assert row["verdict"] == "failed"
    assert "k[" in row["reason"]


def test_cases_are_dealt_by_what_they_compile() -> None:
    some = gpu_cases.cases()
    names = [case.name for case in some]
    assert len(set(names)) == len(names)
    for count in (1, 3):
        dealt = [case.name for n in range(count) for group in gpu_cases.groups(some, n + 1, count) for case in group]
        assert sorted(dealt) == sorted(names)
    homes = [{gpu_cases.kernels(case) for case in group} for group in gpu_cases.groups(some, 1, 1)]
    assert all(len(home) == 1 for home in homes)
    assert {case.dtype for case in some} == {"float16", "bfloat16", "float32", "float64"}


@pytest.mark.usefixtures("no_gpu")
def test_cases_go_on_where_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = gpu_cases.cases()[:6]
    monkeypatch.setattr(gpu_cases, "cases", lambda: some)
    monkeypatch.setattr(gpu_pool, "run", in_this_process)
    path = tmp_path / "cases.json"
    run = ["gpu_cases.py", "--json", str(path), "--backends", "cpu"]
    monkeypatch.setattr(sys, "argv", [*run, "--shard", "1/2"])
    assert gpu_cases.main() == 0
    first = json.loads(path.read_text())
    assert 0 < first["cases"]["ran"] == first["cases"]["asked"] < 6
    monkeypatch.setattr(sys, "argv", run)
    done = {row["case"] for row in first["rows"]}

    def only_new(item: Any) -> list[dict[str, Any]]:
        assert item[0].name not in done
        return _pass(item)

    monkeypatch.setattr(gpu_cases, "work", only_new)
    assert gpu_cases.main() == 0
    second = json.loads(path.read_text())
    assert second["cases"] == {"asked": 6, "ran": 6}
    assert {"command", "date", "versions", "device", "git", "seconds"} <= set(second)
    assert second["backends"]["cpu"]["ran"] == 6
    monkeypatch.setattr(gpu_pool, "run", lambda *of: [])
    assert gpu_cases.main() == 0
    path.write_text(json.dumps(second | {"git": None}))
    with pytest.raises(ValueError, match="to be gone on with"):
        gpu_cases.main()
    path.unlink()
    assert gpu_cases.main() == 1  # nothing ran
    assert "failed" not in capsys.readouterr().err


def _pass(item: Any) -> list[dict[str, Any]]:
    case = item[0]
    return [{"case": case.name, "backend": "cpu", "dtype": case.dtype, "verdict": "pass", "reason": ""}]


def test_random_problems_are_the_same_in_every_run() -> None:
    first, again = ([gpu_random.draw(n) for n in range(300)] for _ in range(2))
    assert first == again
    assert len({str(case.seqlen) + str(case.lengths_q) for case in first}) > 200
    dealt = sorted(number for group in gpu_random.groups(300, ("triton",)) for number, _ in group)
    assert dealt == list(range(300))


def test_random_problems_have_every_layout_and_order_in_memory() -> None:
    drawn = [gpu_random.draw(n) for n in range(2000)]
    for shape in gpu_random.SHAPES:
        some = [case for case in drawn if (case.dtype, case.head_dim) == (shape["dtype"], shape["head_dim"])]
        assert {case.layout for case in some} == set(gpu_random.LAYOUTS)
        assert {case.strides for case in some} == set(gpu_random.STRIDES)
        assert {case.heads[0] // case.heads[1] for case in some} == set(gpu_random.GROUPS)
    for kind in gpu_random.KINDS:
        assert len({case.layout for case in drawn if case.mask == kind["mask"]}) == 3
    assert {0, 1, 4} <= {case.batch for case in drawn}
    assert any(0 in (case.lengths_q or ()) for case in drawn)
    assert any(case.seqlen[0] == 0 for case in drawn)
    assert any(case.seqlen[1] % 16 == 0 and case.seqlen[1] for case in drawn)
    odd = [case for case in drawn if case.mask in ("dense", "everything")]
    assert all(n % 2 and n > 1 for case in odd if case.layout != "ragged" for n in case.seqlen)


@pytest.mark.usefixtures("no_gpu")
def test_the_random_report_counts_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pool, "run", in_this_process)
    path = tmp_path / "random.json"
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(path), "--count", "12", "--backends", "cpu,gluon"])
    assert gpu_random.main() == 0
    document = json.loads(path.read_text())
    assert document["problems"] == {"asked": 12, "ran": 12, "templates": 64}
    assert document["backends"]["cpu"]["verdicts"] == {"pass": 12}
    assert document["backends"]["gluon"]["verdicts"] == {"refused": 12}
    assert {"command", "date", "versions", "device", "git", "seconds", "failures"} <= set(document)
    monkeypatch.setattr(gpu_pool, "run", lambda *of: [((3, ("cpu",)), "the process ended with 7")])
    assert gpu_random.main() == 1
    document = json.loads(path.read_text())
    assert document["problems"]["ran"] == 1
    assert document["failures"][0]["case"]["name"] == "random-3"


# ---- sanitizer -------------------------------------------------------------------------------------------------------
RACES = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at forward_kernel+0x1b0 in /home/someone/src/forward.py:260
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: main [0x8a0] in /usr/bin/python3
========= Error: Race reported between Write access at forward_kernel+0x1b0 in /home/someone/src/forward.py:260
=========
checked {'out': 0.1}
unrelated noise in /home/someone
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_logs_of_the_sanitizer_are_trimmed() -> None:
    text = gpu_sanitize.trimmed(RACES)
    assert text.splitlines() == [
        "========= COMPUTE-SANITIZER",
        "========= Error: Race reported between Write access at forward_kernel+0x1b0 in forward.py:260  (2 times)",
        "checked {'out': 0.1}",
        "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)",
    ]
    long = gpu_sanitize.trimmed("".join(f"========= {n}\n" for n in range(500)))
    assert len(long.splitlines()) == gpu_sanitize.MOST_LINES + 1
    assert long.endswith("========= 499\n")
    assert gpu_sanitize.counts_of(RACES) == {"hazards": 2, "errors": 1, "warnings": 1}
    assert gpu_sanitize.counts_of("========= ERROR SUMMARY: 0 errors") == {"errors": 0}
    assert gpu_sanitize.counts_of("========= killed") == {}


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", gpu_sanitize.SUBJECTS)
def test_what_is_sanitized_can_be_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where nothing but the case is the same."""
    subject = gpu_sanitize.SUBJECTS[name]
    monkeypatch.setitem(gpu_sanitize.SUBJECTS, name, dataclasses.replace(subject, backend="cpu"))
    gpu_sanitize.run_one(name)


def test_kernels_that_are_sanitized_exist() -> None:
    """A name that no kernel has would be a clean bill for nothing."""
    for subject in gpu_sanitize.SUBJECTS.values():
        folder = SCRIPTS.parent / "src" / "kilat" / "backends" / subject.backend
        assert any(f"\ndef {subject.kernel}(" in path.read_text() for path in folder.glob("*.py")), subject


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_tables_of_a_gpu_suite() -> None:
    """Groups with all that was measured, and a grid of lengths; columns of which nothing was measured stay away."""
    rows: list[Row] = []
    for length in (512, 1 << 20):
        row = Row(square("backward", 1, 2, length, 64, "bfloat16", True), limit=1e12)
        row.timings = {
            name: Timing(s, s, 1) for name, s in (("kilat", 2.0), ("kilat-deterministic", 3.0), ("fa4", 4.0))
        }
        rows.append(row)
    rows[0].timings["kilat"] = Timing(rows[0].cell.flops / 5e12, 1.0, 1)

    def document() -> dict[str, Any]:
        listed = [row.to_json() | {"sustained": {}, "backend": "gluon"} for row in rows]
        return {"rows": listed, "groups": gpu_groups.summaries(rows)}

    text = gpu_table.groups(document(), detailed=False)
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == ["backward all", "backward bfloat16"]
    header = text.splitlines()[0]
    assert "deterministic / default" in header
    assert "sustained" not in header
    assert "host" not in header
    grid = gpu_table.grid(document()).splitlines()
    assert grid[0] == "| TFLOP/s (best peer / kilat) | 512 | 1M |"
    assert grid[2].startswith("| backward bfloat16 causal D=64 | 5 (")
    assert grid[2].endswith("(2.00) |")
    rows[0].sustained = {n: gpu_timing.Sustained(s, 1, None, None) for n, s in (("kilat", 2.0), ("fa4", 3.0))}
    rows[0].host_seconds, rows[0].extra_bytes = {"kilat": 12e-6}, {"kilat": 1 << 20}
    text = gpu_table.groups(document(), detailed=True)
    assert "| 12, at most 12 | 1.50 |" in text
