"""Every example runs in its quick form and says that its answer is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUNS = [
    ("train_gpt.py", [], "largest difference"),
    ("long_document.py", ["--backward"], "dv: error to float64"),
    ("custom_mask.py", [], "█"),
    ("serve.py", [], "equal token for token: 12 of 12 requests"),
]


def _run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), "--quick", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("name", "options", "expected"), RUNS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_example_runs(name: str, options: list[str], expected: str) -> None:
    done = _run(name, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected in done.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {name for name, _, _ in RUNS}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("train_gpt.py", ["--steps", "0"], "--steps must be at least 1; got 0"),
        ("serve.py", ["--requests", "0"], "--requests must be at least 1; got 0"),
        ("serve.py", ["--page-size", "0"], "--page-size must be at least 1; got 0"),
        ("serve.py", ["--steps", "0"], "--steps must be at least 1; got 0"),
        ("serve.py", ["--seed", "-1"], "--seed must be at least 0; got -1"),
        ("custom_mask.py", ["--save", "mask.png"], "--save must be an .svg or .txt file in an existing folder"),
        ("long_document.py", ["--heads", "0"], "sizes must be at least 1"),
        ("long_document.py", ["--json", "no/such/folder/x.json"], "--json must be a file in an existing folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_options_are_told_before_anything_runs(name: str, options: list[str], message: str) -> None:
    done = _run(name, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_the_picture_of_a_mask_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "mask.svg"
    assert _run("custom_mask.py", "--save", str(path)).returncode == 0
    assert path.read_text().startswith("<svg")
