"""All that a GPU must show, step by step: `python scripts/gpu_evidence.py --seconds 560 --out FOLDER`.

The steps, in order: all cases, random Problems, compile times, the sanitizer, the shards of `kilat bench --suite h200`,
and a million tokens. Each goes on where its file in FOLDER ends; what the file of this revision has in full is skipped,
so the same command is repeated until nothing is left, on a machine that may be new each time (`--resume` takes the
files of the last one). A step gets what is left of the seconds, less a reserve. FOLDER gets at most eight files, with
two shards; those of another revision are moved to a folder below it. Exits with 0 once everything is there and right.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_evidence_files as files
import gpu_pool

gpu_pool.find_sources()

RESERVE = 30.0
"""Seconds at the end, in which a step that was told to stop writes what it has, or is ended."""
GRACE, COLLECT_SECONDS = 18.0, 15.0
TAIL_LINES = 30
ROW_SECONDS, CELL_SECONDS = 60.0, 15.0
"""What may be begun last takes so long: a row of compile times, a cell of a suite with the tables behind it."""
COMPILE_ROWS = ("gluon d128 causal", "gluon d64 causal", "triton d128 causal")
Document = dict[str, Any]
NOTHING = files.State(False, True, "nothing yet")


@dataclass(frozen=True)
class Step:
    """A command that goes on with a file, given the file (a folder, if it is packed) and its seconds."""

    name: str
    file: str
    command: Callable[[Path, float], list[str]]
    read: Callable[[Document], files.State]
    least: float  # seconds below which beginning is not worth it
    packs: bool = False


def script(name: str, *words: str) -> list[str]:
    """The command line of a script of this folder."""
    return [sys.executable, str(Path(__file__).resolve().parent / name), *words]


def bench(*words: str) -> list[str]:
    """The command line of kilat's own benchmark."""
    return [sys.executable, "-m", "kilat.cli", "bench", *words]


def seconds(value: float) -> tuple[str, str]:
    """The words that say for how long a script works."""
    return "--seconds", f"{value:.0f}"


def correctness(options: argparse.Namespace) -> list[Step]:
    """The steps up to the suite."""
    jobs = ("--jobs", str(options.jobs))
    count = ("--count", str(options.count))
    compiling = ("--warm", "1", "--rows", ",".join(COMPILE_ROWS))
    return [
        Step(
            "cases",
            "cases.json",
            lambda file, left: script("gpu_cases.py", *jobs, "--json", str(file), *seconds(left)),
            files.cases,
            least=40.0,
        ),
        Step(
            "random",
            "random.json",
            lambda file, left: script("gpu_random.py", *jobs, *count, "--json", str(file), *seconds(left)),
            lambda document: files.problems(document, options.count),
            least=40.0,
        ),
        Step(
            "compile",
            "compile.json",
            lambda file, left: script("gpu_compile.py", *compiling, "--json", str(file), *seconds(left - ROW_SECONDS)),
            lambda document: files.compile_times(document, COMPILE_ROWS),
            least=75.0,
        ),
        Step(
            "sanitize",
            "sanitizer.tar.gz",
            lambda folder, left: script("gpu_sanitize.py", *jobs, "--out", str(folder), "--deadline", f"{left:.0f}"),
            files.sanitizer,
            least=60.0,
            packs=True,
        ),
    ]


def speed(options: argparse.Namespace) -> list[Step]:
    """The suite's shards, and a million tokens."""
    contenders = [word for name in options.contender for word in ("--contender", name)]

    def step(name: str, file: str, of: tuple[str, int, int], least: float, words: Sequence[str]) -> Step:
        def command(path: Path, left: float) -> list[str]:
            deadline = f"{max(0.0, left - CELL_SECONDS):.0f}"
            return bench("--suite", of[0], *words, "--json", str(path), "--deadline", deadline)

        return Step(name, file, command, lambda document: files.suite(document, *of), least)

    count = options.shards
    shards = [
        step(
            f"h200-{n}",
            f"h200-{n}-of-{count}.json",
            ("h200", n, count),
            90.0,
            ["--shard", f"{n}/{count}", *contenders],
        )
        for n in range(1, count + 1)
    ]
    return [*shards, step("h200-long", "h200-long.json", ("h200-long", 1, 1), 60.0, [])]


def steps(options: argparse.Namespace) -> list[Step]:
    """Everything, in the order in which it is done."""
    return [*correctness(options), *speed(options)]


def chosen(some: Sequence[Step], only: str) -> list[Step]:
    """Those named, `h200` for all its shards; raises ValueError for a name that none has."""
    names = [name for name in only.split(",") if name]
    known = {step.name for step in some} | {"h200"}
    if unknown := set(names) - known:
        raise ValueError(f"only must name some of {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}")

    def is_asked(step: Step) -> bool:
        return step.name in names or ("h200" in names and step.file.startswith("h200-") and "-of-" in step.file)

    return [step for step in some if not names or is_asked(step)]


def execute(step: Step, out: Path, scratch: Path, seconds: float) -> tuple[str, list[str]]:
    """Run a step for at most so many seconds and a little; how it ended, and its last lines.

    What it has written by then is in `out`, however it ends: a packed folder is packed again and again meanwhile.
    """
    target = out / step.file
    if step.packs:
        folder = scratch / step.name
        folder.mkdir()
        files.unpack(target, folder)
    log = scratch / f"{step.name}.log"
    end, collected = time.monotonic() + seconds + GRACE, time.monotonic()
    with log.open("wb") as written:
        process = subprocess.Popen(
            step.command(folder if step.packs else target, seconds),
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it has started can be ended with it
        )
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                if step.packs and time.monotonic() - collected > COLLECT_SECONDS:
                    files.pack(folder, target)
                    collected = time.monotonic()
        finally:
            status = "stopped" if process.poll() is None else f"ended with {process.returncode}"
            _end(process)
            if step.packs:
                files.pack(folder, target)
    return status, log.read_text(errors="replace").splitlines()[-TAIL_LINES:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what is left of its group."""
    for number, wait in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait)
        except (ProcessLookupError, PermissionError):
            break
        except subprocess.TimeoutExpired:
            continue


def take(folder: Path, out: Path, some: Sequence[Step]) -> None:
    """Copy the files of an earlier command, but none that `out` has."""
    for name in (*(step.file for step in some), "evidence.json"):
        if (folder / name).is_file() and not (out / name).exists():
            shutil.copyfile(folder / name, out / name)  # not its mode: what came back may be read-only


def put_away(out: Path, some: Sequence[Step], git: object) -> None:
    """Move files of another revision below `out`, where no step finds them and nobody loses them."""
    for step in some:
        document = files.load(out / step.file)
        if (out / step.file).exists() and (document is None or document.get("git") != git):
            of = (document or {}).get("git") or {}
            place = out / f"of-{str(of.get('commit', 'unknown'))[:12]}{'-dirty' if of.get('dirty') else ''}"
            place.mkdir(exist_ok=True)
            (out / step.file).replace(place / step.file)


def state(step: Step, out: Path) -> files.State:
    """What the file of a step says."""
    document = files.load(out / step.file)
    return NOTHING if document is None else step.read(document)


def note(out: Path, name: str, run: Document, git: object) -> None:
    """Add how a step ended to evidence.json."""
    path = out / "evidence.json"
    document = files.load(path) or {"runs": []}
    document["runs"].append({"step": name, "git": git, **run})
    files.write(path, json.dumps(document, indent=1) + "\n")


def work(some: Sequence[Step], out: Path, seconds: float, git: object) -> list[tuple[str, files.State, str]]:
    """Do what is not done, as long as there is time; (name, what its file says, what was done) of every step."""
    begin = time.monotonic()
    found: list[tuple[str, files.State, str]] = []
    tail: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for step in some:
            left = seconds - RESERVE - (time.monotonic() - begin)
            if state(step, out).done:
                said = "was done"
            elif left < step.least:
                said = f"not begun: {max(0.0, left):.0f} s left, {step.least:.0f} wanted"
            else:
                begun = time.monotonic()
                status, tail = execute(step, out, Path(scratch), left)
                elapsed = round(time.monotonic() - begun, 1)
                note(out, step.name, {"status": status, "seconds": elapsed, "given": round(left), "tail": tail}, git)
                said = f"{status} after {elapsed:.0f} s"
            what = state(step, out)
            if said.startswith(("ended", "stopped")) and (what is NOTHING or not what.ok):
                what = replace(what, ok=False)
                print("\n".join(f"{step.name}: {line}" for line in tail[-8:]), flush=True)
            found.append((step.name, what, said))
            print(summary(found[-1:]), flush=True)
    return found


def summary(found: Sequence[tuple[str, files.State, str]]) -> str:
    """A line or two a step."""
    lines: list[str] = []
    for name, what, said in found:
        verdict = "done" if what.done and what.ok else "BAD" if not what.ok else "part"
        lines.append(f"{name:10} {verdict:5} {what.words}  ({said})"[:240])
    return "\n".join(lines)


def main() -> int:
    """Do the steps, and sum up; 0 if all that was asked for is there and right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="for everything, a reserve included")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--resume", type=Path, help="folder with the results of an earlier command")
    parser.add_argument("--only", default="", help="names of steps, between commas; h200 is all its shards")
    parser.add_argument("--shards", type=int, default=2, help="of the h200 suite")
    parser.add_argument("--contender", action="append", default=[], help="of the h200 suite; all if not given")
    parser.add_argument("--count", type=int, default=10000, help="of random Problems")
    parser.add_argument("--jobs", type=int, default=14)
    options = parser.parse_args()
    import torch

    from kilat.bench import machine

    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed; torch sees none")
    some, git = steps(options), machine.revision()
    asked = chosen(some, options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume is not None:
        take(options.resume, options.out, some)
    put_away(options.out, some, git)
    source = str(gpu_pool.ROOT / "src")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    found = work(asked, options.out, options.seconds, git)
    print(f"\nrevision {git}\n{summary(found)}")
    return int(not all(what.done and what.ok for _, what, _ in found))


if __name__ == "__main__":
    sys.exit(main())
