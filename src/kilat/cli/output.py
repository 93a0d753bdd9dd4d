"""What commands print: tables and JSON on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import math
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# Into a file or a pipe there is no width to keep to, and a folded table is hard to search.
console = Console() if sys.stdout.isatty() else Console(width=160)
errors = Console(stderr=True, soft_wrap=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="Threads; default: torch's own choice.")]


def print_json(document: object) -> None:
    """Print a JSON document on standard output."""
    print(to_json(document))


def to_json(document: object) -> str:
    """Return indented JSON; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(document), indent=2, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def progress() -> Progress:
    """Return a progress display on standard error, with a bar, a count and the elapsed time."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=errors, transient=True)


def table(title: str, *columns: str, left: int = 1) -> Table:
    """Print a title and return an empty table whose first `left` columns are text and whose others are numbers."""
    show(title)  # not the table's own, which would fold to its width
    made = Table()
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return made


def show(renderable: object) -> None:
    """Print a table, which folds to the terminal's width, or a line, which is left to the terminal."""
    console.print(renderable, markup=False, highlight=False, soft_wrap=isinstance(renderable, str))


def seconds(value: float | None) -> str:
    """Format a time with the unit that suits it."""
    if value is None:
        return "-"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def size(value: int | None) -> str:
    """Format bytes in powers of 1000, as tables of memory do."""
    if value is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} B"


def set_threads(threads: int | None) -> None:
    """Tell torch, and through it kilat, how many threads to use; None leaves the choice to torch."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
