"""`kilat tune` without a GPU: the knobs of the backends, the check and the clock of candidates, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from helpers import build

from kilat import reference
from kilat.backends import registry
from kilat.backends.gluon import heuristics, tuning
from kilat.bench import gpu_timing, machine
from kilat.bench import tuning as bench_tuning
from kilat.bench.cells import Cell
from kilat.cli import main
from kilat.problem import Grads, Problem
from kilat.tune import lookup, table
from kilat.tune.lookup import configure, fields, forced
from kilat.tune.space import Tunable
from kilat.tune.table import Bucket

DIMS = [(1, 1), (63, 64), (64, 64), (72, 72), (96, 40), (128, 128), (64, 128), (192, 128), (129, 31), (256, 256)]
MASKS = ("none", "causal", "causal_top_left", "window", "window_left", "causal_window")


@pytest.fixture(autouse=True)
def _own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No table of this machine reaches a test."""
    monkeypatch.setenv("KILAT_CONFIG_DIR", str(tmp_path / "config"))
    lookup.forget()
    yield
    lookup.forget()


def problem_of(layout: str = "dense", **changes: Any) -> tuple[Problem, Any]:
    given = {"seqlen": (129, 129), "dtype": "bfloat16", "heads": (2, 1)} | changes
    if layout == "ragged":
        given |= {"batch": 3, "lengths_q": (1, 63, 129), "lengths_kv": (1, 63, 129)}
    return build(Case("tuned", layout, **given)).core()


# ---- gluon -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_built_in_configurations_of_gluon_are_legal(dims: tuple[int, int]) -> None:
    """So that a table's can be held to the same rule, and one that is not falls back to a legal one."""
    for mask in MASKS:
        problem, operands = problem_of(head_dim=dims[0], head_dim_v=dims[1], mask=mask)
        built_in = heuristics.forward_config(problem)
        assert tuning.forward_is_legal(problem, built_in)
        assert tuning.forward_config(problem) == built_in
        for tunable in tuning.TUNABLES:
            first, *others = tunable.candidates(problem, operands)
            made = tunable.built_in(problem, operands)
            assert first.items() <= fields(made).items()
            assert first not in others
            assert all(tunable.legal(problem, lookup.replaced(made, values)) for values in others)


def test_what_does_not_fit_is_no_candidate() -> None:
    problem, operands = problem_of(head_dim=256, head_dim_v=256)
    forward = tuning.TUNABLES[0].candidates(problem, operands)
    assert all(values["consumers"] == 2 and values["block_kv"] == 64 for values in forward)
    assert {values["staging"] for values in forward} == {0, 2, 3}
    problem, operands = problem_of(head_dim=96)  # 64 + 32 columns: the second box of O has no room in that of Q
    assert {values["staging"] for values in tuning.TUNABLES[0].candidates(problem, operands)} == {0, 1}
    problem, operands = problem_of(head_dim=64, head_dim_v=64)
    wide = [values for values in tuning.TUNABLES[0].candidates(problem, operands) if values["consumers"] == 3]
    assert {values["block_kv"] for values in wide} == {64, 128}


@pytest.mark.parametrize(("v", "out_dtype", "staging"), [(128, None, 1), (128, "float32", 0), (124, None, 0)])
def test_a_tables_staging_is_used_where_the_output_can_leave_so(v: int, out_dtype: str | None, staging: int) -> None:
    problem, _ = problem_of(head_dim=128, head_dim_v=v, out_dtype=out_dtype)
    with forced("gluon", "forward", {"staging": 1}):
        assert tuning.forward_config(problem).staging == staging


def test_buckets_of_gluon() -> None:
    kinds = {mask: tuning.bucket(problem_of(mask=mask)[0], "forward") for mask in MASKS}
    found = {mask: b.mask for mask, b in kinds.items() if b is not None}
    assert list(found.values()) == ["full", "causal", "causal", "window", "window", "window"]
    assert tuning.bucket(problem_of(mask="dense")[0], "forward") is None
    problem, _ = problem_of(head_dim=81, head_dim_v=96)
    assert tuning.bucket(problem, "forward") == Bucket("forward", "bfloat16", (96, 96), "full", 129)
    ragged, _ = problem_of("ragged")
    assert tuning.seqlen(ragged) == (1 + 63 + 129) // 3
    assert tuning.seqlen(replace(ragged, batch_invariant=True)) == tuning.LONGEST


def test_the_schedule_of_gluon() -> None:
    full, _ = problem_of(seqlen=(129, 4096), head_dim=128)
    causal, _ = problem_of(mask="causal")
    megabytes = heuristics.L2_BUDGET >> 20
    assert tuning.schedule(full) == tuning.schedule(causal) == tuning.Schedule(megabytes, persistent=True)
    assert tuning.schedule(problem_of("ragged", mask="causal")[0]) == tuning.Schedule(megabytes, persistent=False)
    assert heuristics.heads_together(full, 8 << 20) == 2 * (8 << 20) // (4096 * 512)


# ---- triton ----------------------------------------------------------------------------------------------------------
def test_triton_uses_a_row_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_tuning = pytest.importorskip("kilat.backends.triton.tuning", exc_type=ImportError)
    monkeypatch.setattr(triton_tuning, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(triton_tuning.config, "triton_interprets", lambda: False)
    problem, operands = problem_of(head_dim=64, mask="causal")
    args = triton_tuning.adapt(problem, operands)

    def chosen(**changes: Any) -> Any:
        one = replace(problem, memo={}, **changes)
        return triton_tuning.chosen("queries", one, args, operands.q, (9, 0))

    built_in = chosen()
    bucket = Bucket("queries", "bfloat16", (64, 64), "causal", 4096)
    values = {"block_q": 64, "block_kv": 32, "num_warps": 4, "num_stages": 3}
    made = table.Row(bucket, values, 1.0, fields(built_in), 2.0, 2, 0)
    path = lookup.user_folder() / table.file_name("triton", "sm_90")
    table.write(path, table.Table("triton", "sm_90", [made], [{}]))
    assert chosen() == built_in  # read once
    lookup.forget()
    assert fields(chosen()) == values != fields(built_in)
    assert chosen(dropout="philox") == built_in
    assert chosen(layout="cached") == built_in
    assert chosen(mask=None) == built_in


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_candidates_of_triton(dtype: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    triton_tuning = pytest.importorskip("kilat.backends.triton.tuning", exc_type=ImportError)
    monkeypatch.setattr(triton_tuning, "_capability", lambda: (9, 0))
    problem, operands = problem_of(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    for tunable in triton_tuning.TUNABLES:
        first, *others = tunable.candidates(problem, operands)
        assert first == fields(tunable.built_in(problem, operands))
        assert first not in others
        assert len(others) > 2 or max(dims) > 128 or dtype == "float32"
        assert len(others) < 40
    masks = {mask: triton_tuning.bucket("keys", problem_of(mask=mask)[0]) for mask in ("none", "prefix", "dense")}
    assert masks["dense"] is None
    assert (masks["none"].mask, masks["prefix"].mask) == ("full", "window")


# ---- checking and timing ---------------------------------------------------------------------------------------------
EFFORT = bench_tuning.Effort(reps=2, seconds=0.0)


@dataclass(frozen=True)
class Knob:
    speed: int = 2


@dataclass
class FakeGpu:
    """A clock that calls move on."""

    now: float = 0.0

    def event(self) -> Any:
        at = self.now

        class Moment:
            def __init__(self) -> None:
                self.at = at

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) * 1e3

        return Moment()

    def flush(self) -> None:
        self.now += 1e-4

    def synchronize(self) -> None:
        pass

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def sensors(self) -> None:
        return None


class Fake:
    """A backend whose call takes 1 / speed ms; speed 3 is wrong, 4 is refused, 1 far too slow."""

    name = "fake"

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def unsupported(self, problem: Any) -> list[str]:
        return ["no heads of 17"] if problem.head_dim == 17 else []

    def _work(self, problem: Problem, kernel: str) -> float:
        speed = problem.memo.get(kernel)
        if speed is None:
            speed = problem.memo[kernel] = configure("fake", "sm_90", bucket_of(kernel, problem), Knob()).speed
        if speed == 4:
            raise RuntimeError("out of registers")
        self.gpu.now += 1e-3 / speed
        return 1.01 if speed == 3 else 1.0

    def forward(self, problem: Any, operands: Any) -> Any:
        factor = self._work(problem, "forward")
        out, lse = reference.forward(problem, operands)
        return out * factor, lse

    def backward(self, problem: Any, *more: Any) -> Grads:
        factor = self._work(problem, "backward")
        found = reference.backward(problem, *more)
        assert found.k is not None
        return Grads(found.q, found.k * factor, found.v)


def bucket_of(kernel: str, problem: Problem) -> Bucket:
    mask = "full" if problem.mask is None else "causal"
    return Bucket(kernel, problem.dtype, (problem.head_dim, problem.head_dim_v), mask, problem.seqlen_kv)


def tunables() -> tuple[Tunable, ...]:
    def of(kernel: Any) -> Tunable:
        return Tunable(
            kernel,
            kernel,
            lambda problem: bucket_of(kernel, problem),
            lambda problem, operands: Knob(),
            lambda problem: {"speed": (1, 2, 3, 4, 5, 6), "absent": (7,)},
            lambda problem, config: config.speed != 5,
        )

    return of("forward"), of("backward")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The fake backend in the place of the others, on small cells of CPU tensors."""
    made = FakeGpu()
    monkeypatch.setitem(registry._found, "fake", Fake(made))
    monkeypatch.setattr(bench_tuning, "BACKENDS", ("fake",))
    monkeypatch.setattr(bench_tuning, "tunables", lambda name: tunables())

    def cell(self: Any, direction: Any) -> Cell:
        return Cell(direction, 1, 2, 2, self.seqlen, self.seqlen, self.dims[0], self.dtype, self.mask != "full")

    monkeypatch.setattr(bench_tuning.Family, "cell", cell)
    monkeypatch.setattr(bench_tuning, "Effort", lambda: EFFORT)
    monkeypatch.setattr(gpu_timing, "Cuda", lambda: made)
    monkeypatch.setattr("kilat.cli.tune._architecture", lambda: "sm_90")
    monkeypatch.setattr(machine, "gpu", lambda: {"kind": "gpu", "model": "fake"})
    return made


@pytest.mark.parametrize("number", [0, 1])
def test_candidates_are_checked_before_they_are_timed(gpu: FakeGpu, number: int) -> None:
    tunable = tunables()[number]
    one = bench_tuning.subject("fake", tunable, bench_tuning.Family((16, 16), "float32", "causal", 33))
    assert not isinstance(one, str), one
    found = bench_tuning.measure(one, gpu, EFFORT)
    assert found.bucket == Bucket(tunable.kernel, "float32", (16, 16), "causal", 33)
    trials = {trial.config["speed"]: trial for trial in found.trials}
    assert list(trials) == [2, 1, 3, 4, 6]
    assert trials[6].seconds == pytest.approx(1e-3 / 6)
    assert trials[2].seconds == pytest.approx(1e-3 / 2)  # built in: timed although it is slow
    assert trials[1].seconds is None
    assert trials[1].reason == "6.00 times the best in the first look"
    assert trials[3].reason.startswith(f"wrong: {'dk' if number else 'out'} off by ")
    assert trials[4].reason == "RuntimeError: out of registers"
    assert trials[3].seconds is trials[4].seconds is None
    assert trials[6].error is not None
    assert trials[6].error < 1 < (trials[3].error or 0)
    assert (
        bench_tuning.subject("fake", tunable, bench_tuning.Family((17, 17), "float32", "full", 9)) == "no heads of 17"
    )


@pytest.mark.usefixtures("gpu")
def test_kernels_are_compiled_once_for_all_lengths() -> None:
    shapes = bench_tuning.families([(16, 16), (17, 17)], ["float32"], ["full", "causal"], [9, 33])
    jobs = bench_tuning.jobs_of("fake", (), shapes)
    assert len(jobs) == 2 * 2 * 5  # kernels, masks, candidates; heads of 17 are refused
    assert len(set(jobs)) == len(jobs)
    assert len(bench_tuning.jobs_of("fake", ("forward",), shapes)) == 2 * 5
    said = {dict(job.values)["speed"]: bench_tuning.compile_one(job) for job in jobs}
    assert said == {1: "", 2: "", 3: "", 6: "", 4: "RuntimeError: out of registers"}


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *words])
    return int(ended.value.code or 0)


SMALL = ("--jobs", "1", "--dims", "16", "--dtype", "float32", "--mask", "causal")


@pytest.mark.usefixtures("gpu")
def test_the_command_writes_a_table_that_calls_then_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--seqlen", "33", "--seqlen", "129") == 0
    path = lookup.user_folder() / "fake_sm_90.json"
    made = table.read(path, "fake", "sm_90")
    assert [(r.bucket.kernel, r.bucket.seqlen, r.config) for r in made.rows] == [
        (kernel, n, {"speed": 6}) for kernel in ("backward", "forward") for n in (33, 129)
    ]
    (one,) = made.runs
    assert {"command", "date", "versions", "device", "git"} <= set(one)
    assert configure("fake", "sm_90", replace(made.rows[0].bucket, seqlen=70), Knob()) == Knob(6)
    assert "wrong: out off by" in capsys.readouterr().out
    assert run(*SMALL, "--seqlen", "513", "--kernel", "forward", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["tables"][0]["rows"]) == 1
    assert len(table.read(path, "fake", "sm_90").rows) == 5
    assert run("--show") == 0
    assert "speed=6" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
def test_a_deadline_leaves_shapes_out_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--seqlen", "9", "--deadline", "0", "--folder", str(tmp_path)) == 1
    assert "left out: backward, backward float32 causal N=9" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.json"))


def test_a_lost_gpu_does_not_cost_what_was_measured(gpu: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    left = iter([None] * 15)

    def lost() -> None:
        if next(left, "over") == "over":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu.synchronize = lost  # type: ignore[method-assign]
    assert run(*SMALL, "--seqlen", "9", "--seqlen", "33") == 2
    assert "illegal memory access" in capsys.readouterr().err
    rows = table.read(lookup.user_folder() / "fake_sm_90.json", "fake", "sm_90").rows
    assert 0 < len(rows) < 4


@pytest.mark.usefixtures("gpu")
def test_a_file_that_is_no_table_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fake_sm_90.json"
    path.write_text("{")
    assert run(*SMALL, "--seqlen", "9", "--folder", str(tmp_path)) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert path.read_text() == "{"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "kilat tune times kernels on a GPU; torch sees none here"),
        (("--dims", "x"), "dims must be D or D/DV, such as 128 or 192/128; got x"),
        (("--mask", "odd"), "mask must be one of full, causal, window; got odd"),
        (("--dtype", "float64"), "dtype must be bfloat16, float16 or float32; got float64"),
    ],
)
def test_what_cannot_be_tuned_is_said(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_kernels_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--kernel", "sideways") == 2
    assert "kernel must be one of forward, backward; got sideways" in capsys.readouterr().err
    assert run("--show", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tables"] == []


def test_packaged_tables_can_be_used() -> None:
    """Each is readable, and its rows hold fields that the configurations of today have."""
    for path in sorted(lookup.PACKAGED.glob("*.json")):
        backend, _, architecture = path.stem.partition("_")
        made = table.read(path, backend, architecture)
        problem, operands = problem_of()
        built_in = {t.kernel: t.built_in(problem, operands) for t in bench_tuning.tunables(backend)}
        for row in made.rows:
            lookup.replaced(built_in[row.bucket.kernel], row.config)
