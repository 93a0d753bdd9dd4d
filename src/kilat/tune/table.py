"""The file of a tuning table: buckets of Problems, the configuration that won each, and where it was measured."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Raised when a file means something else than before; files of another schema are not used."""

Values = dict[str, int]
"""A configuration as the fields that were tuned: integers and booleans."""

KINDS = {"full": ("full",), "causal": ("causal",), "window": ("window", "causal")}
"""Kinds of mask, and whose rows serve a kind: a window's tiles are as unequal as causal ones."""


class TableError(ValueError):
    """A file that is no tuning table for this backend and architecture."""


@dataclass(frozen=True)
class Bucket:
    """Problems that share a row: `dims` are the widths that kernels work in for head_dim and head_dim_v."""

    kernel: str
    dtype: str
    dims: tuple[int, int]
    mask: str
    seqlen: int  # keys of a sequence

    @property
    def name(self) -> str:
        """How tables print it."""
        dims = str(self.dims[0]) if self.dims[0] == self.dims[1] else "{}/{}".format(*self.dims)
        return f"{self.kernel} {self.dtype} D={dims} {self.mask} N={self.seqlen}"


@dataclass(frozen=True)
class Row:
    """The configuration of a bucket, with what it and the built-in one took, in seconds."""

    bucket: Bucket
    config: Values
    seconds: float
    built_in: Values
    built_in_seconds: float
    tried: int
    refused: int
    run: int = 0  # index into `Table.runs`


@dataclass
class Table:
    """Rows and the runs (command, date, versions, device, git) that measured them."""

    backend: str
    architecture: str
    rows: list[Row] = field(default_factory=list[Row])
    runs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def nearest(self, bucket: Bucket) -> Row | None:
        """The row that serves a bucket, or None: the backend's built-in rule then stands.

        Kernel and dims must be the same, the dtype of the same size (the same one first), the mask of a kind that
        serves (see `KINDS`, in that order); of those rows the one with the nearest logarithm of seqlen, the longer of
        two.
        """
        rows = [row for row in self.rows if (row.bucket.kernel, row.bucket.dims) == (bucket.kernel, bucket.dims)]
        for mask in KINDS[bucket.mask]:
            for dtype in _dtypes(bucket.dtype):
                found = [row for row in rows if (row.bucket.mask, row.bucket.dtype) == (mask, dtype)]
                if found:
                    return min(found, key=lambda row: _distance(row.bucket.seqlen, bucket.seqlen))
        return None

    def merged(self, newer: Table) -> Table:
        """This table with the rows of a newer one, which replace those of the same bucket; unused runs are dropped."""
        if (newer.backend, newer.architecture) != (self.backend, self.architecture):
            here, there = f"{self.backend} {self.architecture}", f"{newer.backend} {newer.architecture}"
            raise TableError(f"tables must be of one backend and architecture to be merged; got {here} and {there}")
        runs = [*self.runs, *newer.runs]
        rows = {row.bucket: row for row in self.rows}
        rows |= {row.bucket: replace(row, run=row.run + len(self.runs)) for row in newer.rows}
        used = sorted({row.run for row in rows.values()})
        kept = [replace(row, run=used.index(row.run)) for row in rows.values()]
        return Table(self.backend, self.architecture, sorted(kept, key=_order), [runs[n] for n in used])


def _order(row: Row) -> tuple[Any, ...]:
    b = row.bucket
    return b.kernel, b.dims, b.dtype, b.mask, b.seqlen


def _dtypes(dtype: str) -> tuple[str, ...]:
    """Itself, then the other of its size."""
    halves = ("bfloat16", "float16")
    return (dtype, *(name for name in halves if name != dtype)) if dtype in halves else (dtype,)


def _distance(seqlen: int, wanted: int) -> tuple[float, int]:
    return abs(math.log2(max(seqlen, 1) / max(wanted, 1))), -seqlen


def file_name(backend: str, architecture: str) -> str:
    """What a table's file is called in any folder of tables."""
    return f"{backend}_{architecture}.json"


def read(path: Path, backend: str, architecture: str) -> Table:
    """The table in a file; raises TableError, with the remedy, for anything that is not one for this backend here."""
    remedy = "run `kilat tune` again, or delete the file"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"tuning table {path} cannot be read: {error}; {remedy}") from error
    wanted = {"schema": SCHEMA, "backend": backend, "architecture": architecture}
    for name, value in wanted.items():
        found: Any = document.get(name) if isinstance(document, dict) else None
        if found != value:
            raise TableError(f"tuning table {path} must have {name}={value!r}; got {found!r}; {remedy}")
    try:
        return Table(backend, architecture, [_row(x) for x in document["rows"]], list(document["runs"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TableError(f"tuning table {path} is damaged: {type(error).__name__}: {error}; {remedy}") from error


def _row(values: dict[str, Any]) -> Row:
    given = dict(values)
    bucket = dict(given.pop("bucket"))
    width, width_v = bucket["dims"]
    bucket["dims"] = (int(width), int(width_v))
    row = Row(bucket=Bucket(**bucket), **given)
    if row.bucket.mask not in KINDS:
        raise ValueError(f"mask must be one of {', '.join(KINDS)}; got {row.bucket.mask!r}")
    for name, value in {**row.built_in, **row.config, "seqlen": row.bucket.seqlen}.items():
        if not isinstance(value, int):
            raise ValueError(f"{name} must be an integer; got {value!r}")
    return row


def write(path: Path, table: Table) -> None:
    """Write a table, whole or not at all: a reader and a killed process never see half of it."""
    head = {"schema": SCHEMA, "backend": table.backend, "architecture": table.architecture, "runs": table.runs}
    text = json.dumps(head, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(asdict(row)) for row in sorted(table.rows, key=_order))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f'{text},\n "rows": [\n{rows}\n ]\n}}\n')
            file.flush()
            os.fsync(file.fileno())
        Path(part).chmod(0o644)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
