"""From a bucket to a configuration: what is forced, the user's table, the packaged table, the built-in rule."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from kilat import config
from kilat.tune.table import Bucket, Table, TableError, Values, file_name, read

PACKAGED = Path(__file__).parent / "tables"
Config = TypeVar("Config")

_forced: ContextVar[dict[tuple[str, str], Values] | None] = ContextVar("kilat_forced_configurations", default=None)


class TuningTableWarning(UserWarning):
    """A tuning table that is there, and not used."""


def user_folder() -> Path:
    """Where `kilat tune` writes tables, and where they are looked for first; it need not exist."""
    return config.config_dir() / "tables"


@lru_cache(maxsize=64)
def tables(backend: str, architecture: str) -> tuple[Table, ...]:
    """The tables of a backend on an architecture, the user's first; read once. What is none warns, and is left out."""
    found: list[Table] = []
    for folder in (user_folder(), PACKAGED):
        path = folder / file_name(backend, architecture)
        if not path.exists():
            continue
        try:
            found.append(read(path, backend, architecture))
        except TableError as error:
            warnings.warn(f"{error}. It is not used", TuningTableWarning, stacklevel=2)
    return tuple(found)


def forget() -> None:
    """Read the tables again at their next use."""
    tables.cache_clear()


@contextmanager
def forced(backend: str, kernel: str, values: Values) -> Generator[None]:
    """Plans that are made inside use these values, whatever tables and rules say."""
    token = _forced.set({**(_forced.get() or {}), (backend, kernel): values})
    try:
        yield
    finally:
        _forced.reset(token)


def configure(backend: str, architecture: str | None, bucket: Bucket | None, built_in: Config) -> Config:
    """`built_in` (a dataclass or named tuple) with the fields that a table, or `forced`, has for the bucket.

    bucket None is a Problem that tables say nothing about, architecture None a machine without a GPU. Raises ValueError
    for a forced field that the configuration lacks; a table with such a field is of another version, and warns.
    """
    if bucket is None:
        return built_in
    chosen = (_forced.get() or {}).get((backend, bucket.kernel))
    if chosen is not None:
        return replaced(built_in, chosen)
    for table in tables(backend, architecture) if architecture is not None else ():
        row = table.nearest(bucket)
        if row is None:
            continue
        try:
            return replaced(built_in, row.config)
        except ValueError as error:
            text = f"the tuning table for {backend} on {architecture} is of another version of kilat: {error}"
            warnings.warn(f"{text}. The row {row.bucket.name} is not used", TuningTableWarning, stacklevel=2)
    return built_in


def fields(made: Any) -> dict[str, Any]:
    """Names and values of a configuration."""
    if dataclasses.is_dataclass(made):
        return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    return dict(made._asdict())


def replaced(made: Config, values: Values) -> Config:
    """The configuration with some of its fields replaced, each by a value of its own type."""
    known = fields(made)
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"a configuration's fields must be of {', '.join(known)}; got {name}={value}")
        if type(value) is not type(known[name]):
            kind = type(known[name]).__name__
            raise ValueError(f"{name} must be of type {kind}; got {value!r}")
    if dataclasses.is_dataclass(made) and not isinstance(made, type):
        return dataclasses.replace(made, **values)
    return made._replace(**values)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
