"""scripts/gpu_evidence.py with steps that need no GPU: what it skips, gives, stops, keeps and says."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kilat.bench import cells, gpu, gpu_groups, h200, machine
from kilat.bench.run import Row
from kilat.bench.timing import Timing

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_compile  # noqa: E402
import gpu_evidence  # noqa: E402
import gpu_evidence_files as files  # noqa: E402
import gpu_pool  # noqa: E402
import gpu_random  # noqa: E402
import gpu_sanitize  # noqa: E402

GIT = {"commit": "a" * 40, "dirty": False}
# Adds one to the count in its file, says what it was given, and then does `more`.
WORK = """\
import json, pathlib, sys, time
path, seconds, more = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
count = json.loads(path.read_text())["count"] if path.exists() else 0
path.write_text(json.dumps({"git": {"commit": "a" * 40, "dirty": False}, "count": count + 1, "given": float(seconds)}))
print("worked", count + 1, flush=True)
exec(more)
"""


def read(document: dict[str, Any]) -> files.State:
    """Two runs make a step complete."""
    return files.State(document["count"] >= 2, document.get("ok", True), f"count {document['count']}")


def step(name: str, more: str = "", least: float = 1.0) -> gpu_evidence.Step:
    """A step of a fraction of a second."""

    def command(file: Path, seconds: float) -> list[str]:
        return [sys.executable, "-c", WORK, str(file), str(seconds), more]

    return gpu_evidence.Step(name, f"{name}.json", command, read, least)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of tests, not of machines."""
    monkeypatch.setattr(gpu_evidence, "RESERVE", 2.0)
    monkeypatch.setattr(gpu_evidence, "GRACE", 0.5)
    monkeypatch.setattr(gpu_evidence, "COLLECT_SECONDS", 0.3)


def test_steps_go_on_until_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = [step("one"), step("two", "sys.exit(1)")]
    for turn, said in ((1, "part"), (2, "done")):
        found = gpu_evidence.work(some, tmp_path, 40.0, GIT)
        assert [name for name, _, _ in found] == ["one", "two"]
        assert all(what.words == f"count {turn}" for _, what, _ in found)
        assert f"one        {said}" in capsys.readouterr().out
    given = [json.loads((tmp_path / f"{name}.json").read_text())["given"] for name in ("one", "two")]
    assert 38.0 >= given[0] > given[1] > 20.0  # what is left, less the reserve
    found = gpu_evidence.work(some, tmp_path, 40.0, GIT)
    assert [said for _, _, said in found] == ["was done"] * 2
    runs = json.loads((tmp_path / "evidence.json").read_text())["runs"]
    assert [(run["step"], run["status"]) for run in runs] == [("one", "ended with 0"), ("two", "ended with 1")] * 2
    assert runs[1]["tail"] == ["worked 1"]
    assert {path.name for path in tmp_path.iterdir()} == {"one.json", "two.json", "evidence.json"}


def test_a_step_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """What it had written stays; the next one is not begun for less than it is worth."""
    child = "import subprocess; c = subprocess.Popen(['sleep', '100']); print(c.pid, flush=True); time.sleep(100)"
    begin = time.monotonic()
    found = gpu_evidence.work([step("one", child), step("two", least=3.0)], tmp_path, 5.0, GIT)
    assert time.monotonic() - begin < 12
    assert found[0][1].words == "count 1"
    assert found[0][2].startswith("stopped after")
    assert found[1][2].startswith("not begun: 0 s left, 3 wanted")
    assert found[1][1] == gpu_evidence.NOTHING  # which is no fault
    assert gpu_evidence.summary(found[1:]).startswith("two        part  nothing yet")
    pid = json.loads((tmp_path / "evidence.json").read_text())["runs"][0]["tail"][-1]
    status = Path(f"/proc/{pid}/stat")
    for _ in range(50):  # it is nobody's child here, and may be a zombie until init looks
        if not status.exists() or ") Z " in status.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the step's child lives on")


def test_a_step_that_leaves_nothing_is_at_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = gpu_evidence.Step("one", "one.json", lambda file, left: [sys.executable, "-c", "1 / 0"], read, 1.0)
    (found,) = gpu_evidence.work([broken], tmp_path, 30.0, GIT)
    assert (found[1].done, found[1].ok, found[2][:12]) == (False, False, "ended with 1")
    assert "one: ZeroDivisionError" in capsys.readouterr().out


def test_files_of_another_revision_are_kept_aside(tmp_path: Path) -> None:
    some = [step("one"), step("two"), step("three")]
    for name, git in (("one", GIT), ("two", {"commit": "b" * 40, "dirty": True})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"git": git, "count": 2}))
    (tmp_path / "three.json").write_text('{"half')
    gpu_evidence.put_away(tmp_path, some, GIT)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")} == {
        *("one.json", f"of-{'b' * 12}-dirty/two.json", "of-unknown/three.json")
    }


def test_results_of_an_earlier_command_are_taken(tmp_path: Path) -> None:
    out, before = tmp_path / "out", tmp_path / "before"
    for folder in (out, before):
        folder.mkdir()
    for name in ("one.json", "two.json", "evidence.json", "other.json"):
        (before / name).write_text(name)
        (before / name).chmod(0o444)
    (out / "two.json").write_text("newer")
    gpu_evidence.take(before, out, [step("one"), step("two"), step("three")])
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        **{name: name for name in ("one.json", "evidence.json")},
        "two.json": "newer",
    }
    (out / "one.json").write_text("may be written")


def test_a_packed_folder_is_packed_while_it_fills(tmp_path: Path) -> None:
    """The step is stopped; its second run finds the first one's files."""
    work = """\
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
path = folder / "sanitizer.json"
count = json.loads(path.read_text())["count"] if path.exists() else 0
path.write_text(json.dumps({"git": None, "count": count + 1}))
(folder / f"{count}.log").write_text("log")
time.sleep(100)
"""

    def command(folder: Path, seconds: float) -> list[str]:
        return [sys.executable, "-c", work, str(folder)]

    made = gpu_evidence.Step("pack", "sanitizer.tar.gz", command, read, 1.0, packs=True)
    for count in (1, 2):
        (found,) = gpu_evidence.work([made], tmp_path, 4.0, GIT)
        assert found[1].words == f"count {count}"
    files.unpack(tmp_path / "sanitizer.tar.gz", tmp_path / "logs")
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"sanitizer.json", "0.log", "1.log"}
    (tmp_path / "sanitizer.tar.gz").write_bytes(b"half")
    assert files.load(tmp_path / "sanitizer.tar.gz") is None


def _options(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"jobs": 14, "shards": 2, "contender": [], "count": 10000} | more)


def test_the_steps_are_those_of_the_issue() -> None:
    some = gpu_evidence.steps(_options(contender=["fa4"]))
    names = ["cases", "random", "compile", "sanitize", "h200-1", "h200-2", "h200-long"]
    assert [step.name for step in some] == names
    assert len({step.file for step in some} | {"evidence.json"}) <= 8  # what comes back from a machine
    for one in some:
        words = one.command(Path("FILE"), 300.0)
        assert "FILE" in words
        script = SCRIPTS.parent / "src/kilat/cli/bench.py" if "kilat.cli" in words else Path(words[1])
        text = script.read_text()
        assert all(f'"{word}"' in text for word in words if word.startswith("--")), one.name
    assert some[5].command(Path("FILE"), 300.0)[3:] == [
        *("bench", "--suite", "h200", "--shard", "2/2", "--contender", "fa4", "--json", "FILE", "--deadline", "285")
    ]
    assert [step.name for step in gpu_evidence.chosen(some, "h200,cases")] == ["cases", "h200-1", "h200-2"]
    assert [step.name for step in gpu_evidence.chosen(some, "h200-long")] == ["h200-long"]
    assert gpu_evidence.chosen(some, "") == some
    with pytest.raises(ValueError, match=r"only must name some of .*; got case"):
        gpu_evidence.chosen(some, "case")
    assert set(gpu_evidence.COMPILE_ROWS) <= set(gpu_compile.ROWS)


def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--seconds", "30", "--out", str(tmp_path / "none")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_evidence.main()
    assert "a CUDA device is needed; torch sees none" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "revision", lambda: GIT)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    path = "import os; print(os.environ['PYTHONPATH'])"
    monkeypatch.setattr(gpu_evidence, "steps", lambda options: [step("one", path), step("two")])
    out = tmp_path / "new" / "out"
    monkeypatch.setattr(sys, "argv", ["x", "--seconds", "30", "--out", str(out), "--only", "one"])
    assert gpu_evidence.main() == 1
    tail = json.loads((out / "evidence.json").read_text())["runs"][0]["tail"]
    assert tail[-1] == f"{SCRIPTS.parent / 'src'}:elsewhere"
    more = tmp_path / "more"
    monkeypatch.setattr(
        sys, "argv", ["x", "--seconds", "30", "--out", str(more), "--only", "one", "--resume", str(out)]
    )
    assert gpu_evidence.main() == 0
    assert not (more / "two.json").exists()
    assert "one        done  count 2" in capsys.readouterr().out


# ---- what files say --------------------------------------------------------------------------------------------------
def _state(read: Callable[..., files.State], document: Any, *more: Any) -> tuple[bool, bool]:
    found = read(json.loads(json.dumps(document)), *more)
    assert found.words
    return found.done, found.ok


def test_files_of_cases_problems_and_compile_times() -> None:
    backends = {"gluon": {"verdicts": {"pass": 3, "refused": 1}}}
    for ran, failures, found in ((4, [], (True, True)), (3, [], (False, True)), (4, [1], (True, False))):
        some = {"backends": backends, "failures": failures}
        assert _state(files.cases, some | {"cases": {"ran": ran, "asked": 4}}) == found
        assert _state(files.problems, some | {"problems": {"ran": ran, "asked": 4}}, 4) == found
    refused = {"backends": {"gluon": {"verdicts": {"refused": 4}}}, "failures": [], "cases": {"ran": 4, "asked": 4}}
    assert _state(files.cases, refused) == (True, False)  # shows nothing
    rows = [{"name": "a", "cold": {"forward": 1.0, "backward": 2.0}, "warm": {"forward": 0.5}}]
    assert _state(files.compile_times, {"rows": rows}, ["a"]) == (True, True)
    assert _state(files.compile_times, {"rows": []}, ["a"]) == (False, True)


def test_the_file_of_the_sanitizer() -> None:
    whole = {tool: {"status": "0", "bad": False, "errors": 0} for tool in ("plain", "memcheck", "racecheck")}
    document = {"subjects": ["a", "b"], "results": {"a": whole, "b": whole}}
    assert _state(files.sanitizer, document) == (True, True)
    for changed, found in (
        ({"status": "0", "bad": True, "errors": 1}, (True, False)),
        ({"status": "stopped after 20 s", "bad": True}, (False, True)),
    ):
        assert (
            _state(files.sanitizer, document | {"results": {"a": whole, "b": whole | {"memcheck": changed}}}) == found
        )
    assert _state(files.sanitizer, document | {"results": {"a": whole}}) == (False, True)


@pytest.mark.parametrize("name", ["h200", "h200-long"])
def test_the_file_of_a_suite(name: str) -> None:
    count = 2 if name == "h200" else 1
    rows = [Row(cell) for cell in h200.deal(cells.suite(name), 1, count)]
    for row in rows:
        row.timings = {who: Timing(s, s, 1) for who, s in (("kilat", 1.0), ("fa4", 2.0))}

    def document() -> dict[str, Any]:
        whole: dict[str, Any] = {"rows": [row.to_json() for row in rows], "groups": gpu_groups.summaries(rows)}
        return json.loads(gpu.dumps(whole | {"spent": {"oracle": 3.0}}))

    assert _state(files.suite, document(), name, 1, count) == (True, True)
    if name == "h200":
        assert "forward 2.000, least 2.000" in files.suite(document(), name, 1, 2).words
        assert _state(files.suite, document(), name, 2, 2)[0] is False  # the other shard's
    del rows[0].timings["kilat"]
    assert _state(files.suite, document(), name, 1, count) == (True, False)
    del rows[0]
    assert _state(files.suite, document(), name, 1, count) == (False, True)


# ---- scripts that go on ----------------------------------------------------------------------------------------------
def _row(item: Any) -> list[dict[str, Any]]:
    return [{"number": item[0], "case": "c", "backend": "cpu", "dtype": "float32", "verdict": "pass", "reason": ""}]


def test_random_problems_go_on_where_the_file_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "random.json", list[int]()
    most = 5

    def run(groups: Any, work: Any, processes: int, deadline: float) -> Any:
        items = [item for group in groups for item in group]
        asked.extend(item[0] for item in items)
        for n, item in enumerate(items[:most]):
            yield item, "the process ended with 7" if not n and most == 5 else _row(item)

    monkeypatch.setattr(gpu_pool, "run", run)
    monkeypatch.setattr(gpu_random, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(path), "--count", "12", "--backends", "cpu"])
    assert gpu_random.main() == 1
    first = json.loads(path.read_text())
    assert (first["problems"]["ran"], len(first["rows"]), len(first["lost"])) == (5, 4, 1)
    asked.clear()
    most = 100
    assert gpu_random.main() == 1  # one was lost
    second = json.loads(path.read_text())
    assert len(asked) == 7
    assert second["problems"]["ran"] == 12
    assert second["backends"]["cpu"]["ran"] == 11
    assert len(second["failures"]) == 1
    assert "rows" not in second
    path.write_text(json.dumps(first | {"git": None}))
    with pytest.raises(ValueError, match="to be gone on with"):
        gpu_random.main()


def test_compile_times_go_on_where_the_file_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, measured = tmp_path / "compile.json", list[str]()

    def row(name: str, processes: int) -> dict[str, Any]:
        assert processes == 1
        if len(measured) == 1:
            monkeypatch.setattr(gpu_compile.time, "monotonic", lambda: 1e9)
        measured.append(name)
        figures = {"forward": 1.0}
        kinds = dict.fromkeys(("cold", "warm", "warm_triton_imported"), figures)
        return {"name": name, "kernels": 1, **kinds, "warm_without_triton": True, "compiled_for_other_lengths": []}

    monkeypatch.setattr(gpu_compile, "row_of", row)
    names = list(gpu_evidence.COMPILE_ROWS)
    run = ["x", "--json", str(path), "--warm", "1", "--rows", ",".join(names)]
    monkeypatch.setattr(sys, "argv", [*run, "--seconds", "100"])
    assert gpu_compile.main() == 1
    assert gpu_compile.main() == 0
    assert measured == names
    document = json.loads(path.read_text())
    assert [row["name"] for row in document["rows"]] == names
    path.write_text(json.dumps(document | {"git": None}))
    with pytest.raises(ValueError, match="to be gone on with"):
        gpu_compile.main()


def test_the_sanitizer_goes_on_where_the_file_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, str]] = []
    status = "stopped after 20 s"

    def run(tool: str, name: str, seconds: float) -> dict[str, Any]:
        begun.append((tool, name))
        text = "checked {}\nERROR SUMMARY: 0 errors" if status == "0" or tool != "memcheck" else ""
        return {"status": status if tool == "memcheck" else "0", "text": text, "seconds": 1.0}

    monkeypatch.setattr(gpu_sanitize, "run", run)
    monkeypatch.setattr(gpu_sanitize.shutil, "which", lambda name: name)
    command = ["x", "--out", str(tmp_path), "--only", "gluon-f", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--deadline", "0"])
    assert gpu_sanitize.main() == 1
    assert not begun
    monkeypatch.setattr(sys, "argv", command)
    assert gpu_sanitize.main() == 1
    names = [name for name in gpu_sanitize.SUBJECTS if "gluon-f" in name]
    assert len(begun) == 3 * len(names)
    begun.clear()
    status = "0"
    assert gpu_sanitize.main() == 0
    assert sorted(begun) == sorted(("memcheck", name) for name in names)
    document = json.loads((tmp_path / "sanitizer.json").read_text())
    assert files.sanitizer(document) == files.State(
        True, True, f"{3 * len(names)} of {3 * len(names)} runs, racecheck reports 0 errors"
    )
    (tmp_path / "sanitizer.json").write_text(json.dumps(document | {"git": None}))
    with pytest.raises(ValueError, match="to be gone on with"):
        gpu_sanitize.main()
