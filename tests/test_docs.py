"""Pages say what is so: their examples run, their tables are those of the code, their links lead somewhere.

Every block marked `python` in README.md and docs/ is run; the blocks of one page share their names, top to bottom. A
block that is only to be read is marked `text`.
"""

from __future__ import annotations

import importlib
import json
import linecache
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import kilat
from kilat.backends import registry
from kilat.masks import Mask
from kilat.scores import ScoreModifier

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r'^ *--8<-- "(?P<path>[^":]+)(?::(?P<name>\w+))?" *$', re.MULTILINE)
LINK = re.compile(r"\[[^\]\n]+\]\((?P<target>[^)\s#]+)(?:#[\w-]*)?\)")


def page_id(page: Path) -> str:
    """The page's path below the root."""
    return page.relative_to(ROOT).as_posix()


def snippet(match: re.Match[str]) -> str:
    """The lines of another file that a page shows, as the docs build does it."""
    text = (ROOT / match["path"]).read_text(encoding="utf-8")
    if match["name"]:
        start, end = (text.index(f"--8<-- [{edge}:{match['name']}]") for edge in ("start", "end"))
        text = "\n".join(text[start:end].splitlines()[1:-1])
    return text


def examples(page: Path) -> list[tuple[int, str]]:
    """(first line, code) of every block marked python."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        if match["info"].strip() == "python":
            body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
            found.append((text.count("\n", 0, match.start("body")) + 1, SNIPPET.sub(snippet, body)))
    return found


@pytest.fixture(scope="module")
def scripts() -> Any:
    """What imports a module of scripts/."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module
    patch.undo()


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=page_id)
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every python block of a page runs, in order, as one program."""
    module = types.ModuleType("page")  # dataclasses look their module up by name
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    # A page may register a backend, which other tests must not meet.
    monkeypatch.setattr(registry, "BY_NAME_ONLY", dict(registry.BY_NAME_ONLY))
    monkeypatch.setattr(registry, "_found", dict(registry._found))
    torch.manual_seed(0)
    for line, code in examples(page):
        name = f"{page_id(page)}:{line}"
        # Tracebacks and inspect.getsource find the code where the page has it.
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        exec(compile(code, name, "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page: Path) -> None:
    """Relative links of pages exist."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [match["target"] for match in LINK.finditer(text)]
    missing = [t for t in targets if ":" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_lists_and_tables_start_after_an_empty_line(page: Path) -> None:
    """Otherwise the docs build takes them for text, where a forge shows them as they were meant."""
    blocks = re.split(r"\n\s*\n", FENCE.sub("", page.read_text(encoding="utf-8")))
    first = [(block.split("\n")[0], block) for block in blocks if block.strip()]
    marks = re.compile(r"^(?:[-*|]|\d+\.) ", re.MULTILINE)
    glued = [block for line, block in first if not re.match(r"[#\s]|[-*|] |\d+\. |<!--", line) and marks.search(block)]
    assert not glued


def test_tables_are_up_to_date(scripts: Any) -> None:
    """What scripts/docs_tables.py would write is what stands there."""
    tables = scripts("docs_tables")
    stale = [page_id(page) for page in tables.pages() if tables.filled(page.read_text(encoding="utf-8")) != _text(page)]
    assert not stale, "run: python scripts/docs_tables.py"


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_every_block_is_somewhere(scripts: Any) -> None:
    """No table is made for nothing, and an unknown one raises."""
    tables = scripts("docs_tables")
    shown = {m["name"] for page in tables.pages() for m in tables.BLOCK.finditer(_text(page))}
    assert shown == set(tables.BLOCKS)
    with pytest.raises(ValueError, match=r"block must be one of .* got nonsense"):
        tables.filled("<!-- begin nonsense -->\n<!-- end nonsense -->")


def test_every_public_name_is_in_the_reference() -> None:
    """docs/api.md names everything that `kilat` exports, and nothing that it does not have."""
    named = set(re.findall(r"^::: kilat\.(\w+)$", _text(ROOT / "docs" / "api.md"), re.MULTILINE))
    assert set(kilat.__all__) - {"__version__"} <= named
    for name in named:
        assert hasattr(kilat, name) or importlib.import_module(f"kilat.{name}")


def test_the_matrix_asks_for_every_mask_and_score(scripts: Any) -> None:
    """A mask or score that is exported has a row."""
    support = scripts("support_table")
    z = support.Sizes(2, 8, support.SEQLEN, support.SEQLEN, torch.Generator().manual_seed(0))
    asked = {type(make(z)).__name__ for _, make in support.MASKS}
    asked |= {type(make(z)).__name__ for _, makes in support.SCORES for make in makes}
    kinds = [getattr(kilat, name) for name in kilat.__all__ if isinstance(getattr(kilat, name), type)]
    exported = {kind.__name__ for kind in kinds if issubclass(kind, Mask | ScoreModifier)}
    assert exported <= asked


def test_the_cpu_refuses_nothing(scripts: Any) -> None:
    """Any refusal is a hole in the backend."""
    answers = scripts("support_table").ask()
    refused = [(v.name, answers.verdict(v, "cpu")) for v in answers.values if answers.verdict(v, "cpu")[0] != "yes"]
    assert not refused


def _report(ratio: float, **row: Any) -> dict[str, Any]:
    """A small result in the form that `kilat bench --json` writes."""
    name = "forward float32 full N=128 D=64 B=1 H=2"
    cell: dict[str, Any] = {
        "cell": {"name": name},
        "errors": {"kilat": {"out": 1e-7}},
        "allowed": {"out": 4e-7},
        "seconds": {"kilat": {"median": 1e-3}, "sdpa": {"median": ratio * 1e-3}},
        "not_timed": {},
        "ratio": ratio,
        "share_of_limit": 0.5,
    }
    return {
        "suite": "cpu",
        "command": "kilat bench --suite cpu --json result.json",
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": "2.13.0", "python": "3.11.1"},
        "device": {"model": "A Processor", "features": ["avx2"], "threads": 2, "load_average": 0.1},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "groups": [{"name": "forward float32", "ratio": ratio, "smallest": ratio, "cells": 1, "measured": 1}],
        "rows": [cell | row],
    }


def test_benchmark_tables_say_where_torch_is_faster(scripts: Any, tmp_path: Path) -> None:
    """Numbers come from the files, losses are named, and nothing is there where there are no files."""
    tables = scripts("benchmark_table")
    assert tables.summary(tmp_path / "none") == tables.results(tmp_path / "none") == tables.NOTHING
    (tmp_path / "cpu").mkdir()
    path = tmp_path / "cpu" / "speed.json"
    path.write_text(json.dumps(_report(0.5, not_timed={"other": "ValueError: no"})), encoding="utf-8")
    summary, results = tables.summary(tmp_path), tables.results(tmp_path)
    assert "torch was faster in 1 of 1 cells: forward float32 full N=128 D=64 B=1 H=2 (0.50)" in summary
    assert "A Processor (avx2); 2 threads; torch 2.13.0" in summary
    assert "`kilat bench --suite cpu`" in summary
    assert "other work was running" not in summary
    assert "| 1.00 | 0.50 | 0.50 | 50% | 0.25 |" in results
    assert "- other, forward float32 full N=128 D=64 B=1 H=2: ValueError: no" in results
    path.write_text(json.dumps(_report(2.0)), encoding="utf-8")
    assert "torch was faster in none of 1 cells." in tables.summary(tmp_path)


def test_memory_and_long_documents_have_tables(scripts: Any, tmp_path: Path) -> None:
    """Peaks of both contenders side by side; one call on a very long sequence."""
    tables = scripts("benchmark_table")
    cells = [{"name": f"forward N={n}", "seqlen_kv": n} for n in (1024, 4096)]
    rows = [
        {"cell": cell, "contender": who, "extra_bytes": extra, "output_bytes": 2**20}
        for cell in cells
        for who, extra in (("kilat", 2**21), ("sdpa", None))
    ]
    memory = {"suite": "cpu-memory", "command": "kilat bench --suite cpu-memory", "rows": rows}
    call = {"seconds": 61.04, "flops_per_second": 5e10, "extra_bytes": 3 * 2**20, "output_bytes": 0}
    long = {
        "length": 131072,
        "heads": 8,
        "dtype": "float32",
        "forward": call,
        "command": "python examples/long_document.py --backward",
    }
    for name, document in (("memory", memory), ("long", long | {"errors": {"out": {"error": 1.0, "allowed": 4.0}}})):
        (tmp_path / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    summary, results = tables.summary(tmp_path), tables.results(tmp_path)
    assert "| forward N=4096 | 1.0 | 2.0 | - |" in summary
    assert "N=1024" not in summary
    assert "| forward N=1024 | 1.0 | 2.0 | - |" in results
    assert "| forward | 61.0 | 50 | 3.0 |" in results
    assert "131,072 tokens, 8 heads, float32, causal. Error over its budget on sampled rows: out 0.25." in results
    assert "`python examples/long_document.py --backward`" in results


def _gpu_row(direction: str, ratio: float, **more: Any) -> dict[str, Any]:
    """A row of a GPU suite in which flash-attn-4 took 1 ms for a tera-operation."""
    seconds = {"fa4": {"median": 1e-3}, "kilat": {"median": 1e-3 / ratio}}
    row: dict[str, Any] = {
        "cell": {"name": f"{direction} bfloat16 full N=8192 D=128 B=2 H=16", "direction": direction},
        "errors": {"kilat": {"out": 1e-3}},
        "allowed": {"out": 4e-3},
        "seconds": seconds,
        "not_timed": {"flex": "left out: measured at 2k and 8k only"},
        "best_peer": "fa4",
        "ratio": ratio,
        "unsteady": False,
        "achieved": {"fa4": 600e12, "kilat": 600e12 * ratio},
        "share_of_limit": 0.8,
        "backend": "gluon",
        "host_seconds": {"kilat": 12e-6},
        "extra_bytes": {"kilat": 3 << 20},
        "sustained": {"kilat": {"seconds": 2e-3 / ratio, "calls": 900, "clock": 1612.4, "power": 680.2}},
    }
    return row | more


def test_a_merged_gpu_result_has_its_tables(scripts: Any, tmp_path: Path) -> None:
    """Every contender's rate, means, cells below their mark, sustained figures, and who was left out."""
    tables = scripts("benchmark_table")
    nothing: dict[str, Any] = {name: {} for name in ("errors", "achieved", "seconds", "sustained", "extra_bytes")}
    lost = _gpu_row("forward", 1.0) | nothing | {"ratio": None}
    lost |= {"not_timed": {"kilat": "wrong: out off by 1"}, "host_seconds": {}, "share_of_limit": None, "backend": ""}
    group = {"name": "forward bfloat16", "ratio": 1.034, "smallest": 0.94, "cells": 2, "measured": 2}
    document = {
        "suite": "h200",
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "flash-attn-4": "not installed"},
        "device": {"model": "A GPU", "architecture": "sm_90", "driver": "580", "power_limit": "700.00 W"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "limits": {"matmul_bfloat16": 790e12},
        "groups": [group, group | {"name": "forward bfloat16 D=128 full"}],
        "rows": [_gpu_row("forward", 1.1), _gpu_row("backward", 0.89), lost],
        "runs": [{}, {}],
        "missing": ["forward float16"],
    }
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    (folder / "merged.json").write_text(json.dumps(document), encoding="utf-8")
    summary, results = tables.summary(tmp_path), tables.results(tmp_path)
    assert "| forward bfloat16 | 1.03 | 0.94 | 2 of 2 |" in summary
    assert "D=128 full" not in summary
    assert "1 of 2 cells are below 0.95 forward or 0.90 backward of the best peer" in summary
    assert "backward bfloat16 full N=8192 D=128 B=2 H=16 (0.89, fa4)" in summary
    assert "kilat has no result in 1: forward bfloat16 full N=8192 D=128 B=2 H=16: wrong: out off by 1." in summary
    assert "Not measured: forward float16." in summary
    assert "A GPU (sm_90, 700.00 W); driver 580; torch 2.11.0, triton 3.6.0, flash-attn-4 not installed" in summary
    assert "in 2 shards; matmul in the same runs, TFLOP/s: bfloat16 790." in summary
    assert "## results/h200/merged" in results
    assert "| gluon | 660 | 600 | 1.10 | 80% | 0.25 | 12 | 3.0 |" in results
    assert "| kilat | 330 | 660 | 1612 | 680 |" in results
    assert "- flex, 2 cells: left out: measured at 2k and 8k only" in results


def test_pages_build_without_warnings(tmp_path: Path) -> None:
    """`make docs` succeeds."""
    pytest.importorskip("mkdocs", reason="mkdocs comes with requirements/docs.txt")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
