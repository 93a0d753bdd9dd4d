"""Tables of the results in benchmarks/: JSON that commands wrote, nothing typed by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gpu_table
from markdown_table import table

Document = dict[str, Any]
NOTHING = "No result has been committed yet. `kilat bench --suite cpu` measures your machine."
CONTENDERS = ("kilat", "sdpa")


def documents(folder: Path) -> list[tuple[str, Document]]:
    """(path below `folder`, content) of every JSON result, by path."""
    found = sorted(folder.rglob("*.json")) if folder.is_dir() else []
    return [(path.relative_to(folder).as_posix(), json.loads(path.read_text(encoding="utf-8"))) for path in found]


def is_speed(document: Document) -> bool:
    """Whether it is a report of `kilat bench` with times."""
    return "groups" in document and "rows" in document and not gpu_table.is_gpu(document)


def is_memory(document: Document) -> bool:
    """Whether it is a report of the memory suite."""
    return document.get("suite") == "cpu-memory"


def is_long(document: Document) -> bool:
    """Whether it is what examples/long_document.py writes."""
    return "length" in document and "forward" in document


def provenance(document: Document) -> str:
    """One paragraph: processor, threads, versions, revision, date, command, and what disturbed the run."""
    device, versions, git = (document.get(name) or {} for name in ("device", "versions", "git"))
    command = re.sub(r" --json \S+", "", str(document.get("command", "")))
    features = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in device.get("features", [])]
    parts = [
        f"{device.get('model', 'unknown processor')} ({', '.join(features) or device.get('architecture', '')})",
        f"{device.get('threads')} threads",
        ", ".join(f"{name} {versions[name]}" for name in ("torch", "llvmlite", "python") if name in versions),
        f"kilat at {git['commit'][:10]}{' with local changes' if git['dirty'] else ''}" if git else "",
        str(document.get("date", ""))[:10],
        f"`{command}`" if command else "",
    ]
    load, threads = device.get("load_average"), device.get("threads")
    if load is not None and threads and load > threads:
        parts.append(f"other work was running: load average {load} before the run")
    return "; ".join(part for part in parts if part) + "."


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def groups(document: Document, detailed: bool) -> str:
    """Geometric means of sdpa / kilat; by direction and dtype, and if `detailed` by head_dim and mask too."""
    rows = [
        [g["name"], _number(g["ratio"]), _number(g["smallest"]), f"{g['measured']} of {g['cells']}"]
        for g in document["groups"]
        if detailed or len(g["name"].split()) == 2
    ]
    return table(["group", "sdpa / kilat", "smallest", "cells"], rows, right=(1, 2, 3))


def slower(document: Document, most: int | None = None) -> str:
    """A sentence with the cells in which torch was faster, the worst first, all or at `most` so many."""
    timed = [row for row in document["rows"] if row["ratio"] is not None]
    lost = sorted((row["ratio"], row["cell"]["name"]) for row in timed if round(row["ratio"], 2) < 1)
    if not lost:
        return f"torch was faster in none of {len(timed)} cells."
    listed = "; ".join(f"{name} ({ratio:.2f})" for ratio, name in lost[:most])
    if most is not None and len(lost) > most:
        listed += f"; and {len(lost) - most} more"
    return f"torch was faster in {len(lost)} of {len(timed)} cells: {listed}."


def _speed(document: Document) -> str:
    rows: list[list[str]] = []
    for row in document["rows"]:
        seconds, allowed = row["seconds"], row["allowed"]
        errors = row["errors"].get("kilat", {})
        worst = max((error / allowed[name] for name, error in errors.items() if allowed[name]), default=None)
        times = [_number(seconds[who]["median"] * 1e3) if who in seconds else "-" for who in CONTENDERS]
        share = row["share_of_limit"]
        shown = "-" if share is None else f"{share:.0%}"
        name = row["cell"]["name"] + (" (unsteady)" if row.get("unsteady") else "")
        rows.append([name, *times, _number(row["ratio"]), shown, _number(worst)])
    header = ["cell", "kilat, ms", "sdpa, ms", "sdpa / kilat", "of the limit", "error / allowed"]
    text = table(header, rows, right=range(1, 6))
    missing = [f"{who}, {row['cell']['name']}: {why}" for row in document["rows"] for who, why in _untimed(row)]
    if missing:
        text += "\n\nNot timed:\n\n" + "\n".join(f"- {line}" for line in missing)
    limits = document.get("limits", {})
    shown = [f"{name.replace('_', ' ')} {_rate(name, value)}" for name, value in limits.items()]
    return text + (f"\n\nLimits measured in the same run: {', '.join(shown)}." if shown else "")


def _untimed(row: dict[str, Any]) -> list[tuple[str, str]]:
    return list(row["not_timed"].items())


def _rate(name: str, value: float) -> str:
    return f"{value / 1e9:.0f} GB/s" if name == "read" else f"{value / 1e9:.0f} GFLOP/s"


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"


def _memory(document: Document, longest_only: bool = False) -> str:
    by_cell: dict[str, dict[str, Any]] = {}
    longest = max((row["cell"]["seqlen_kv"] for row in document["rows"]), default=0)
    for row in document["rows"]:
        if longest_only and row["cell"]["seqlen_kv"] < longest:
            continue
        by_cell.setdefault(row["cell"]["name"], {})[row["contender"]] = row
    rows: list[list[str]] = []
    for name, found in by_cell.items():
        extra = [_mib(found[who]["extra_bytes"]) if who in found else "-" for who in CONTENDERS]
        rows.append([name, _mib(next(iter(found.values()))["output_bytes"]), *extra])
    header = ["cell", "outputs, MiB", "kilat, MiB above", "sdpa, MiB above"]
    return table(header, rows, right=range(1, 4))


def _long(document: Document) -> str:
    rows = [
        [name, f"{found['seconds']:.1f}", f"{found['flops_per_second'] / 1e9:.0f}", _mib(found["extra_bytes"])]
        for name in ("forward", "backward")
        if (found := document.get(name))
    ]
    size = f"{document['length']:,} tokens, {document['heads']} heads, {document['dtype']}, causal"
    errors = document.get("errors", {})
    shares = [f"{name} {found['error'] / found['allowed']:.2f}" for name, found in errors.items() if found["allowed"]]
    header = ["one call", "seconds", "GFLOP/s", "MiB above inputs and outputs"]
    return f"{size}. Error over its budget on sampled rows: {', '.join(shares)}.\n\n" + table(header, rows, range(1, 4))


def summary(folder: Path) -> str:
    """For the front page: group means of every run of the suites `h200` and `cpu`, where a peer was faster, memory."""
    parts: list[str] = []
    found = [document for _, document in documents(folder)]
    parts += [gpu_table.summary(document) for document in found if document.get("suite") == "h200"]
    for document in found:
        if is_speed(document) and document["suite"] == "cpu":
            means = groups(document, detailed=False)
            parts.append(f"{means}\n\n{slower(document, most=6)} Measured on: {provenance(document)}")
    for document in found:
        if is_memory(document):
            text = f"Peak memory above inputs and outputs: {provenance(document)}"
            parts.append(f"{text}\n\n{_memory(document, longest_only=True)}")
    return "\n\n".join(parts) or NOTHING


def _mutants(document: Document) -> str:
    """How many planted bugs the tests caught."""
    caught, planted, revision = (document[name] for name in ("caught", "planted", "revision"))
    where = f"kilat at {revision[:10]}; {document['date'][:10]}; `{document['command']}`"
    return f"{caught} of {planted} planted bugs caught by the tests. {where}."


def results(folder: Path) -> str:
    """Every result: provenance, means, cells."""
    parts: list[str] = []
    for name, document in documents(folder):
        if is_speed(document):
            body = f"{groups(document, detailed=True)}\n\n{slower(document)}\n\n{_speed(document)}"
        elif gpu_table.is_gpu(document):
            about, body = gpu_table.provenance(document), gpu_table.results(document)
            parts.append(f"## {name.removesuffix('.json')}\n\n{about}\n\n{body}")
            continue
        elif is_memory(document):
            body = _memory(document)
        elif is_long(document):
            body = _long(document)
        elif "mutants" in document:
            parts.append(f"## {name.removesuffix('.json')}\n\n{_mutants(document)}")
            continue
        else:
            body = "No table is made of this kind of result; the file holds its numbers."
        parts.append(f"## {name.removesuffix('.json')}\n\n{provenance(document)}\n\n{body}")
    return "\n\n".join(parts) or NOTHING
