"""The command line's reference, read from the commands themselves."""

from __future__ import annotations

from typing import Any

import typer
from markdown_table import table

from kilat.cli.app import app


def commands() -> str:
    """A section for every command: what it does, and its options."""
    group = typer.main.get_command(app)
    return "\n\n".join(_sections("kilat", group))


def _sections(name: str, command: Any) -> list[str]:
    nested = getattr(command, "commands", None)
    if nested:
        return [section for word, inner in nested.items() for section in _sections(f"{name} {word}", inner)]
    text = " ".join((command.help or "").split())
    rows = [
        [", ".join(f"`{word}`" for word in parameter.opts), parameter.help or ""]
        for parameter in command.params
        if getattr(parameter, "help", None)
    ]
    listed = f"\n\n{table(['option', 'meaning'], rows)}" if rows else ""
    return [f"## {name}\n\n{text}{listed}"]
