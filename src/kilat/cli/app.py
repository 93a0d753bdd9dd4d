"""The application: its commands, its global options, and what becomes of an error.

Nothing here imports torch: each command does so when it runs, so that `kilat --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kilat._version import __version__
from kilat.cli import bench, cache, check, demo, explain, info, tune
from kilat.cli.output import errors

DEBUG = "--debug"

app = typer.Typer(
    name="kilat",
    help="Exact attention, measured and checked on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.command("explain")(explain.explain)
app.command("info")(info.info)
app.command("tune")(tune.tune)
app.add_typer(cache.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kilat {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show the traceback of an error; valid after any command.")
    ] = False,
) -> None:
    del version, debug  # the first has acted by now, the second is read by main wherever it stands


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a check failed, 2 wrong use or an error, told in one sentence on stderr.

    `--debug` anywhere lets the exception through with its traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    try:
        app(args=[word for word in words if word != DEBUG], prog_name="kilat")
    except Exception as error:
        if debug:
            raise
        expected = isinstance(error, (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError))
        kind = "" if expected else f"{type(error).__name__}: "
        errors.print(f"error: {kind}{error or type(error).__name__}", style="red", markup=False, highlight=False)
        command = next((word for word in words if not word.startswith("-")), "")
        remedy = f"see `kilat {command} --help`, or add --debug for the traceback".replace("  ", " ")
        errors.print(remedy, markup=False, highlight=False)
        sys.exit(2)
