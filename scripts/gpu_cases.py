"""All of tests/cases.py on a GPU, in float32, float16 and bfloat16: `python scripts/gpu_cases.py --json FILE`.

Every case runs forward and, but for caches, backward, on every backend that accepts it. The JSON has passes, refusals
by reason, failures and the largest error over budget by output; what it holds already, of the same revision, is not run
again, so a command that ran out of time goes on when it is repeated. `--shard i/n` is the i-th part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import gpu_attempt
import gpu_pool

gpu_pool.find_sources()

SAVE_SECONDS = 20.0


def cases() -> list[Any]:
    """The list, and those of float32 once more in half precision, for what a backend takes in that only."""
    from cases import CASES

    found = list(CASES)
    for case in CASES:
        if case.dtype == "float32":
            found += [
                dataclasses.replace(case, name=f"{case.name}-as-{dtype}", dtype=dtype)
                for dtype in ("float16", "bfloat16")
            ]
    return found


def kernels(case: Any) -> tuple[Any, ...]:
    """What a case's kernels are compiled for, roughly."""
    options = (case.mask, case.scores, case.sink, case.dropout, case.scale is not None and case.scale <= 0)
    layout = (case.layout, case.strides, case.lengths_q is None, case.heads[0] // case.heads[1])
    return (case.dtype, case.out_dtype, case.head_dim, case.head_dim_v, *options, *layout)


def groups(some: list[Any], index: int, count: int) -> list[list[Any]]:
    """Cases that share kernels, the widest heads first, which compile longest; of shard `index` from 1 of `count`."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for case in some:
        found.setdefault(kernels(case), []).append(case)
    ordered = sorted(found.values(), key=lambda group: -max(group[0].head_dim, group[0].head_dim_v or 0))
    return ordered[index - 1 :: count]


def work(item: tuple[Any, tuple[str, ...]]) -> list[gpu_pool.Row]:
    """One case on every backend."""
    case, backends = item
    return gpu_attempt.attempt(case, backends)


def load(path: Path, about: dict[str, Any]) -> list[gpu_pool.Row]:
    """The rows of a file that the command goes on with; raises ValueError if another revision wrote it."""
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["git"] != about["git"]:
        raise ValueError(f"{path} must hold git {about['git']} to be gone on with; got {document['git']}")
    return list(document["rows"])


def save(path: Path, about: dict[str, Any], rows: list[gpu_pool.Row], asked: int) -> dict[str, Any]:
    """Write the document, whole or not at all."""
    ran = len({row["case"] for row in rows})
    head = {
        **about,
        "cases": {"asked": asked, "ran": ran},
        "backends": gpu_attempt.summary(rows),
        "failures": [row for row in rows if row["verdict"] == "failed"],
    }
    listed = ",\n".join("  " + json.dumps(row) for row in sorted(rows, key=lambda row: (row["case"], row["backend"])))
    part = path.with_suffix(".part")
    part.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{listed}\n ]\n}}\n', encoding="utf-8")
    part.replace(path)
    return head


def main() -> int:
    """Run and report; 1 if a case failed or was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="1/1", help="i/n: the i-th part of n")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=390.0, help="wait for nothing after so long")
    parser.add_argument("--backends", default="triton,gluon")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    from kilat.bench import machine
    from kilat.bench.h200 import parse_shard

    begin, backends = time.monotonic(), tuple(options.backends.split(","))
    about = {**machine.provenance(), "versions": machine.gpu_versions(), "device": machine.gpu()}
    mine = groups(cases(), *parse_shard(options.shard))
    asked, rows = sum(map(len, mine)), load(options.json, about)
    known = {row["case"] for row in rows}
    todo = [[(case, backends) for case in group if case.name not in known] for group in mine]
    saved = begin
    for (case, _), found in gpu_pool.run(todo, work, options.jobs, begin + options.seconds):
        if isinstance(found, str):
            lost = {"case": case.name, "dtype": case.dtype, "verdict": "failed", "reason": found}
            found = [lost | {"backend": options.backends}]
        rows += found
        if time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            save(options.json, about, rows, asked)
    about["seconds"] = round(time.monotonic() - begin, 1)
    head = save(options.json, about, rows, asked)
    print(json.dumps({name: head[name] for name in ("cases", "backends", "seconds")}, indent=1))
    for failure in head["failures"][:20]:
        print(failure["backend"], failure["case"], failure["reason"])
    return int(bool(head["failures"]) or head["cases"]["ran"] < asked)


if __name__ == "__main__":
    sys.exit(main())
