"""`kilat bench`: time kilat beside torch, each result checked against float64 first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kilat.cli.bench_gpu import SUITES, Request, run_gpu
from kilat.cli.output import ThreadsOption, print_json, progress, seconds, set_threads, show, size, table, to_json

if TYPE_CHECKING:
    from kilat.bench.cells import Cell
    from kilat.bench.footprint import Footprint
    from kilat.bench.run import Row


def _choose(
    suite_name: str | None, shapes: list[str], dtypes: list[str] | None, forward_only: bool
) -> tuple[str, list[Cell]]:
    """Turn the options into a name for the report and its cells."""
    from kilat.bench.cells import DTYPES, Direction, parse_shape, suite

    if suite_name is not None and shapes:
        raise ValueError(f"give suite or shape, not both; got suite={suite_name}, shape={shapes[0]}")
    if not shapes and (dtypes or forward_only):
        given = f"dtype={dtypes[0]}" if dtypes else "forward-only"
        raise ValueError(f"shape must be given with dtype and forward-only: a suite has its own; got {given}, no shape")
    if not shapes:
        name = suite_name or "quick"
        return name, suite(name)
    dtypes = dtypes or ["float32", "bfloat16"]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype}")
    directions: list[Direction] = ["forward"] if forward_only else ["forward", "backward"]
    return "shape", [cell for shape in shapes for cell in parse_shape(shape, dtypes, directions)]


def _rate(row: Row, name: str) -> str:
    """What a contender reaches, and its share of the limit."""
    value = row.achieved(name)
    if value is None:
        return "-"
    rate = f"{value / 1e9:.1f} GB/s" if row.cell.direction == "decode" else f"{value / 1e9:.0f} GFLOP/s"
    return f"{rate}, {value / row.limit:.0%}" if row.limit else rate


def _show_speed(rows: list[Row], limits: dict[str, float]) -> None:
    from kilat.bench.run import OURS, UNSTEADY, group_rows

    made = table("Median time", "cell", "kilat", "sdpa", "sdpa / kilat", "kilat reaches, of limit", "error / allowed")
    for row in rows:
        times = [seconds(row.timings[name].median) if name in row.timings else "-" for name in (OURS, "sdpa")]
        shares = [v.error / v.allowed if v.allowed else 0.0 for v in row.verdicts.get(OURS, [])]
        error = f"{max(shares):.2f}" if shares else "-"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        made.add_row(row.cell.name, *times, ratio, _rate(row, OURS), error)
    show(made)
    unsteady = [row for row in rows if row.unsteady]
    if unsteady:
        show(
            f"busy machine: in {len(unsteady)} of {len(rows)} cells a median is over {UNSTEADY} times the minimum; "
            "such times are not worth quoting, run again when nothing else runs"
        )
    for row in rows:
        for name, reason in row.not_timed.items():
            show(f"not timed: {name}, {row.cell.name}: {reason}")
    means = table("Geometric means of sdpa / kilat (above 1: kilat is faster)", "group", "mean", "smallest", "cells")
    for group in group_rows(rows):
        means.add_row(group.name, f"{group.ratio:.2f}", f"{group.smallest:.2f}", f"{group.measured} of {group.cells}")
    show(means)
    for name, limit in limits.items():
        unit, what = ("GB/s", "reading memory") if name == "read" else ("GFLOP/s", f"torch.matmul, {name[7:]}")
        show(f"limit: {what} {limit / 1e9:.0f} {unit}")


def _run_speed(name: str, cells: list[Cell], reps: int, quiet: bool) -> tuple[dict[str, object], bool]:
    from kilat.bench.run import report, run_cells

    with progress() as bar:
        task = bar.add_task("measuring the machine", total=len(cells))

        def on_cell(row: Row) -> None:
            bar.update(task, advance=1, description=row.cell.name)

        rows, limits = run_cells(cells, reps=reps, on_cell=on_cell)
    if not quiet:
        _show_speed(rows, limits)
    return report(rows, limits, name), all(row.ok for row in rows)


def _show_memory(rows: list[Footprint]) -> None:
    from kilat.bench.footprint import CONTENDERS

    made = table("Peak memory above inputs and outputs", "cell", "outputs", *CONTENDERS)
    for ours, peer in zip(rows[::2], rows[1::2], strict=True):
        made.add_row(ours.cell.name, size(ours.output_bytes), size(ours.extra_bytes), size(peer.extra_bytes))
    show(made)
    for row in rows:
        if row.reason:
            show(f"no number: {row.contender}, {row.cell.name}: {row.reason}")


def _run_memory(name: str, cells: list[Cell], quiet: bool) -> tuple[dict[str, object], bool]:
    from kilat.bench.footprint import CONTENDERS, footprint
    from kilat.bench.machine import provenance

    rows: list[Footprint] = []
    with progress() as bar:
        task = bar.add_task("", total=len(cells) * len(CONTENDERS))
        for cell in cells:
            for contender in CONTENDERS:
                bar.update(task, description=f"{contender}: {cell.name}")
                rows.append(footprint(cell, contender))
                bar.advance(task)
    if not quiet:
        _show_memory(rows)
    document: dict[str, object] = {"schema": 1, "suite": name, **provenance(), "rows": [row.to_json() for row in rows]}
    return document, all(not row.reason for row in rows if row.contender == "kilat")


def bench(
    suite: Annotated[
        str | None,
        typer.Option("--suite", help="quick (default), cpu, cpu-decode, cpu-memory, h200, h200-quick or h200-long."),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option("--shape", help="B,H,N,D; may be given several times.")] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="For --shape; default float32, bfloat16.")] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="For --shape: leave the backward out.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the full result to this file; - prints only that.")
    ] = None,
    threads: ThreadsOption = None,
    reps: Annotated[int, typer.Option("--reps", min=1, help="Rounds in which the contenders take turns.")] = 7,
    *,
    backend: Annotated[str, typer.Option("--backend", help="GPU suites: kilat's backend.")] = "auto",
    shard: Annotated[str, typer.Option("--shard", help="GPU suites: i/n measures the i-th part of n.")] = "1/1",
    contender: Annotated[
        list[str] | None, typer.Option("--contender", help="GPU suites: only this one beside kilat; may be repeated.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", min=0, help="GPU suites: begin no cell after so many seconds.")
    ] = None,
    merge: Annotated[
        list[Path] | None, typer.Option("--merge", help="GPU suites: put this file into --json; may be repeated.")
    ] = None,
) -> None:
    """Time kilat beside its peers; a result is checked against float64 before it is timed.

    The peer on CPUs is torch's SDPA. GPU suites save every cell into --json and go on where that file ends. Exits with
    1 if kilat refused a cell or got one wrong.
    """
    set_threads(threads)
    name, cells = _choose(suite, shape or [], dtype, forward_only)
    if json_path is not None and str(json_path) != "-" and not json_path.absolute().parent.is_dir():
        raise ValueError(f"json must be a file in an existing folder; got {json_path}")
    request = Request(backend, shard, tuple(contender or ()), deadline, tuple(merge or ()))
    if name in SUITES:
        if not run_gpu(name, cells, request, json_path, reps):
            raise typer.Exit(1)
        return
    if not request.is_plain:
        raise ValueError(f"backend, shard, contender, deadline and merge are for {', '.join(SUITES)}; got suite={name}")
    quiet = str(json_path) == "-"
    if name == "cpu-memory":
        document, ok = _run_memory(name, cells, quiet)
    else:
        document, ok = _run_speed(name, cells, reps, quiet)
    if quiet:
        print_json(document)
    elif json_path is not None:
        json_path.write_text(to_json(document) + "\n")
    if not ok:
        raise typer.Exit(1)
