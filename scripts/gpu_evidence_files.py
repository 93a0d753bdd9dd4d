"""What the files of `gpu_evidence.py` say: whether a step is done, whether it is right, and what it came to."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Document = dict[str, Any]
SANITIZER = "sanitizer.json"


@dataclass(frozen=True)
class State:
    """Whether everything is there, whether what is there is right, and both in words."""

    done: bool
    ok: bool
    words: str


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def load(path: Path) -> Document | None:
    """A JSON document, that of the sanitizer from its archive; None where there is none that can be read."""
    if not path.is_file():
        return None
    try:
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                member = archive.extractfile(SANITIZER)
                return None if member is None else json.load(member)
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError):
        return None


def unpack(archive: Path, folder: Path) -> None:
    """Put the files of an archive, if it is there, into a folder."""
    if archive.is_file():
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")


def pack(folder: Path, archive: Path) -> None:
    """Put the files of a folder into an archive, whole or not at all; nothing if there is no result in it yet."""
    if not (folder / SANITIZER).is_file():
        return
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w:gz") as opened:
        for path in sorted(folder.glob("*")):
            if path.suffix in (".json", ".log"):
                member = tarfile.TarInfo(path.name)  # without owner and time
                text = path.read_bytes()
                member.size = len(text)
                opened.addfile(member, io.BytesIO(text))
    part.replace(archive)


def _verdicts(document: Document) -> str:
    """Backends with their counts."""
    return "; ".join(
        f"{name} {', '.join(f'{count} {verdict}' for verdict, count in sorted(of['verdicts'].items()))}"
        for name, of in sorted(document["backends"].items())
    )


def _all_pass(document: Document) -> bool:
    """Whether nothing failed, and every backend passed something: refusing everything shows nothing."""
    passed = [of["verdicts"].get("pass", 0) for of in document["backends"].values()]
    return not document["failures"] and all(passed)


def cases(document: Document) -> State:
    """All of tests/cases.py, and none failed."""
    ran, asked, failed = document["cases"]["ran"], document["cases"]["asked"], len(document["failures"])
    return State(ran >= asked, _all_pass(document), f"{ran} of {asked} cases, {failed} failed; {_verdicts(document)}")


def problems(document: Document, count: int) -> State:
    """So many random Problems, and none failed."""
    ran, failed = document["problems"]["ran"], len(document["failures"])
    return State(
        ran >= count, _all_pass(document), f"{ran} of {count} Problems, {failed} failed; {_verdicts(document)}"
    )


def compile_times(document: Document, names: Sequence[str]) -> State:
    """All rows; what is right here is a matter of goals, not of the file."""
    rows = {row["name"]: row for row in document["rows"]}
    words = [
        f"{name}: cold {row['cold']['forward']:.1f} + {row['cold'].get('backward', 0.0):.1f} s, "
        f"warm {row['warm']['forward']:.2f} s"
        for name, row in rows.items()
    ]
    return State(set(names) <= set(rows), True, "; ".join(words) or "no row yet")


def sanitizer(document: Document) -> State:
    """Every kernel under every tool; memcheck must find nothing, racecheck's reports are for a reader.

    A run that was stopped counts as none: it is done again.
    """
    kinds = ("plain", "memcheck", "racecheck")
    results, subjects = document["results"], document["subjects"]
    ended = [(name, one) for name, of in results.items() for one in of.values() if "stopped" not in one["status"]]
    bad = sorted({name for name, one in ended if one["bad"]})
    races = sum(of.get("racecheck", {}).get("errors", 0) for of in results.values())
    wanted = len(subjects) * len(kinds)
    words = f"{len(ended)} of {wanted} runs, racecheck reports {races} errors"
    return State(len(ended) >= wanted, not bad, words + (f"; bad: {', '.join(bad)}" if bad else ""))


def suite(document: Document, name: str, index: int, count: int) -> State:
    """All cells of a shard, each of them right."""
    from kilat.bench.cells import suite as cells
    from kilat.bench.h200 import deal
    from kilat.bench.run import Row

    wanted = {cell.name for cell in deal(cells(name), index, count)}
    rows = [Row.from_json(row) for row in document["rows"]]
    wrong = [row.cell.name for row in rows if not row.ok]
    words = [f"{len(rows)} of {len(wanted)} cells"]
    for group in document["groups"]:
        if group["name"].endswith(" all") and group["ratio"] is not None:
            words.append(f"{group['name'].removesuffix(' all')} {group['ratio']:.3f}, least {group['smallest']:.3f}")
    if name == "h200-long":
        words += [f"{rate / 1e12:.0f} TFLOP/s" for row in rows if (rate := row.achieved("kilat")) is not None]
        words += [f"{row.extra_bytes['kilat'] / 2**20:.0f} MiB extra" for row in rows if "kilat" in row.extra_bytes]
    spent = list(document.get("spent", {}).items())[:4]
    words += [f"most seconds: {', '.join(f'{part} {seconds:.0f}' for part, seconds in spent)}"] if spent else []
    words += [f"wrong: {', '.join(wrong[:3])}"] if wrong else []
    return State(wanted <= {row.cell.name for row in rows}, not wrong, "; ".join(words))
