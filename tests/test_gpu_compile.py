"""scripts/gpu_compile.py, with processes that are made up."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, whose processes take 1 s, 2 s, ... for a forward and leave one kernel."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("gpu_compile")
    calls: list[tuple[str, ...]] = []

    def process(name: str, cache: Path, *options: str) -> dict[str, Any]:
        calls.append((name, *options))
        (cache / "kernel.json").touch()
        (cache / "__grp__kernel.json").touch()
        return {
            "import_kilat": 0.5,
            "forward": float(len(calls)),
            "without_triton": name.startswith("gluon") and len(calls) > 1,
            "other_lengths": list(module.ROWS[name].get("variants", [])),
        }

    monkeypatch.setattr(module, "in_new_process", process)
    monkeypatch.setattr(module, "calls", calls, raising=False)
    return module


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its `main` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["scripts/gpu_compile.py", *arguments])
    return script.main()


def test_table_and_document(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Medians of the warm processes, what is not measured as "-", and where it was measured."""
    file = tmp_path / "compile.json"
    assert run(script, monkeypatch, "--rows", "gluon d256 causal,gluon d128 full", "--json", str(file)) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "gluon d256 causal 1 1.00 s - 3.00 s - no 6.00 s - nothing"
    assert second.split()[-1] == "backward_kernel"
    assert script.calls[:7] == [("gluon d256 causal",)] * 4 + [("gluon d256 causal", "--imported")] * 3
    document = json.loads(file.read_text())
    assert document["command"].startswith("python scripts/gpu_compile.py --rows")
    assert {"date", "versions", "device", "gpu", "git"} <= set(document)
    assert document["rows"][0]["warm"] == {"import_kilat": 0.5, "forward": 3.0}


def test_a_length_that_compiles_fails(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"forward": 1.0, "without_triton": False, "other_lengths": ["forward_kernel"]}
    monkeypatch.setattr(script, "in_new_process", lambda *_: found)
    assert run(script, monkeypatch, "--rows", "triton d128 causal") == 1


def test_unknown_rows(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(script, monkeypatch, "--rows", "gluon d1")
    assert "got gluon d1" in capsys.readouterr().err
