"""What compiling costs on a GPU: `python scripts/gpu_compile.py --json FILE` prints a table and writes it.

Each row is a kind of Problem, measured in processes of its own, after torch has started CUDA: the first forward and
backward with empty caches; again in new processes that find the kernels on disk, where Triton is not imported before
the first call, as for a user, nor by it ("by Triton: no", see `gluon/ready.py`), or where it is; and which kernels
further lengths and batches compile. That must be none, but for full attention in Gluon: its backward has a kernel of
its own for multiples of 128 keys. The goals: cold 10 s, warm 0.3 s. Rows that FILE has of the same revision are not
measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

ROWS: dict[str, dict[str, Any]] = {
    "gluon d64 causal": {"backend": "gluon", "head_dim": 64, "causal": True},
    "gluon d128 causal": {"backend": "gluon", "head_dim": 128, "causal": True},
    "gluon d128 full": {"backend": "gluon", "head_dim": 128, "causal": False, "variants": ["backward_kernel"]},
    "gluon d256 causal": {"backend": "gluon", "head_dim": 256, "causal": True, "backward": False},
    "triton d128 causal": {"backend": "triton", "head_dim": 128, "causal": True},
}
SHAPE = (4, 512)
OTHER_SHAPES = ((1, 1), (2, 63), (3, 129), (1, 1000), (2, 4096))
"""(batch, seqlen): what is measured, and what must need no other kernel."""

WARM = 3
"""Processes of each kind that find the kernels on disk; the median is shown."""


def measure(name: str, imported: bool) -> dict[str, Any]:
    """Seconds of the first calls in this process, and the kernels that other lengths compile."""
    import torch

    row = ROWS[name]
    torch.ones(1, device="cuda").sum().item()
    found: dict[str, Any] = {"import_kilat": timed(lambda: __import__("kilat"))}
    import kilat

    if imported:
        found["import_triton"] = timed(lambda: __import__("triton.experimental.gluon.language"))
    mask = kilat.Causal() if row["causal"] else None

    def forward(batch: int, seqlen: int, grad: bool) -> tuple[Any, Any]:
        shape = (batch, seqlen, 16, row["head_dim"])
        leaves = [torch.ones(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]
        return leaves, kilat.attention(*leaves, mask=mask, backend=row["backend"])

    def backward(leaves: Any, out: Any) -> None:
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    # torch's own first backward in a process imports sympy and more, whoever asks for it
    mine = torch.ones(8, device="cuda", requires_grad=True)
    found["torch_backward"] = timed(lambda: torch.autograd.grad(mine * 2.0, mine, torch.ones_like(mine)))
    found["forward"] = timed(lambda: forward(*SHAPE, False))
    if row.get("backward", True):
        made = forward(*SHAPE, True)
        found["backward"] = timed(lambda: backward(*made))
    found["without_triton"] = "triton" not in sys.modules
    import triton

    compiled: list[str] = []

    def listen(*, metadata: dict[str, Any], **rest: Any) -> None:
        compiled.append(metadata["name"])

    triton.knobs.compilation.listener = listen
    for shape in OTHER_SHAPES:
        made = forward(*shape, row.get("backward", True))
        if row.get("backward", True):
            backward(*made)
        torch.cuda.synchronize()
    return found | {"other_lengths": compiled}


def timed(call: Callable[[], Any]) -> float:
    """Seconds until a call is through on the GPU."""
    import torch

    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def in_new_process(name: str, cache: Path, *options: str) -> dict[str, Any]:
    """`measure` in a process whose kilat and Triton keep their files in `cache`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", name, *options]
    caches = {"TRITON_CACHE_DIR": str(cache), "KILAT_CACHE_DIR": str(cache / "kilat")}
    environment = {**os.environ, **caches}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"measuring {name} must end well; got\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def row_of(name: str, processes: int = WARM) -> dict[str, Any]:
    """All figures of one kind of Problem, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        cold = in_new_process(name, Path(folder))
        kernels = len([x for x in Path(folder).rglob("*.json") if not x.name.startswith("__grp__")])
        warm = [in_new_process(name, Path(folder)) for _ in range(processes)]
        imported = [in_new_process(name, Path(folder), "--imported") for _ in range(processes)]
    return {
        "name": name,
        "kernels": kernels,
        "cold": seconds([cold]),
        "warm": seconds(warm),
        "warm_without_triton": all(run["without_triton"] for run in warm),
        "warm_triton_imported": seconds(imported),
        "compiled_for_other_lengths": cold["other_lengths"],
    }


def seconds(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of what was timed."""
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, aligned."""
    head = (
        "",
        "kernels",
        "cold fwd",
        "bwd",
        "warm fwd",
        "bwd",
        "by Triton",
        "imported fwd",
        "bwd",
        "other lengths compile",
    )
    lines = [head]
    for row in rows:
        figures = [
            f"{row[kind][part]:.2f} s" if part in row[kind] else "-"
            for kind in ("cold", "warm", "warm_triton_imported")
            for part in ("forward", "backward")
        ]
        figures.insert(4, "no" if row["warm_without_triton"] else "yes")
        others = ", ".join(row["compiled_for_other_lengths"]) or "nothing"
        lines.append((row["name"], str(row["kernels"]), *figures, others))
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in lines)


def earlier(path: Path | None, git: Any) -> list[dict[str, Any]]:
    """The rows of a file that the command goes on with; raises ValueError if another revision wrote it."""
    if path is None or not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["git"] != git:
        raise ValueError(f"{path} must hold git {git} to be gone on with; got {document['git']}")
    return list(document["rows"])


def main() -> int:
    """Measure; 1 if other lengths compiled a kernel, or a row was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--rows", default=",".join(ROWS), help="names, between commas")
    parser.add_argument("--warm", type=int, default=WARM, help="processes of each kind that find the kernels on disk")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no row after so long")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--imported", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.imported)))
        return 0
    from kilat.bench import machine

    names = options.rows.split(",")
    if unknown := set(names) - set(ROWS):
        parser.error(f"--rows must name some of {', '.join(ROWS)}; got {', '.join(sorted(unknown))}")
    begin, about = time.monotonic(), machine.provenance() | {"versions": machine.gpu_versions(), "gpu": machine.gpu()}
    rows = earlier(options.json, about["git"])
    for name in names:
        if any(row["name"] == name for row in rows) or time.monotonic() - begin > options.seconds:
            continue
        rows.append(row_of(name, options.warm))
        if options.json is not None:
            part = options.json.with_suffix(".part")
            part.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
            part.replace(options.json)
    print(table(rows))
    missing = set(names) - {row["name"] for row in rows}
    others = any(row["compiled_for_other_lengths"] != ROWS[row["name"]].get("variants", []) for row in rows)
    return int(others or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
