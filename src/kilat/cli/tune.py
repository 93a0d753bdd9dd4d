"""`kilat tune`: time the configurations of GPU kernels on this machine and write what won into a table."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kilat.cli.output import JsonFlag, print_json, seconds, show, table

if TYPE_CHECKING:
    from kilat.bench.tuning import Before, Family
    from kilat.tune.space import Measured, Tunable
    from kilat.tune.table import Row, Table

MASKS = ("full", "causal", "window")


@dataclass
class Plan:
    """One run of the command: what to measure, and what came out so far."""

    backend: str
    kernels: tuple[str, ...]  # empty: all
    families: list[Family]
    device: Any
    deadline: float | None
    quiet: bool
    begin: float = field(default_factory=time.monotonic)
    measured: list[Measured] = field(default_factory=list["Measured"])
    left_out: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() - self.begin > self.deadline


def _parse_dims(text: str) -> tuple[int, int]:
    """Turn `128` or `192/128` into (head_dim, head_dim_v)."""
    first, slash, second = text.partition("/")
    if not first.isdecimal() or (slash and not second.isdecimal()) or int(first) < 1:
        raise ValueError(f"dims must be D or D/DV, such as 128 or 192/128; got {text}")
    return int(first), int(second) if slash else int(first)


def _families(dims: list[str], dtypes: list[str], masks: list[str], seqlens: list[int]) -> list[Family]:
    from kilat.bench.tuning import families

    for mask in masks:
        if mask not in MASKS:
            raise ValueError(f"mask must be one of {', '.join(MASKS)}; got {mask}")
    for dtype in dtypes:
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype must be bfloat16, float16 or float32; got {dtype}")
    return families([_parse_dims(text) for text in dims], dtypes, masks, seqlens)


def _tune(plan: Plan, tunable: Tunable, before: dict[Family, Before]) -> None:
    """Measure one kernel on every family; what it chooses holds for the kernels after it."""
    from kilat.bench.tuning import Effort, measure, subject
    from kilat.tune.space import choose

    for family in plan.families:
        name = f"{tunable.kernel}, {family.cell(tunable.direction).name}"
        if plan.late:
            plan.left_out[name] = f"the deadline of {plan.deadline:g} s had passed"
            continue
        one = subject(plan.backend, tunable, family, before.get(family))
        if isinstance(one, str):
            plan.left_out[name] = one
            continue
        if len(tunable.candidates(one.problem, one.operands)) < 2:
            continue  # nothing to choose from
        found = measure(one, plan.device, Effort())
        plan.measured.append(found)
        rows = choose([found])
        if rows:
            before.setdefault(family, {})[tunable.kernel] = rows[0].config
        if not plan.quiet:
            _show_trials(found)


def _text(config: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _show_trials(found: Measured) -> None:
    made = table(found.bucket.name, "configuration", "time", "error / allowed", "why not", left=1)
    for trial in sorted(found.trials, key=lambda trial: trial.seconds or float("inf")):
        error = "-" if trial.error is None else f"{trial.error:.2f}"
        made.add_row(_text(trial.config), seconds(trial.seconds), error, trial.reason)
    show(made)


def _show_rows(title: str, rows: list[Row]) -> None:
    made = table(title, "bucket", "configuration", "built-in", "time", "built-in's", "faster", "tried", left=3)
    for row in rows:
        same = "the same" if row.config == row.built_in else _text(row.built_in)
        was = row.built_in_seconds or None
        gain = "-" if was is None else f"{was / row.seconds - 1:+.1%}"
        tried = f"{row.tried} of {row.tried + row.refused}"
        made.add_row(row.bucket.name, _text(row.config), same, seconds(row.seconds), seconds(was), gain, tried)
    show(made)


def _made(plan: Plan, architecture: str) -> Table:
    """The table of this run alone."""
    from kilat.bench.machine import gpu, gpu_versions, provenance
    from kilat.tune.space import choose
    from kilat.tune.table import Table

    run: dict[str, Any] = {**provenance(), "versions": gpu_versions(), "device": gpu()}
    return Table(plan.backend, architecture, choose(plan.measured), [run])


def _save(made: Table, folder: Path) -> Path:
    """Write the table over, or into, the one in the folder; raises TableError if that is none, and keeps it."""
    from kilat.tune.lookup import forget
    from kilat.tune.table import file_name, read, write

    path = folder / file_name(made.backend, made.architecture)
    whole = read(path, made.backend, made.architecture).merged(made) if path.exists() else made
    write(path, whole)
    forget()
    return path


def _show_tables(as_json: bool) -> None:
    """What `kilat` reads on this machine: every table, in order of precedence."""
    from kilat.bench.tuning import BACKENDS
    from kilat.tune.lookup import PACKAGED, user_folder
    from kilat.tune.table import TableError, read

    found: list[dict[str, Any]] = []
    for origin, folder in (("user", user_folder()), ("packaged", PACKAGED)):
        for path in sorted(folder.glob("*.json")):
            backend, _, architecture = path.stem.partition("_")
            try:
                rows: Any = read(path, backend, architecture).rows if backend in BACKENDS else []
                problem = "" if backend in BACKENDS else f"no backend of that name has tables; got {backend!r}"
            except TableError as error:
                rows, problem = [], str(error)
            found.append({"origin": origin, "file": str(path), "rows": len(rows), "problem": problem})
            if not as_json and rows:
                _show_rows(f"{origin}: {path}", rows)
    if as_json:
        print_json({"folder": str(user_folder()), "tables": found})
        return
    for one in found:
        if one["problem"]:
            show(f"not used: {one['problem']}")
    if not found:
        show("no tuning table: built-in rules stand")
    show(f"folder: {user_folder()} (KILAT_CONFIG_DIR changes it)")


def _architecture() -> str:
    """That of the current GPU; raises ValueError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("kilat tune times kernels on a GPU; torch sees none here")
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{found.major}{found.minor}"


def tune(
    backend: Annotated[list[str] | None, typer.Option("--backend", help="gluon or triton; default: both.")] = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="Only this kernel; may be repeated. Default: all.")
    ] = None,
    dims: Annotated[
        list[str] | None, typer.Option("--dims", help="D or D/DV; default 64, 128, 256 and 192/128.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="Default bfloat16, which serves float16.")] = None,
    mask: Annotated[
        list[str] | None, typer.Option("--mask", help="full, causal or window; default full and causal.")
    ] = None,
    seqlen: Annotated[
        list[int] | None, typer.Option("--seqlen", min=1, help="Keys of a sequence; default 512, 2048 and 16384.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where tables are written; default: the user's own folder.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", min=0, help="Begin no shape after so many seconds.")
    ] = None,
    *,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes that compile; default: one a core but two.")
    ] = None,
    show_only: Annotated[bool, typer.Option("--show", help="Measure nothing: show the tables in use.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Time the configurations of GPU kernels and write a table of the fastest, which calls then use.

    Each is checked against float64 before it is timed. A table that is there keeps its rows of other shapes, so a run
    may be split by options. Exits with 1 if the deadline left shapes out.
    """
    if show_only:
        _show_tables(as_json)
        return
    chosen = _families(
        dims or ["64", "128", "256", "192/128"],
        dtype or ["bfloat16"],
        mask or ["full", "causal"],
        seqlen or [512, 2048, 16384],
    )
    architecture = _architecture()
    plans = _plans(backend or [], kernel or [], chosen, deadline, quiet=as_json)
    processes = jobs or max(1, (os.cpu_count() or 1) - 2)
    documents = [_run(plan, architecture, folder, processes) for plan in plans]
    if as_json:
        print_json({"tables": documents})
    if any("deadline" in reason for plan in plans for reason in plan.left_out.values()):
        raise typer.Exit(1)


def _plans(
    backends: list[str], kernels: list[str], families: list[Family], deadline: float | None, *, quiet: bool
) -> list[Plan]:
    """One a backend; raises ValueError for a backend or a kernel that there is not."""
    from kilat.bench.gpu_timing import Cuda
    from kilat.bench.tuning import BACKENDS, tunables

    backends = backends or list(BACKENDS)
    known = dict.fromkeys(tunable.kernel for name in backends for tunable in tunables(name))
    for name in kernels:
        if name not in known:
            raise ValueError(f"kernel must be one of {', '.join(known)}; got {name}")
    device = Cuda()
    return [Plan(name, tuple(kernels), families, device, deadline, quiet) for name in backends]


def _run(plan: Plan, architecture: str, folder: Path | None, processes: int) -> dict[str, Any]:
    """Compile, measure, write and show the table of one backend."""
    from kilat.bench.tuning import compile_all, jobs_of, tunables
    from kilat.tune.lookup import user_folder

    if processes > 1:
        compile_all(jobs_of(plan.backend, plan.kernels, plan.families), processes)
    before: dict[Family, Before] = {}
    try:
        for tunable in tunables(plan.backend):
            if not plan.kernels or tunable.kernel in plan.kernels:
                _tune(plan, tunable, before)
    finally:  # a lost device must not cost what was measured before
        made = _made(plan, architecture)
        path = _save(made, folder or user_folder()) if made.rows else None
        if not plan.quiet:
            _report(plan, made, path)
    rows = [asdict(row) for row in made.rows]
    return {"backend": plan.backend, "file": str(path or ""), "left_out": plan.left_out, "rows": rows}


def _report(plan: Plan, made: Table, path: Path | None) -> None:
    if path is None:
        show(f"{plan.backend}: nothing was measured, so no table is written")
    else:
        _show_rows(f"{plan.backend}: the fastest", made.rows)
        show(f"written: {path}")
    for name, reason in plan.left_out.items():
        show(f"left out: {name}: {reason}")
