"""Tuning tables: what is read, what is refused, which row serves a Problem, and what a measurement chooses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.tune import lookup, table
from kilat.tune.lookup import TuningTableWarning, configure, forced
from kilat.tune.space import WORTH, Measured, Trial, choose
from kilat.tune.table import Bucket, Row, Table, TableError

BUCKET = Bucket("forward", "bfloat16", (128, 128), "causal", 2048)


def row(bucket: Bucket = BUCKET, **config: int) -> Row:
    return Row(bucket, config or {"block_q": 32}, 1.0, {"block_q": 64}, 2.0, tried=3, refused=1)


def full_table(*rows: Row, backend: str = "triton") -> Table:
    return Table(backend, "sm_90", list(rows) or [row()], [{"command": "kilat tune", "device": {"model": "none"}}])


class Tiles(NamedTuple):
    block_q: int = 64
    block_kv: int = 128


@dataclass(frozen=True)
class Switches:
    block_q: int = 64
    turns: bool = False


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The folders of the user's and the packaged tables, empty; what was read before is forgotten."""
    user, packaged = tmp_path / "user" / "tables", tmp_path / "packaged"
    monkeypatch.setenv("KILAT_CONFIG_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(lookup, "PACKAGED", packaged)
    lookup.forget()
    yield user, packaged
    lookup.forget()


# ---- files -----------------------------------------------------------------------------------------------------------
def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / table.file_name("triton", "sm_90")
    assert path.name == "triton_sm_90.json"
    made = full_table(row(), row(replace(BUCKET, dims=(192, 128)), turns=True))
    table.write(path, made)
    assert table.read(path, "triton", "sm_90") == made
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_half_a_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped while it writes leaves the old table, and nothing else."""
    path = tmp_path / "t.json"
    table.write(path, full_table())

    def stop(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(table.os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        table.write(path, full_table(row(block_q=1)))
    assert table.read(path, "triton", "sm_90") == full_table()
    assert list(tmp_path.iterdir()) == [path]


def text_of(**changes: Any) -> str:
    document = {"schema": 1, "backend": "triton", "architecture": "sm_90", "runs": [], "rows": []}
    return json.dumps(document | changes)


WHOLE = {
    "bucket": {"kernel": "forward", "dtype": "bfloat16", "dims": [64, 64], "mask": "full", "seqlen": 1},
    "config": {"block_q": 1},
    "seconds": 1.0,
    "built_in": {},
    "built_in_seconds": 1.0,
    "tried": 1,
    "refused": 0,
    "run": 0,
}
BROKEN = {
    "half": (text_of()[:40], "cannot be read: "),
    "empty": ("", "cannot be read: "),
    "no object": ("[1]", "must have schema=1; got None"),
    "older": (text_of(schema=0), "must have schema=1; got 0"),
    "other backend": (text_of(backend="gluon"), "must have backend='triton'; got 'gluon'"),
    "other gpu": (text_of(architecture="sm_80"), "must have architecture='sm_90'; got 'sm_80'"),
    "no rows": (text_of(rows=None), "is damaged: TypeError: "),
    "row without bucket": (text_of(rows=[{**WHOLE, "bucket": None}]), "is damaged: TypeError: "),
    "row with more": (text_of(rows=[{**WHOLE, "speed": 1}]), "is damaged: TypeError: "),
    "text for a number": (text_of(rows=[{**WHOLE, "config": {"block_q": "8"}}]), "block_q must be an integer; got '8'"),
    "unknown mask": (text_of(rows=[{**WHOLE, "bucket": {**WHOLE["bucket"], "mask": "odd"}}]), "mask must be one of"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_table_is_said_and_not_used(kind: str, folders: tuple[Path, Path]) -> None:
    user, packaged = folders
    text, message = BROKEN[kind]
    table.write(packaged / "triton_sm_90.json", full_table())
    user.mkdir(parents=True)
    (user / "triton_sm_90.json").write_text(text)
    with pytest.raises(TableError, match="delete the file") as raised:
        table.read(user / "triton_sm_90.json", "triton", "sm_90")
    assert message in str(raised.value)
    with pytest.warns(TuningTableWarning, match="It is not used"):
        assert configure("triton", "sm_90", BUCKET, Tiles()) == Tiles(32, 128)
    assert configure("triton", "sm_90", BUCKET, Tiles()) == Tiles(32, 128)  # and it warns once


def test_a_whole_row_is_read(tmp_path: Path) -> None:
    """So that each broken one above fails for its own reason."""
    (tmp_path / "t.json").write_text(text_of(rows=[WHOLE]))
    assert len(table.read(tmp_path / "t.json", "triton", "sm_90").rows) == 1


def test_newer_rows_replace_older_ones_and_keep_their_runs() -> None:
    other = replace(BUCKET, seqlen=512)
    old = full_table(row(), row(other))
    new = Table("triton", "sm_90", [row(block_q=8)], [{"command": "later"}])
    merged = old.merged(new)
    assert {(r.bucket, r.config["block_q"], merged.runs[r.run]["command"]) for r in merged.rows} == {
        (BUCKET, 8, "later"),
        (other, 32, "kilat tune"),
    }
    everything = full_table(row()).merged(new)
    assert everything.runs == [{"command": "later"}]
    with pytest.raises(TableError, match="one backend and architecture"):
        old.merged(full_table(backend="gluon"))


# ---- which row -------------------------------------------------------------------------------------------------------
def test_the_nearest_row_serves() -> None:
    rows = [row(replace(BUCKET, seqlen=n), block_q=n) for n in (512, 2048, 16384)]
    found = full_table(*rows, row(replace(BUCKET, mask="full"), block_q=1))

    def of(**changes: Any) -> int | None:
        served = found.nearest(replace(BUCKET, **changes))
        return None if served is None else served.config["block_q"]

    assert [of(seqlen=n) for n in (0, 1, 1000, 1024, 1100, 2048, 5000, 6000, 1 << 20)] == [
        *(512, 512, 512, 2048, 2048, 2048, 2048, 16384, 16384)
    ]
    assert of(mask="full") == 1
    assert of(mask="window") == 2048
    assert of(dtype="float16") == 2048
    assert of(dtype="float32") is None
    assert of(dims=(64, 64)) is None
    assert of(kernel="keys") is None


def test_rows_of_the_same_dtype_come_first() -> None:
    far = replace(BUCKET, dtype="float16", seqlen=64)
    found = full_table(row(), row(far, block_q=1))
    assert found.nearest(replace(far, seqlen=2048)) == row(far, block_q=1)


def test_the_users_table_comes_first_and_is_read_once(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    user, packaged = folders
    other = replace(BUCKET, dims=(64, 64))
    table.write(packaged / "triton_sm_90.json", full_table(row(block_q=1), row(other, block_q=2)))
    table.write(user / "triton_sm_90.json", full_table(row(block_q=3)))
    read: list[Path] = []
    whole = lookup.read

    def counted(path: Path, *more: str) -> Table:
        read.append(path)
        return whole(path, *more)

    monkeypatch.setattr(lookup, "read", counted)
    for _ in range(3):
        assert configure("triton", "sm_90", BUCKET, Tiles()).block_q == 3
        assert configure("triton", "sm_90", other, Tiles()).block_q == 2
        assert configure("triton", "sm_90", replace(BUCKET, kernel="keys"), Tiles()) == Tiles()
    assert len(read) == 2
    assert configure("triton", "sm_80", BUCKET, Tiles()) == Tiles()
    assert configure("triton", None, BUCKET, Tiles()) == Tiles()
    assert configure("triton", "sm_90", None, Tiles()) == Tiles()


def test_fields_that_a_configuration_lacks_are_another_versions(folders: tuple[Path, Path]) -> None:
    user, _ = folders
    table.write(user / "triton_sm_90.json", full_table(row(block_q=1, depth=2)))
    with pytest.warns(TuningTableWarning, match=r"another version of kilat: .*block_q, block_kv; got depth=2"):
        assert configure("triton", "sm_90", BUCKET, Tiles()) == Tiles()
    table.write(user / "triton_sm_90.json", full_table(row(turns=1)))
    lookup.forget()
    with pytest.warns(TuningTableWarning, match="turns must be of type bool; got 1"):
        assert configure("triton", "sm_90", BUCKET, Switches()) == Switches()


@pytest.mark.parametrize(("made", "values"), [(Tiles(), {"block_kv": 1}), (Switches(), {"turns": True})])
def test_what_is_forced_comes_before_tables(made: Any, values: dict[str, int], folders: tuple[Path, Path]) -> None:
    user, _ = folders
    table.write(user / "triton_sm_90.json", full_table(row(block_q=1)))
    with forced("triton", "forward", values), forced("triton", "keys", {"block_q": 9}):
        found = configure("triton", "sm_90", BUCKET, made)
        assert found.block_q == 64
        assert lookup.fields(found) == lookup.fields(made) | values
        assert configure("triton", None, replace(BUCKET, kernel="keys"), made).block_q == 9
    assert configure("triton", "sm_90", BUCKET, made).block_q == 1
    with forced("triton", "forward", {"depth": 1}), pytest.raises(ValueError, match="got depth=1"):
        configure("triton", "sm_90", BUCKET, made)


# ---- what is chosen --------------------------------------------------------------------------------------------------
def measured(seqlen: int, *times: float | None) -> Measured:
    """Candidates 0, 1, ... of one bucket; 0 is the built-in one, None was refused."""
    trials = [Trial({"block_q": n}, seconds) for n, seconds in enumerate(times)]
    return Measured(replace(BUCKET, seqlen=seqlen), trials)


def chosen(*some: Measured) -> list[int]:
    return [found.config["block_q"] for found in choose(some)]


def test_a_family_gets_one_configuration_unless_more_is_worth_it() -> None:
    assert chosen(measured(512, 1.0, 0.9, 0.95), measured(2048, 1.0, 0.9, 0.95)) == [1, 1]
    assert chosen(measured(512, 1.0, 0.9, 0.9), measured(2048, 1.0, 0.9, 0.89)) == [2, 2]
    assert chosen(measured(512, 1.0, 0.8, 0.95), measured(2048, 1.0, 0.95, 0.9)) == [1, 2]


def test_the_built_in_configuration_stays_unless_another_is_clearly_faster() -> None:
    assert chosen(measured(512, 1.0, 0.995)) == [0]
    assert chosen(measured(512, 1.0, 0.985)) == [1]
    assert chosen(measured(512, 1.0, 0.97)) == [1]
    assert chosen(measured(512, None, 0.97, 0.98)) == [1]
    assert chosen(measured(512, None, None)) == []
    (found,) = choose([measured(512, None, 3.0)], run=2)
    assert (found.built_in_seconds, found.tried, found.refused, found.run) == (0.0, 1, 1, 2)


def test_a_configuration_that_fails_somewhere_is_chosen_elsewhere_only() -> None:
    assert chosen(measured(512, 1.0, 0.5), measured(2048, 1.0, None)) == [1, 0]


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(0.1, 10.0)), min_size=4, max_size=4), min_size=1, max_size=4))
def test_no_choice_loses_more_than_its_margins(times: list[list[float | None]]) -> None:
    some = [measured(n + 1, *one) for n, one in enumerate(times)]
    rows = choose(some)
    assert len(rows) == sum(any(x is not None for x in one) for one in times)
    for found in rows:
        one = next(x for x in some if x.bucket == found.bucket)
        assert math.isfinite(found.seconds)
        assert found.seconds == one.seconds(found.config)
        best = min(x.seconds for x in one.trials if x.seconds is not None)
        assert found.seconds <= best * (1 + WORTH) * (1 + 1e-9)
