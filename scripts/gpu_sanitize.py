"""compute-sanitizer's memcheck and racecheck over each kernel, small sizes: `python scripts/gpu_sanitize.py --out DIR`.

Every kernel runs in a process of its own, first without the sanitizer, checked against float64, which also compiles it,
then under each tool. DIR gets a trimmed log a tool and kernel, and sanitizer.json with the counts. torch's allocator
caches nothing meanwhile, so that memcheck sees where each tensor ends. What sanitizer.json has of the same revision is
not run again.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_pool

gpu_pool.find_sources()

MOST_LINES = 80
LEAST_SECONDS = 15.0
TOOLS = {"memcheck": ("--leak-check", "no"), "racecheck": ("--racecheck-report", "all")}
PATHS = re.compile(r"/(?:[^\s/:()]+/)+")
"""Where a machine keeps its files is nobody's business."""


@dataclass(frozen=True)
class Subject:
    """A kernel (its function's name) and a call that launches it."""

    backend: str
    kernel: str
    case: dict[str, Any]
    forward: bool = False
    more: dict[str, Any] = field(default_factory=dict[str, Any])


def _case(dim: int, dim_v: int | None = None, **more: Any) -> dict[str, Any]:
    """More than one tile each way, neither a multiple of one, two heads on one: rows, masks and tails of every kind."""
    return {"seqlen": (200, 333), "head_dim": dim, "head_dim_v": dim_v, "batch": 1, "heads": (2, 1)} | more


def _ragged(dim: int) -> dict[str, Any]:
    lengths = {"layout": "ragged", "batch": 3, "lengths_q": (70, 1, 129), "lengths_kv": (70, 0, 200), "tail": 3}
    return _case(dim, mask="causal") | lengths


HALF, CAUSAL = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "mask": "causal"}
SUBJECTS = {
    "gluon-forward-narrow": Subject("gluon", "forward_kernel", _case(64, **CAUSAL), forward=True),
    "gluon-forward-wide": Subject("gluon", "forward_kernel", _case(128, **CAUSAL), forward=True),
    "gluon-forward-d256": Subject("gluon", "forward_kernel", _case(256, **CAUSAL), forward=True),
    "gluon-forward-d192-128": Subject("gluon", "forward_kernel", _case(192, 128, **HALF), forward=True),
    "gluon-forward-ragged": Subject("gluon", "forward_kernel", _ragged(64) | HALF, forward=True),
    "gluon-backward-narrow": Subject("gluon", "backward_kernel", _case(64, **CAUSAL)),
    "gluon-backward-wide": Subject("gluon", "backward_kernel", _case(128, **CAUSAL)),
    "gluon-backward-ragged": Subject("gluon", "backward_kernel", _ragged(64) | HALF),
    "gluon-backward-dq": Subject("gluon", "backward_dq_kernel", _case(64, **CAUSAL), more={"deterministic": True}),
    "gluon-prepare": Subject("gluon", "prepare_kernel", _case(64, **CAUSAL)),
    "gluon-finish": Subject("gluon", "finish_kernel", _case(64, **CAUSAL)),
    "triton-forward": Subject("triton", "forward_kernel", _case(64, **CAUSAL), forward=True),
    "triton-forward-float32": Subject("triton", "forward_kernel", _case(40, mask="window_first"), forward=True),
    "triton-keys": Subject("triton", "keys_kernel", _case(64, **CAUSAL)),
    "triton-queries": Subject("triton", "queries_kernel", _case(64, **CAUSAL)),
    "triton-ragged-keys": Subject("triton", "keys_kernel", _ragged(64) | HALF),
    "triton-delta": Subject("triton", "delta_kernel", _case(64, **CAUSAL)),
    "triton-bias": Subject("triton", "bias_kernel", _case(64, scores="bias_heads", **HALF)),
}


def run_one(name: str) -> None:
    """Make a subject's call; raises if the result is not within its budget."""
    from cases import Case
    from gpu_attempt import device
    from gpu_calls import on_gpu
    from helpers import build, expectation

    subject = SUBJECTS[name]
    call = build(Case(name, **subject.case))
    moved = on_gpu(call, device())
    if subject.forward:
        out, lse = moved.run(subject.backend)
        grads: dict[str, Any] = {}
    else:
        out, lse, grads = moved.gradients(subject.backend, **subject.more)
    found = {key: x.cpu() for key, x in ({"out": out, "lse": lse} | grads).items()}
    print("checked", expectation(call, backward=not subject.forward).check(found))


def command(tool: str, name: str) -> list[str]:
    """How a subject is run under a tool, or without one."""
    plain = [sys.executable, str(Path(__file__).resolve()), "--one", name]
    if not tool:
        return plain
    only = ["--kernel-name", f"kernel_substring={SUBJECTS[name].kernel}", "--target-processes", "application-only"]
    return ["compute-sanitizer", "--tool", tool, *TOOLS[tool], *only, *plain]


def run(tool: str, name: str, seconds: float) -> dict[str, Any]:
    """Exit status, text and duration of a subject under a tool."""
    begin, environment = time.monotonic(), os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command(tool, name), capture_output=True, text=True, timeout=seconds, env=environment, check=False
        )
        text, status = done.stdout + done.stderr, str(done.returncode)
    except subprocess.TimeoutExpired as error:
        text, status = _text(error.stdout) + _text(error.stderr), f"stopped after {seconds:.0f} s"
    return {"status": status, "text": text, "seconds": round(time.monotonic() - begin, 1)}


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def trimmed(text: str) -> str:
    """The sanitizer's own lines, without addresses of a machine's files, equal ones counted, and the result's check."""
    lines = [PATHS.sub("", line.rstrip()) for line in text.splitlines()]
    kept = [line for line in lines if line.startswith(("=========", "checked", "Traceback")) or "Error" in line]
    frames = re.compile(r"=+\s+(Saved host|Host Frame)")
    kept = [line for line in kept if not frames.match(line) and line.strip("= ")]
    counts = collections.Counter(kept)
    unique = [line if counts[line] == 1 else f"{line}  ({counts[line]} times)" for line in dict.fromkeys(kept)]
    more = len(unique) - MOST_LINES
    # the end has the tool's summary
    listed = unique if more <= 0 else [*unique[: MOST_LINES - 3], f"... {more} lines left out", *unique[-3:]]
    return "\n".join(listed) + "\n"


def counts_of(text: str) -> dict[str, int]:
    """What the tool's summary says."""
    if found := re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", text):
        return dict(zip(("hazards", "errors", "warnings"), map(int, found.groups()), strict=True))
    found = re.search(r"ERROR SUMMARY: (\d+) errors?", text)
    return {"errors": int(found[1])} if found else {}


def write(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def earlier(path: Path, git: Any) -> dict[str, Any]:
    """The results of a file that the command goes on with, but those that a tool did not finish."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"git": git, "results": {}}
    if document["git"] != git:
        raise ValueError(f"{path} must hold git {git} to be gone on with; got {document['git']}")
    return {
        name: {tool: one for tool, one in of.items() if not one["status"].startswith("stopped")}
        for name, of in document["results"].items()
    }


def run_all(names: list[str], document: dict[str, Any], options: argparse.Namespace) -> None:
    """Every subject without a tool, then under each, into the document and DIR; begins nothing after the deadline."""
    end = time.monotonic() + options.deadline
    results: dict[str, dict[str, Any]] = document["results"]

    def begin(tool: str, name: str) -> dict[str, Any] | None:
        left = end - time.monotonic()
        return run(tool, name, min(options.seconds, left)) if left > LEAST_SECONDS else None

    with ThreadPoolExecutor(options.jobs) as pool:
        for tool in ("", *TOOLS):
            todo = [name for name in names if (tool or "plain") not in results.get(name, {})]
            of = {pool.submit(begin, tool, name): name for name in todo}
            for future in as_completed(of):
                one, name = future.result(), of[future]
                if one is None:
                    continue
                text = one.pop("text")
                one |= {"checked": "checked {" in text, **(counts_of(text) if tool else {})}
                one["bad"] = _is_bad(tool or "plain", one)
                results.setdefault(name, {})[tool or "plain"] = one
                if tool or one["status"] != "0":
                    (options.out / f"{tool or 'plain'}-{name}.log").write_text(trimmed(text), encoding="utf-8")
                print(tool or "plain", name, one, flush=True)
                write(options.out / "sanitizer.json", document)


def main() -> int:
    """Run everything; 1 if a result was wrong, a tool did not finish or begin, or memcheck found something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=SUBJECTS, help="run this call here, and nothing else")
    parser.add_argument("--only", default="", help="only subjects whose name holds this")
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=150.0, help="for a subject under a tool")
    parser.add_argument("--deadline", type=float, default=3600.0, help="begin nothing after so long, and stop then")
    parser.add_argument("--out", type=Path, help="folder of logs and sanitizer.json")
    options = parser.parse_args()
    if options.one:
        run_one(options.one)
        return 0
    if options.out is None:
        parser.error("--out must be a folder; got none")
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer must be on the PATH; it is not")
    from kilat.bench import machine

    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in SUBJECTS if options.only in name]
    document = machine.provenance() | {"versions": machine.gpu_versions(), "device": machine.gpu()}
    document |= {"subjects": names, "results": earlier(options.out / "sanitizer.json", document["git"])}
    run_all(names, document, options)
    results = document["results"]
    missing = any(len(results.get(name, {})) <= len(TOOLS) for name in names)
    return int(missing or any(one["bad"] for of in results.values() for one in of.values()))


def _is_bad(tool: str, one: dict[str, Any]) -> bool:
    unfinished = not one["checked"] or (tool != "plain" and "errors" not in one)
    return unfinished or (tool == "memcheck" and one["errors"] > 0)


if __name__ == "__main__":
    sys.exit(main())
