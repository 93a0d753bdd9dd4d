"""The command line: what it prints, how it fails, and that it starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kilat import checks, config
from kilat._version import __version__
from kilat.cli import demo, main
from kilat.cli.output import seconds as show_seconds
from kilat.cli.output import size, to_json
from kilat.demo.compare import LongRun

COMMANDS = [["demo"], ["check"], ["bench"], ["explain"], ["info"], ["cache", "show"], ["cache", "clear"]]


def run(*words: str) -> int:
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    code = caught.value.code
    assert isinstance(code, int)
    return code


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run a command that must succeed and return the JSON it printed."""
    assert run(*words) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["demo", "--help"], ["bench", "--help"]])
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    script = (
        "import sys\nsys.argv = ['/usr/bin/kilat']\nfrom kilat.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as stop:\n    print('code', stop.code)\n"
        "print('torch' in sys.modules, 'llvmlite' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-2:] == ["code 0", "False False"], done.stdout + done.stderr


def test_other_programs_get_the_operators_at_import() -> None:
    script = "import torch, kilat\nprint(torch.ops.kilat.forward)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kilat {__version__}\n"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words, "--help") == 0
    assert "--json" in capsys.readouterr().out


WRONG = [
    (
        ["bench", "--suite", "none"],
        "suite must be one of quick, cpu, cpu-decode, cpu-memory, h200, h200-quick, h200-long; got none",
    ),
    (["bench", "--shape", "1,2"], "shape must be four positive integers B,H,N,D"),
    (["bench", "--shape", "1,2,3,4", "--suite", "cpu"], "give suite or shape, not both"),
    (["bench", "--shape", "1,2,3,4", "--dtype", "int8"], "dtype must be one of"),
    (["bench", "--dtype", "float32"], "shape must be given with dtype and forward-only"),
    (["bench", "--suite", "cpu", "--forward-only"], "got forward-only, no shape"),
    (["bench", "--suite", "h200"], "json must be a file for suite h200"),
    (["bench", "--suite", "h200", "--shard", "4/3", "--json", "x.json"], "shard must be i/n with 1 <= i <= n; got 4/3"),
    (
        ["bench", "--suite", "h200", "--contender", "me", "--json", "x.json"],
        "contender must be one of kilat, kilat-det",
    ),
    (["bench", "--shard", "1/2"], "backend, shard, contender, deadline and merge are for h200"),
    (["bench", "--json", "/no/such/folder/x.json"], "json must be a file in an existing folder"),
    (["demo", "--file", "/no/such/file"], "file must be an existing file; got /no/such/file"),
    (["check", "--device", "tpu"], "device must be cpu"),
    (["explain", "--mask", "striped"], "mask must be full, causal, window:LEFT,RIGHT"),
    (["explain", "--mask", "window:a,0"], "mask window must be a whole number or empty; got 'a'"),
    (["explain", "--shape", "1,8,16,64", "--heads-kv", "3"], "num_heads_q=8, num_heads_kv=3"),
    (["explain", "--backend", "abacus"], "got backend='abacus'"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_errors_are_a_sentence_and_code_2(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    err = capsys.readouterr().err.lstrip()
    assert err.startswith("error: ")
    assert sentence in err
    assert "Traceback" not in err
    assert f"see `kilat {words[0]} --help`, or add --debug for the traceback" in err


def test_wrong_options_are_code_2() -> None:
    assert run("bench", "--no-such-option") == 2
    assert run("no-such-command") == 2


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="suite must be one of"):
        main(["bench", "--suite", "none", "--debug"])


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "info", "--json")
    assert found["versions"]["kilat"] == __version__
    assert found["cpu kernels"]["isa"] in found["cpu kernels"]["isas"]
    assert {"name": "cpu", "available": True, "reason": ""} in found["backends"]
    assert all(backend["available"] or backend["reason"] for backend in found["backends"])
    assert run("info") == 0
    assert "thread_pool" in capsys.readouterr().out


def test_cache_show_and_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path))
    assert config.cache_dir() == tmp_path
    assert run_json(capsys, "cache", "show", "--json") == {"folder": str(tmp_path), "bytes": 0, "files": []}
    from kilat.backends import store

    kernels, other = [tmp_path / f"x{end}" for end in (store.CPU_SUFFIX, store.GPU_SUFFIX)], tmp_path / "notes.txt"
    for path in (*kernels, other):
        path.write_bytes(b"0123456789")
    assert run_json(capsys, "cache", "show", "--json")["bytes"] == 20
    assert run("cache", "show") == 0
    assert "2 compiled kernels, 20 B" in capsys.readouterr().out
    assert run_json(capsys, "cache", "clear", "--json") == {"removed": 2, "bytes": 20}
    assert not any(kernel.exists() for kernel in kernels)
    assert other.exists()
    monkeypatch.setenv("KILAT_CACHE_DIR", str(other))
    assert run("cache", "show") == 2
    assert "must name a folder, or one to be made; got the file" in capsys.readouterr().err


@pytest.mark.parametrize("mask", ["full", "causal", "window:3,", "window:,0", "chunked:8"])
def test_explain(mask: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--shape", "2,8,65,32", "--heads-kv", "2", "--mask", mask, "--softcap", "5", "--grad"]
    found = run_json(capsys, *words, "--json")
    assert found["chosen"] == "cpu"
    assert found["reasons"]["cpu"] == []
    assert found["reasons"]["triton"]
    assert run(*words) == 0
    assert "chosen" in capsys.readouterr().out


def test_bench_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    words = ["bench", "--shape", "1,1,33,16", "--dtype", "float32", "--reps", "1"]
    assert run(*words, "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "Geometric means" in out
    document = json.loads(path.read_text())
    assert [row["not_timed"] for row in document["rows"]] == [{}] * 4
    printed = run_json(capsys, *words, "--forward-only", "--json", "-")
    assert len(printed["rows"]) == 2
    assert document["rows"][0]["seconds"]["kilat"]["calls"] >= 1


def test_check_passes_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    some = tuple(case for case in checks.CASES if case.name in ("63 tokens", "one token"))
    monkeypatch.setattr(checks, "CASES", some)
    monkeypatch.setattr("kilat.checks.run.CASES", some)
    found = run_json(capsys, "check", "--json")
    assert found["ok"]
    assert {row["case"] for row in found["rows"]} == {"63 tokens", "one token"}
    wrong = checks.Report("cpu", (checks.Row("a case", "out", 1.0, 0.1),))
    monkeypatch.setattr(checks, "check", lambda *_, **__: wrong)
    assert run("check") == 1
    assert "WRONG" in capsys.readouterr().out


def _long_run(name: str, off: float = 0.0) -> LongRun:
    logits = np.ones((600, 256), np.float32) + np.float32(off)
    return LongRun(name, 600, 0.1, 1000, "a test", 1e-7, np.ones((600, 2, 64), np.float32), 0.3, 2.0, logits)


@pytest.mark.parametrize(("off", "code"), [(0.0, 0), (0.1, 1)])
def test_the_demo_fails_when_the_answer_is_wrong(
    off: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [_long_run("kilat", off), _long_run("sdpa"), _long_run("naive")]
    monkeypatch.setattr(demo, "_long_runs", lambda *_: (runs, "naive: a note"))
    assert run("demo", "--train-seconds", "0.1") == code
    assert f"the answer is {'WRONG' if code else 'right'}" in capsys.readouterr().out


def test_the_whole_demo_on_a_file_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"It was the best of times, it was the worst of times. " * 100)
    words = ["demo", "--file", str(path), "--train-seconds", "0.5", "--length", "700", "--json"]
    found = run_json(capsys, *words)
    assert found["ok"]
    assert [run["name"] for run in found["runs"]] == ["kilat", "sdpa", "naive"]
    assert [run["length"] for run in found["runs"]] == [700, 700, 700]
    assert found["training"]["steps"] >= 1


def test_numbers_are_shown_with_their_units() -> None:
    assert [show_seconds(x) for x in (None, 2.5, 0.0025, 2.5e-6)] == ["-", "2.50 s", "2.50 ms", "2.5 us"]
    assert [size(x) for x in (None, 12, 3_400, 5_600_000, 7_000_000_000)] == ["-", "12 B", "3.4 kB", "5.6 MB", "7.0 GB"]
    assert json.loads(to_json({"a": [float("nan"), 1.5]})) == {"a": [None, 1.5]}
