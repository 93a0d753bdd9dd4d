"""What `kilat tune` does with a GPU: candidates of a kernel are checked against float64 and timed in turn."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from kilat.backends import registry
from kilat.bench.cells import Cell, Direction
from kilat.bench.contenders import Contender, make_inputs, mask_of
from kilat.bench.gpu_timing import Cost, Device, cost_of, take_turns
from kilat.bench.gpu_warm import aside
from kilat.bench.verify import Part, expect, verify
from kilat.problem import Operands, Options, Problem
from kilat.tune.lookup import forced
from kilat.tune.space import Measured, Trial, Tunable
from kilat.tune.table import Values
from kilat.validate import problem_of

BACKENDS = ("gluon", "triton")
HIDDEN, TOKENS = 2048, 16384
NEAR = 1.25
"""Candidates so many times slower than the best in the first look are not timed again."""

COMPILE_SECONDS = 240.0
"""For all kernels together; those that are not compiled by then are when they are measured."""

Before = dict[str, Values]
"""Values of kernels that were tuned already, by kernel."""


@dataclass(frozen=True)
class Family:
    """Shapes that are measured: head_dim and head_dim_v, dtype, kind of mask, keys of a sequence."""

    dims: tuple[int, int]
    dtype: str
    mask: str
    seqlen: int

    def cell(self, direction: Direction) -> Cell:
        """A cell of 16k tokens (at least one sequence) and 2048 columns."""
        heads = max(1, HIDDEN // self.dims[1])
        batch = max(1, TOKENS // self.seqlen)
        window = max(1, self.seqlen // 8) if self.mask == "window" else None
        sizes = (batch, heads, heads, self.seqlen, self.seqlen, self.dims[0], self.dtype)
        dim_v = None if self.dims[0] == self.dims[1] else self.dims[1]
        return Cell(direction, *sizes, self.mask != "full", dim_v, window=window, device="cuda")


@dataclass(frozen=True)
class Effort:
    """Rounds at least, and seconds a candidate."""

    reps: int = 7
    seconds: float = 0.05


@dataclass
class Subject:
    """One kernel on one cell: inputs, what is right, and the tensors that a backward takes from the forward."""

    backend: str
    tunable: Tunable
    problem: Problem
    operands: Operands
    truth: list[Part]
    given: tuple[Tensor, Tensor, Tensor] | None = None  # out, lse, do
    before: Before | None = None

    def call(self, values: Values) -> Callable[[], Any]:
        """The kernel's call with these values, whatever the tables say; makes the plan, and so compiles."""
        found = registry.get(self.backend)
        if isinstance(found, str):
            raise RuntimeError(found)
        problem = replace(self.problem, memo={})  # plans are kept there
        if self.given is None:
            call: Callable[[], Any] = partial(found.forward, problem, self.operands)
        else:
            out, lse, do = self.given
            call = partial(found.backward, problem, self.operands, out, lse, do, None)
        with ExitStack() as stack:
            for kernel, chosen in {**(self.before or {}), self.tunable.kernel: values}.items():
                stack.enter_context(forced(self.backend, kernel, chosen))
            call()
        return call

    def results(self, returned: Any) -> dict[str, Tensor]:
        """What a call returned, by name."""
        if self.given is None:
            return {"out": returned[0]}
        return {"dq": returned.q, "dk": returned.k, "dv": returned.v}


def tunables(backend: str) -> tuple[Tunable, ...]:
    """The kernels of a backend that have knobs; raises ValueError for a backend without."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend}")
    return importlib.import_module(f"kilat.backends.{backend}.tuning").TUNABLES


def subject(backend: str, tunable: Tunable, family: Family, before: Before | None = None) -> Subject | str:
    """What is measured, or why the backend cannot."""
    return _subject(backend, tunable, family.cell(tunable.direction), before)


def _subject(
    backend: str, tunable: Tunable, cell: Cell, before: Before | None = None, *, checked: bool = True
) -> Subject | str:
    inputs = make_inputs(cell)
    operands = Operands(inputs.q, inputs.k, inputs.v)
    mask = mask_of(cell)
    options = Options("dense", mask=None if mask is None else mask.structure(), backend=backend)
    problem = problem_of(options, operands, frozenset("qkv") if inputs.do is not None else frozenset())
    found = registry.get(backend)
    reasons = [found] if isinstance(found, str) else found.unsupported(problem)
    if isinstance(found, str) or reasons:
        return "; ".join(reasons)
    truth = expect(cell, inputs) if checked else []
    made = Subject(backend, tunable, problem, operands, truth, before=before)
    if inputs.do is not None:
        made.given = (*found.forward(problem, operands), inputs.do)
    return made


def measure(one: Subject, device: Device, effort: Effort, on_trial: Callable[[Trial], None] | None = None) -> Measured:
    """Check and time every candidate; one that is refused, wrong or far from the best has a reason and no time."""
    bucket = one.tunable.bucket(one.problem)
    if bucket is None:
        raise ValueError(f"a cell must have a bucket to be tuned; got {one.problem.short_id()}")
    found = Measured(bucket)
    ready: dict[str, Contender] = {}
    costs: dict[str, Cost] = {}
    for values in one.tunable.candidates(one.problem, one.operands):
        trial = Trial(values)
        found.trials.append(trial)
        contender = _checked(one, trial, device)
        if contender is not None:
            ready[_key(values)], costs[_key(values)] = contender, cost_of(contender, device)
        if on_trial is not None:
            on_trial(trial)
    best = min((cost.gpu for cost in costs.values()), default=0.0)
    near = {name: made for name, made in ready.items() if costs[name].gpu <= NEAR * best or made is _first(ready)}
    if near:
        timings = take_turns(
            near, device, {name: costs[name] for name in near}, reps=effort.reps, seconds=effort.seconds
        )
        for trial in found.trials:
            name = _key(trial.config)
            if name in timings:
                trial.seconds = timings[name].median
            elif name in costs:
                trial.reason = f"{costs[name].gpu / best:.2f} times the best in the first look"
    return found


def _first(ready: dict[str, Contender]) -> Contender:
    """The built-in one, if it is right: what another gains is told beside it."""
    return next(iter(ready.values()))


def _key(values: Values) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _checked(one: Subject, trial: Trial, device: Device) -> Contender | None:
    """The candidate, if it compiles and is right; else the trial says why not. A lost device raises RuntimeError."""
    try:
        call = one.call(trial.config)
        verdicts = verify(one.results(call()), one.truth)
    except Exception as error:  # noqa: BLE001  whatever a compiler raises is why the candidate is out
        device.synchronize()
        trial.reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return None
    shares = [v.error / v.allowed if v.allowed else 0.0 for v in verdicts]
    trial.error = max(shares)
    wrong = [f"{v.result} off by {v.error:.2e}, allowed {v.allowed:.2e}" for v in verdicts if not v.ok]
    if wrong:
        trial.reason = "wrong: " + "; ".join(wrong)
        return None
    return Contender(call, dict)


def families(
    dims: Sequence[tuple[int, int]], dtypes: Sequence[str], masks: Sequence[str], seqlens: Sequence[int]
) -> list[Family]:
    """The product, lengths innermost."""
    return [Family(d, dtype, mask, n) for d in dims for dtype in dtypes for mask in masks for n in seqlens]


@dataclass(frozen=True)
class Job:
    """A kernel to compile: sequence lengths are no part of it."""

    backend: str
    number: int  # in `tunables`
    family: Family
    values: tuple[tuple[str, int], ...]

    def subject(self) -> Subject | str:
        """A small cell of the family, with nothing to check against."""
        tunable = tunables(self.backend)[self.number]
        return _subject(self.backend, tunable, replace(self.family.cell(tunable.direction), batch=1), checked=False)


def jobs_of(backend: str, kernels: Sequence[str], families: Sequence[Family]) -> list[Job]:
    """Every kernel that measuring `kernels` (empty: all) on `families` needs, once."""
    shapes = dict.fromkeys(replace(family, seqlen=256) for family in families)
    found: list[Job] = []
    for number, tunable in enumerate(tunables(backend)):
        for family in shapes if not kernels or tunable.kernel in kernels else ():
            one = Job(backend, number, family, ()).subject()
            if not isinstance(one, str):
                listed = tunable.candidates(one.problem, one.operands)
                found += [Job(backend, number, family, tuple(values.items())) for values in listed if len(listed) > 1]
    return found


def compile_one(job: Job) -> str:
    """Compile a kernel, so that it is found on disk; why it cannot be, or ""."""
    try:
        one = job.subject()
        if isinstance(one, str):
            return one
        one.call(dict(job.values))
    except Exception as error:  # noqa: BLE001  measuring it will meet the same, and say so
        return f"{type(error).__name__}: {error}"
    return ""


def compile_all(jobs: Sequence[Job], processes: int) -> list[str]:
    """Compile in several processes, none of which is this one; what went wrong."""
    return aside(jobs, compile_one, processes, COMPILE_SECONDS)
