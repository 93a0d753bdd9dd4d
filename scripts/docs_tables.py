"""Fill the tables of README.md and docs/ from the code and from the results in benchmarks/.

A block stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; what is between is replaced.

    python scripts/docs_tables.py           rewrite what has changed
    python scripts/docs_tables.py --check   change nothing; exit with 1 and name what is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import benchmark_table
import command_table
import support_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks"
BLOCK = re.compile(r"(?P<begin><!-- begin (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end (?P=name) -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[], str]] = {
    "support-summary": support_table.summary,
    "support-matrix": support_table.matrix,
    "benchmark-summary": lambda: benchmark_table.summary(RESULTS),
    "benchmark-results": lambda: benchmark_table.results(RESULTS),
    "commands": command_table.commands,
}


def pages() -> list[Path]:
    """README.md and every page below docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with its blocks made anew; raises ValueError for a block that nobody makes."""

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise ValueError(f"block must be one of {', '.join(BLOCKS)}; got {name}")
        return f"{match['begin']}\n{BLOCKS[name]().strip()}\n\n{match['end']}"

    return BLOCK.sub(replace, text)


def main() -> int:
    """Fill or check every page; 1 if a check found one out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    options = parser.parse_args()
    stale = False
    for page in pages():
        text = page.read_text(encoding="utf-8")
        made = filled(text)
        if made == text:
            continue
        stale = True
        print(f"{'out of date' if options.check else 'rewritten'}: {page.relative_to(ROOT)}")
        if not options.check:
            page.write_text(made, encoding="utf-8")
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
