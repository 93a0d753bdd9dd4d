"""Random Problems on a GPU against the float64 oracle: `python scripts/gpu_random.py --count 10000 --json FILE`.

What kernels are compiled for comes from a fixed list of templates, so that thousands of Problems need a few hundred
kernels: compiling was nearly all of the time when it was drawn freely (2 kernels a Problem). Sizes, lengths, number of
heads and values are drawn by the Problem's number alone. Each backend gets every Problem that it accepts; the JSON
counts what ran, passes, refusals by reason, and holds every failure with the case that reproduces it. Until all have
run it also holds what became of each, so that the command goes on where it ended when it is repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import gpu_attempt
import gpu_pool

gpu_pool.find_sources()

SAVE_SECONDS = 20.0
KINDS: tuple[dict[str, Any], ...] = (
    {"mask": "none"},
    {"mask": "causal"},
    {"mask": "window", "scores": "softcap"},
    {"mask": "causal", "sink": True},
    {"mask": "window_first", "scores": "alibi"},
    {"mask": "everything", "scores": "all", "sink": True},
    {"mask": "dense", "scores": "bias_heads"},
    {"mask": "causal_documents", "dropout": "philox"},
)
SHAPES: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16", "head_dim": 64},
    {"dtype": "float16", "head_dim": 128},
    {"dtype": "float32", "head_dim": 17, "head_dim_v": 33},
    {"dtype": "bfloat16", "head_dim": 96, "head_dim_v": 40},
)
LAYOUTS = ("dense", "padded", "ragged")
STRIDES = ("contiguous", "heads_first", "sliced")
GROUPS = (1, 2, 4)


def templates() -> list[dict[str, Any]]:
    """What kernels are compiled for: kinds and shapes with every layout, order in memory and group somewhere."""
    found: list[dict[str, Any]] = []
    for number, (shape, kind) in enumerate(itertools.product(SHAPES, KINDS)):
        for turn in range(2):
            n = number * 2 + turn + number // len(KINDS)  # each shape begins elsewhere
            place = {"layout": LAYOUTS[n % 3], "strides": STRIDES[(n // 3) % 3], "group": GROUPS[n // 2 % 3]}
            found.append({**shape, **kind, **place})
    return found


TEMPLATES = templates()


def draw(number: int) -> Any:
    """The case of a number: the same in every run.

    Lengths that kernels are compiled for, in the strides of a bias, a dense mask or an odd head, are odd and above 1.
    """
    from cases import Case

    rng = random.Random(number)
    template = dict(TEMPLATES[number % len(TEMPLATES)])
    group, ragged = template.pop("group"), template["layout"] == "ragged"
    batch, heads_kv, spare = rng.randint(0, 4), rng.randint(1, 3), rng.randint(0, 3)
    longest = rng.choice([1, 17, 70, 130, 300])
    lengths_q, lengths_kv = ([rng.choice([0, rng.randint(0, longest)]) for _ in range(batch)] for _ in range(2))
    odd = template["head_dim"] % 16 > 0 or template["mask"] in ("dense", "everything")
    if odd and batch:  # the longest of all decides the strides
        for lengths in (lengths_q, lengths_kv):
            lengths[rng.randrange(batch)] = max(3, max(lengths) | 1)
    seqlen = [max(lengths, default=0) + spare for lengths in (lengths_q, lengths_kv)]
    if odd:
        seqlen = [max(3, n | 1) for n in seqlen]
    return Case(
        f"random-{number}",
        batch=batch,
        heads=(heads_kv * group, heads_kv),
        seqlen=(seqlen[0], seqlen[1]),
        lengths_q=None if template["layout"] == "dense" else tuple(lengths_q),
        lengths_kv=None if template["layout"] == "dense" else tuple(lengths_kv),
        tail=spare if ragged else 0,
        logits=rng.choice([1.0, 1.0, 1e-3, 30.0]),
        **template,
    )


def work(item: tuple[int, tuple[str, ...]]) -> list[gpu_pool.Row]:
    """One Problem on every backend."""
    number, backends = item
    return [row | {"number": number} for row in gpu_attempt.attempt(draw(number), backends)]


def groups(
    count: int, backends: tuple[str, ...], known: frozenset[int] = frozenset()
) -> list[list[tuple[int, tuple[str, ...]]]]:
    """Numbers by template, but those that are known, those first that compile longest."""
    found = [
        [(n, backends) for n in range(first, count, len(TEMPLATES)) if n not in known]
        for first in range(len(TEMPLATES))
    ]
    return sorted(found, key=lambda group: -_cost(TEMPLATES[group[0][0] % len(TEMPLATES)]) if group else 0)


def _cost(template: dict[str, Any]) -> int:
    return (template.get("scores") == "all") * 4 + template["head_dim"] // 64 + (template["dtype"] == "float32") * 2


Held = tuple[list[gpu_pool.Row], dict[int, str]]
"""Rows, and by number the reason of those whose process ended or hung."""


def load(path: Path, about: dict[str, Any]) -> tuple[Held, float]:
    """What a file holds that the command goes on with, and its seconds; raises ValueError if it is another revision's.

    A file of all Problems has no rows, and begins anew.
    """
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "rows" not in document:
        return ([], {}), 0.0
    if document["git"] != about["git"]:
        raise ValueError(f"{path} must hold git {about['git']} to be gone on with; got {document['git']}")
    return (list(document["rows"]), {int(n): why for n, why in document["lost"].items()}), document["seconds"]


def save(path: Path, document: dict[str, Any], held: Held) -> None:
    """Write the document, with the rows if some are still to run; whole or not at all."""
    text = json.dumps(document, indent=1)
    if document["problems"]["ran"] < document["problems"]["asked"]:
        more = json.dumps({"rows": held[0], "lost": held[1]}, separators=(",", ":"))
        text = f"{text[:-2]},\n{more[1:]}"
    part = path.with_suffix(".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def report(held: Held, options: argparse.Namespace, about: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The document: how many were asked for and ran, and what became of them."""
    rows, lost = held
    failures = [
        {"backend": row["backend"], "reason": row["reason"], "case": dataclasses.asdict(draw(row["number"]))}
        for row in sorted(rows, key=lambda row: row["number"])
        if row["verdict"] == "failed"
    ]
    failures += [
        {"backend": options.backends, "reason": reason, "case": dataclasses.asdict(draw(number))}
        for number, reason in sorted(lost.items())
    ]
    ran = {row["number"] for row in rows} | set(lost)
    return about | {
        "seconds": round(seconds, 1),
        "problems": {"asked": options.count, "ran": len(ran), "templates": len(TEMPLATES)},
        "backends": gpu_attempt.summary(rows),
        "failures": failures,
    }


def main() -> int:
    """Run and report; 1 if a Problem failed or was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=390.0, help="wait for nothing after so long")
    parser.add_argument("--backends", default="triton,gluon")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    from kilat.bench import machine

    begin = saved = time.monotonic()
    about = {**machine.provenance(), "versions": machine.gpu_versions(), "device": machine.gpu()}
    (rows, lost), spent = load(options.json, about)
    known = frozenset({row["number"] for row in rows} | set(lost))
    todo = groups(options.count, tuple(options.backends.split(",")), known)
    for item, found in gpu_pool.run(todo, work, options.jobs, begin + options.seconds):
        if isinstance(found, str):
            lost[item[0]] = found
        else:
            rows += found
        if time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            save(options.json, report((rows, lost), options, about, spent + saved - begin), (rows, lost))
    document = report((rows, lost), options, about, spent + time.monotonic() - begin)
    save(options.json, document, (rows, lost))
    print(json.dumps({name: document[name] for name in ("problems", "backends", "seconds")}, indent=1))
    for failure in document["failures"][:20]:
        print(failure["backend"], failure["case"]["name"], failure["reason"])
    return int(bool(document["failures"]) or document["problems"]["ran"] < options.count)


if __name__ == "__main__":
    sys.exit(main())
