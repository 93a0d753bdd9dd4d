"""`kilat check`: the numerics of this machine over a sample of all options, against float64."""

from __future__ import annotations

from typing import Annotated

import typer

from kilat.cli.output import JsonFlag, ThreadsOption, print_json, progress, set_threads, show, table


def check(
    device: Annotated[str, typer.Option("--device", help="Where to check: cpu.")] = "cpu",
    every_result: Annotated[bool, typer.Option("--all", help="Show every result, not one of each case.")] = False,
    threads: ThreadsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare kilat with float64 over masks, scores, dtypes, sizes, ragged batches and caches, torch's errors beside.

    Exits with 1 if any error is larger than allowed.
    """
    from kilat.checks import CASES, check

    set_threads(threads)
    with progress() as bar:
        task = bar.add_task("checking", total=len(CASES))
        report = check(device, on_case=lambda name: bar.update(task, advance=1, description=name))
    if as_json:
        print_json(report.to_json())
    else:
        made = table("Largest errors against float64", "case", "result", "kilat", "allowed", "torch", "verdict", left=2)
        for row in report.rows if every_result else report.worst():
            torch_error = row.torch_note if row.torch_error is None else f"{row.torch_error:.1e}"
            verdict = "ok" if row.ok else f"WRONG {row.note}".rstrip()
            made.add_row(row.case, row.result, f"{row.error:.1e}", f"{row.allowed:.1e}", torch_error, verdict)
        show(made)
        show(report.summary())
    if not report.ok:
        raise typer.Exit(1)
