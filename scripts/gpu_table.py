"""Tables of a merged result of `kilat bench --suite h200`: every contender's TFLOP/s beside kilat's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from markdown_table import table

Document = dict[str, Any]
OURS = "kilat"
# Forward and backward below this against the best peer want an explanation.
SLOW = {"forward": 0.95, "backward": 0.90}


def is_gpu(document: Document) -> bool:
    """Whether it is a report of a GPU suite."""
    return str(document.get("suite", "")).startswith("h200") and "rows" in document


def provenance(document: Document) -> str:
    """One paragraph: GPU, versions, revision, date, the commands, and the matmul rates of the run."""
    device, versions, git = (document.get(name) or {} for name in ("device", "versions", "git"))
    shown = ("torch", "triton", "cudnn", "flash-attn-4", "python")
    hardware = [str(device[name]) for name in ("architecture", "power_limit", "clock_limit") if name in device]
    driver = f"driver {device['driver']}" if "driver" in device else ""
    limits = [f"{name.removeprefix('matmul_')} {rate / 1e12:.0f}" for name, rate in document["limits"].items()]
    parts = [
        f"{device.get('model', 'unknown GPU')} ({', '.join(hardware)})",
        driver,
        ", ".join(f"{name} {versions[name]}" for name in shown if name in versions),
        f"kilat at {git['commit'][:10]}{' with local changes' if git['dirty'] else ''}" if git else "",
        str(document.get("date", ""))[:10],
        f"`kilat bench --suite {document['suite']}` in {len(document.get('runs', [1]))} shards",
        f"matmul in the same runs, TFLOP/s: {', '.join(limits)}" if limits else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def names(document: Document) -> list[str]:
    """Contenders that were timed anywhere, kilat first."""
    found = dict.fromkeys(name for row in document["rows"] for name in row["seconds"])
    return sorted(found, key=lambda name: (not name.startswith(OURS), name))


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:.0f}"


def groups(document: Document, detailed: bool) -> str:
    """Geometric means of best peer / kilat, by direction and dtype, and if `detailed` by shape and mask too.

    With what else a group has: the share of matmul, the price of determinism, memory, host time, sustained runs.
    """
    chosen = [g for g in document["groups"] if detailed or len(g["name"].split()) == 2]
    columns = {name: show for name, show in MORE.items() if any(_more(g, name) is not None for g in chosen)}
    rows: list[list[str]] = []
    for g in chosen:
        more = (show(g) for show in columns.values())
        rows.append([g["name"], _ratio(g["ratio"]), _ratio(g["smallest"]), *more, f"{g['measured']} of {g['cells']}"])
    header = ["group", "best peer / kilat", "smallest", *columns, "cells"]
    return table(header, rows, right=range(1, len(header)))


def _more(group: Document, column: str) -> Any:
    return group.get(FIELDS[column])


def _slower(group: Document) -> str:
    mean = group.get("deterministic")
    return "-" if mean is None else f"{mean:.2f}, at most {group['deterministic_largest']:.2f}"


def _microseconds(group: Document) -> str:
    mean = group.get("host_seconds")
    return "-" if mean is None else f"{mean * 1e6:.0f}, at most {group['host_largest'] * 1e6:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


FIELDS = {
    "of matmul": "share_of_limit",
    "deterministic / default": "deterministic",
    "extra / tensors": "extra_share",
    "host, us": "host_seconds",
    "sustained": "sustained",
}
MORE: dict[str, Callable[[Document], str]] = {
    "of matmul": lambda group: _share(group.get("share_of_limit")),
    "deterministic / default": _slower,
    "extra / tensors": lambda group: _share(group.get("extra_share")),
    "host, us": _microseconds,
    "sustained": lambda group: _ratio(group.get("sustained")),
}
"""Columns of groups that a document may have."""


def grid(document: Document) -> str:
    """A line for each shape and mask, a column for each length: TFLOP/s of kilat, and best peer / kilat."""
    lines: dict[str, dict[int, str]] = {}
    for row in document["rows"]:
        words, rate = row["cell"]["name"].split(), row["achieved"].get(OURS)
        length = next(word.removeprefix("N=") for word in words if word.startswith("N="))
        if rate is None or not length.isdecimal():  # ragged: from so many to so many
            continue
        grouped = (word for word in words if word.startswith("H=") and "/" in word)
        name = " ".join([word for word in words if word.partition("=")[0] not in ("N", "B", "H")] + list(grouped))
        # the first cell of a length is that of the grid; others have fewer sequences
        lines.setdefault(name, {}).setdefault(int(length), f"{_tera(rate)} ({_ratio(row['ratio'])})")
    lengths = sorted({length for place in lines.values() for length in place})
    rows = [[name, *(place.get(length, "-") for length in lengths)] for name, place in lines.items()]
    return table(["TFLOP/s (best peer / kilat)", *map(_length, lengths)], rows, right=range(1, len(lengths) + 1))


def _length(value: int) -> str:
    return f"{value >> 20}M" if value >= 1 << 20 else f"{value >> 10}k" if value >= 1 << 10 else str(value)


def slower(document: Document, most: int | None = None) -> str:
    """Sentences with the cells that stay below their mark, the worst first, and with those that have no result."""
    rated = [row for row in document["rows"] if row["ratio"] is not None]
    below = sorted(
        (row["ratio"], f"{row['cell']['name']} ({_ratio(row['ratio'])}, {row['best_peer']})")
        for row in rated
        if row["ratio"] < SLOW[row["cell"]["direction"]]
    )
    marks = f"below {SLOW['forward']:.2f} forward or {SLOW['backward']:.2f} backward"
    text = f"{len(below)} of {len(rated)} cells are {marks} of the best peer"
    text += f": {_listed([name for _, name in below], most)}." if below else "."
    failed = [
        f"{row['cell']['name']}: {row['not_timed'][OURS]}" for row in document["rows"] if OURS in row["not_timed"]
    ]
    if failed:
        text += f" kilat has no result in {len(failed)}: {_listed(failed, most)}."
    missing = document.get("missing", [])
    return text + (f" Not measured: {_listed(missing, most)}." if missing else "")


def _listed(some: list[str], most: int | None) -> str:
    more = f"; and {len(some) - most} more" if most is not None and len(some) > most else ""
    return "; ".join(some[:most]) + more


def cells(document: Document) -> str:
    """Every cell: TFLOP/s of all, the ratio, the share of matmul, error, host time and memory of kilat."""
    who = names(document)
    header = ["cell", "backend", *who, "best peer / kilat", "of matmul", "error / allowed", "host, us", "extra, MiB"]
    rows: list[list[str]] = []
    for row in document["rows"]:
        errors, allowed = row["errors"].get(OURS, {}), row["allowed"]
        shares = [error / allowed[name] for name, error in errors.items() if error is not None and allowed[name]]
        share, host, extra = row["share_of_limit"], row["host_seconds"].get(OURS), row["extra_bytes"].get(OURS)
        rows.append(
            [
                row["cell"]["name"] + (" (unsteady)" if row["unsteady"] else ""),
                row["backend"] or "-",
                *(_tera(row["achieved"].get(name)) for name in who),
                _ratio(row["ratio"]),
                "-" if share is None else f"{share:.0%}",
                _ratio(max(shares, default=None)),
                "-" if host is None else f"{host * 1e6:.0f}",
                "-" if extra is None else f"{extra / 2**20:.1f}",
            ]
        )
    return table(header, rows, right=range(2, len(header)))


def sustained(document: Document) -> str:
    """Cells that ran for seconds: TFLOP/s, clock and power of each contender."""
    rows: list[list[str]] = []
    for row in document["rows"]:
        for name, found in row["sustained"].items():
            rate = _rate(row, name, found)
            clock, power = (("-" if found[x] is None else f"{found[x]:.0f}") for x in ("clock", "power"))
            rows.append([row["cell"]["name"], name, _tera(rate), _tera(row["achieved"].get(name)), clock, power])
    return table(["cell", "contender", "sustained", "burst", "MHz", "W"], rows, right=range(2, 6)) if rows else ""


def _rate(row: dict[str, Any], name: str, found: dict[str, Any]) -> float | None:
    """Work a second from that of the burst, which is the same work."""
    burst = row["seconds"].get(name)
    return row["achieved"][name] * burst["median"] / found["seconds"] if burst else None


def reasons(document: Document) -> str:
    """Who was not timed and why, with the number of cells."""
    counts: dict[tuple[str, str], list[str]] = {}
    for row in document["rows"]:
        for item in row["not_timed"].items():
            counts.setdefault(item, []).append(row["cell"]["name"])
    return "\n".join(f"- {name}, {_where(where)}: {_first_line(why)}" for (name, why), where in counts.items())


def _where(where: Iterable[str]) -> str:
    first, *others = where
    return f"{len(others) + 1} cells" if others else first


def _first_line(text: str) -> str:
    """What an error says first, short enough for a list."""
    line = (text.strip().splitlines() or [""])[0]
    return line if len(line) <= 200 else line[:197] + "..."


def summary(document: Document) -> str:
    """For the front page: means by direction and dtype, and the cells below their mark."""
    return f"{groups(document, detailed=False)}\n\n{slower(document, most=6)} Measured on: {provenance(document)}"


def results(document: Document) -> str:
    """Everything, in the order in which it is asked for."""
    parts = [groups(document, detailed=True), slower(document), grid(document)]
    parts += ["TFLOP/s, bursts with a cold L2:", cells(document)]
    held = sustained(document)
    if held:
        parts += ["Sustained for two seconds, TFLOP/s, with the clock and the power that the limit leaves:", held]
    untimed = reasons(document)
    if untimed:
        parts += ["Not timed:", untimed]
    return "\n\n".join(parts)
