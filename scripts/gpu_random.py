"""Random Problems on a GPU against the float64 oracle: `python scripts/gpu_random.py --count 10000 --json FILE`.

Sizes, lengths, heads and strides are drawn; what a kernel is compiled for comes from a fixed set, so that thousands of
Problems need few kernels. Each backend gets every Problem that it accepts; the JSON counts passes, refusals by reason,
and holds every failure with the case that reproduces it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

STATIC = [
    {"dtype": dtype, "head_dim": dims[0], "head_dim_v": dims[1], **rest}
    for dtype, dims in (
        ("bfloat16", (64, None)),
        ("float16", (128, None)),
        ("float32", (17, 33)),
        ("bfloat16", (96, 40)),
    )
    for rest in (
        {"mask": "none"},
        {"mask": "causal"},
        {"mask": "window", "scores": "softcap"},
        {"mask": "causal", "sink": True},
        {"mask": "window_first", "scores": "alibi"},
        {"mask": "everything", "scores": "all", "sink": True},
        {"mask": "dense", "scores": "bias_heads"},
        {"mask": "causal_documents", "dropout": "philox"},
    )
]
"""What kernels are compiled for: 32 kinds of Problem."""


def draw(rng: random.Random, number: int) -> Any:
    """A random case."""
    from cases import Case

    layout, batch = rng.choice(["dense", "padded", "ragged"]), rng.randint(0, 4)
    longest = rng.choice([1, 17, 70, 130, 300])
    lengths_q, lengths_kv = (tuple(rng.choice([0, rng.randint(0, longest)]) for _ in range(batch)) for _ in range(2))
    spare, heads_kv = rng.randint(0, 3), rng.randint(1, 3)
    static: dict[str, Any] = rng.choice(STATIC)
    return Case(
        f"random-{number}",
        layout,
        batch,
        heads=(heads_kv * rng.randint(1, 4), heads_kv),
        seqlen=(max(lengths_q, default=0) + spare, max(lengths_kv, default=0) + spare),
        lengths_q=None if layout == "dense" else lengths_q,
        lengths_kv=None if layout == "dense" else lengths_kv,
        tail=spare if layout == "ragged" else 0,
        strides=rng.choice(["contiguous", "heads_first", "sliced"]),
        logits=rng.choice([1.0, 1.0, 1e-3, 30.0]),
        **static,
    )


def attempt(case: Any, backend: str) -> tuple[str, str]:
    """("pass" | "refused" | "failed", reason) of one case on one backend."""
    import torch
    from gpu_calls import on_gpu, reasons
    from helpers import build, expectation

    call = build(case)
    moved = on_gpu(call)
    if refused := reasons(moved, backend):
        return "refused", "; ".join(refused)
    try:
        out, lse, grads = moved.gradients(backend)
        torch.cuda.synchronize()
        expectation(call, backward=True).check({"out": out, "lse": lse} | grads)
    except AssertionError as error:
        return "failed", str(error).strip().splitlines()[0]
    except Exception as error:  # noqa: BLE001 (whatever it is belongs in the report)
        return "failed", f"{type(error).__name__}: {error}"[:500]
    return "pass", ""


def work(job: tuple[int, int, int, tuple[str, ...], float]) -> list[tuple[int, str, str, str]]:
    """(number, backend, verdict, reason) of every `step`-th case from `first` on, until the deadline."""
    import torch

    first, step, count, backends, deadline = job
    torch.set_num_threads(1)
    results: list[tuple[int, str, str, str]] = []
    for number in range(first, count, step):
        if time.time() > deadline:
            break
        case = draw(random.Random(number), number)
        for name in backends:
            verdict, reason = attempt(case, name)
            results.append((number, name, verdict, reason))
            if "illegal" in reason or "CUDA error" in reason:  # the process has lost its GPU
                return results
    return results


def main() -> int:
    """Run and report; 1 if a Problem failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=400.0, help="stop drawing after so long")
    parser.add_argument("--backends", default="triton,gluon")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    backends, start = tuple(options.backends.split(",")), time.time()
    jobs = [(n, options.jobs, options.count, backends, start + options.seconds) for n in range(options.jobs)]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        rows = [row for part in pool.imap_unordered(work, jobs) for row in part]
    from kilat.bench import machine

    verdicts = {name: collections.Counter(v for _, who, v, _ in rows if who == name) for name in backends}
    refusals = {
        name: collections.Counter(r for _, who, v, r in rows if who == name and v == "refused") for name in backends
    }
    failures = [
        {"backend": who, "reason": reason, "case": dataclasses.asdict(draw(random.Random(number), number))}
        for number, who, verdict, reason in sorted(rows)
        if verdict == "failed"
    ]
    document = machine.provenance() | {
        "command": f"python scripts/gpu_random.py --count {options.count} --backends {options.backends}",
        "gpu": machine.gpu(),
        "seconds": time.time() - start,
        "verdicts": verdicts,
        "refusals": refusals,
        "failures": failures,
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: document[name] for name in ("verdicts", "refusals", "seconds")}, indent=1))
    for failure in failures[:20]:
        print(failure["backend"], failure["case"]["name"], failure["reason"])
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
