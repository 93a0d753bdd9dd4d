"""The `kilat` command; `main` is its entry point."""

from kilat.cli.app import main

__all__ = ["main"]
