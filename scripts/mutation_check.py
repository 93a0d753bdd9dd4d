"""Plant the bugs of tests/mutants.py one at a time and show that the tests catch every one.

    python scripts/mutation_check.py [--only N] [--jobs N] [--resume] [--json benchmarks/results/mutation_check.json]

Each mutant gets a copy of the package and a cache of kernels of its own; the repository is not touched. A mutant is
caught if pytest ends with failed tests (exit code 1); anything else, an error of the run included, is not a catch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.mutants import MUTANTS, Mutant  # noqa: E402  (the path above makes it importable)

TIMEOUT = 900  # seconds for the tests of one mutant


def plant(mutant: Mutant, package: Path) -> None:
    """Replace the mutant's text in a copy of the package; raises ValueError unless it stands there exactly once."""
    path = package / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} must hold {mutant.old!r} exactly once; got {source.count(mutant.old)}")
    path.write_text(source.replace(mutant.old, mutant.new))


def run(mutant: Mutant, work: Path) -> tuple[str, float, str]:
    """("caught" or "survived" or "broken", seconds, last line of pytest)."""
    shutil.copytree(ROOT / "src", work / "src", ignore=shutil.ignore_patterns("__pycache__"))
    plant(mutant, work / "src" / "kilat")
    environment = os.environ | {"PYTHONPATH": str(work / "src"), "KILAT_CACHE_DIR": str(work / "kernels")}
    tests = [t for t in mutant.tests.split() if (ROOT / t).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", "not slow"]
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return "caught", time.monotonic() - start, f"no end within {TIMEOUT} s"
    lines = done.stdout.strip().splitlines() or [""]
    crashed = done.returncode < 0  # a kernel that reads outside its tensors may end the process
    verdict = "caught" if done.returncode == 1 or crashed else "survived" if done.returncode == 0 else "broken"
    return verdict, time.monotonic() - start, lines[-1] if not crashed else f"signal {-done.returncode}"


def check(number: int) -> dict[str, Any]:
    """Plant one mutant, run its tests, print and return what came of it."""
    mutant = MUTANTS[number]
    with tempfile.TemporaryDirectory() as folder:
        verdict, seconds, line = run(mutant, Path(folder))
    print(f"{number:3} {verdict:8} {seconds:6.1f} s  {mutant.file}: {mutant.new}  [{line}]", flush=True)
    return {"number": number, **mutant._asdict(), "verdict": verdict, "seconds": round(seconds, 1), "pytest": line}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, action="append", help="number of a mutant; may be given again")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--resume", action="store_true", help="keep what the JSON file has as caught")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    known = _known(arguments.json) if arguments.resume else {}
    wanted = [n for n in arguments.only or range(len(MUTANTS)) if n not in known]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(check, wanted):
            known[row["number"]] = row
            if arguments.json:
                _write(arguments.json, [known[n] for n in sorted(known)])
    missed = [n for n, row in sorted(known.items()) if row["verdict"] != "caught"]
    print(f"{len(known) - len(missed)} of {len(known)} mutants caught; not caught: {missed or 'none'}")
    return 1 if missed else 0


def _known(path: Path | None) -> dict[int, dict[str, Any]]:
    """Rows of an earlier run that caught a mutant which is still the same, by number."""
    if path is None or not path.exists():
        return {}
    rows = {row["number"]: row for row in json.loads(path.read_text())["mutants"]}
    same = {n: row for n, row in rows.items() if n < len(MUTANTS) and row["new"] == MUTANTS[n].new}
    return {n: row for n, row in same.items() if row["verdict"] == "caught"}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The rows so far and where they come from, as JSON."""
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    result = {
        "command": "python scripts/mutation_check.py",
        "revision": revision.stdout.strip(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "caught": sum(row["verdict"] == "caught" for row in rows),
        "run": len(rows),
        "planted": len(MUTANTS),
        "mutants": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
