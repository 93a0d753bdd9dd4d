"""Which backend does what, asked of the backends: every pair of option values becomes a Problem.

A value of an option is marked `no` if the backend refuses it with the defaults of all other options, `yes` if it takes
it with every value of every other option that is not marked `no` itself, and `partly` with its reasons otherwise. Pairs
that the call itself refuses, on every backend, are listed once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from markdown_table import table

from kilat.backends import registry
from kilat.checks.cases import MASKS, SCORES, Sizes
from kilat.dispatch import reasons_against
from kilat.masks import Window
from kilat.problem import Operands, Options, Problem
from kilat.scores import in_order
from kilat.validate import problem_of

DEVICES = {"gluon": "cuda", "cutile": "cuda", "triton": "cuda", "cpu": "cpu", "reference": "cpu"}
CACHES = ("contiguous cache", "paged cache", "quantised pages", "ring cache")
SEQLEN = 128
RING = Window(31, 0, first=4)
Change = Callable[["Call"], None]


@dataclass
class Call:
    """The arguments of one call, and the tensors' sizes until `problem` makes them."""

    layout: str = "dense"
    dtype: torch.dtype = torch.bfloat16  # what every backend takes
    out_dtype: torch.dtype | None = None
    heads: tuple[int, int] = (8, 8)
    head_dims: tuple[int, int] = (64, 64)
    mask: Callable[[Sizes], Any] | None = None
    scores: tuple[Callable[[Sizes], Any], ...] = ()
    sink: bool = False
    dropout: str = ""
    grad: bool = False
    deterministic: bool = False
    batch_invariant: bool = False

    def problem(self) -> Problem:
        """The Problem, after the checks that the call itself makes; raises what they raise."""
        cached = self.layout in CACHES
        if cached and (self.dropout or self.deterministic):
            raise TypeError("caches are forward only: cached_attention has no such argument")
        if self.batch_invariant and not (cached or self.layout == "ragged"):
            raise TypeError("attention has no such argument: it is for ragged sequences and caches")
        operands = self._operands()
        z = Sizes(2, self.heads[0], SEQLEN, SEQLEN, torch.Generator().manual_seed(0))
        mask = None if self.mask is None else self.mask(z)
        if self.layout == "ring cache":  # takes no others
            mask = RING if mask is None else RING & mask
        scores = in_order(tuple(make(z) for make in self.scores))
        operands.mask_tensors = () if mask is None else tuple(mask.tensors())
        operands.score_tensors = tuple(tuple(score.tensors()) for score in scores)
        layout = "cached" if cached else "ragged" if self.layout == "ragged" else "dense"
        options = Options(
            layout,
            None if mask is None else mask.structure(),
            tuple(score.structure() for score in scores),
            None,
            self.dropout,
            0.1 if self.dropout else 0.0,
            self.out_dtype,
            self.deterministic,
            self.batch_invariant,
            ring_first=4 if self.layout == "ring cache" else None,
        )
        grad_of = frozenset({"q", "k", "v", "sink", "bias", "score_tensors"}) if self.grad else frozenset[str]()
        return problem_of(options, operands, grad_of)

    def _operands(self) -> Operands:
        ragged, pages = self.layout == "ragged", self.layout in ("paged cache", "quantised pages")
        rows = (2 * SEQLEN,) if ragged else (2, SEQLEN)
        (heads_q, heads_kv), (dim, dim_v) = self.heads, self.head_dims
        q = torch.empty(*rows, heads_q, dim, dtype=self.dtype, requires_grad=self.grad)
        rows_kv = (4, SEQLEN // 2) if pages else (2, 2 * SEQLEN) if self.layout == "ring cache" else rows
        stored = torch.int8 if self.layout == "quantised pages" else self.dtype
        k, v = (torch.empty(*rows_kv, heads_kv, n, dtype=stored) for n in (dim, dim_v))
        operands = Operands(q, k, v, sink=torch.empty(heads_q) if self.sink else None)
        lengths = torch.full((2,), SEQLEN, dtype=torch.int32)
        if ragged:
            operands.cu_seqlens_q = operands.cu_seqlens_kv = torch.tensor([0, SEQLEN, 2 * SEQLEN], dtype=torch.int32)
        elif self.layout == "padded":
            operands.seqlens_q = operands.seqlens_kv = lengths
        elif self.layout != "dense":
            operands.seqlens_kv = lengths
        if pages:
            operands.page_table = torch.arange(4, dtype=torch.int32).view(2, 2)
        if self.layout == "quantised pages":
            operands.k_scale = operands.v_scale = torch.ones(heads_kv)
        if self.dropout == "keep":
            operands.keep = torch.ones(1, 1, SEQLEN, SEQLEN, dtype=torch.bool)
        return operands


def _set(**values: Any) -> Change:
    def change(call: Call) -> None:
        for name, value in values.items():
            setattr(call, name, value)

    return change


def _batch_invariant(call: Call) -> None:
    call.batch_invariant = True
    call.layout = call.layout if call.layout in CACHES else "ragged"


AXES: dict[str, dict[str, Change]] = {
    "layout": {name: _set(layout=name) for name in ("dense", "padded", "ragged", *CACHES)},
    "dtype": {name: _set(dtype=getattr(torch, name)) for name in ("bfloat16", "float16", "float32", "float64")},
    "out_dtype": {"that of q": _set(), "float32": _set(out_dtype=torch.float32)},
    "query to key/value heads": {f"{q} to {kv}": _set(heads=(q, kv)) for q, kv in ((8, 8), (8, 2), (8, 1))},
    "head_dim": {
        **{
            str(d) if d == dv else f"{d} (values {dv})": _set(head_dims=(d, dv))
            for d, dv in ((64, 64), (1, 1), (31, 80), (192, 128), (256, 256), (512, 512))
        },
        "576 (values 512)": _set(head_dims=(576, 512), layout="paged cache"),
    },
    "mask": {"none": _set(), **{name: _set(mask=make) for name, make in MASKS}},
    "scores": {"none": _set(), **{name: _set(scores=makes) for name, makes in SCORES}},
    "sink": {"none": _set(), "one number a head": _set(sink=True)},
    "dropout": {"none": _set(), "philox": _set(dropout="philox"), "keep given": _set(dropout="keep")},
    "gradients": {"none": _set(), "of every input": _set(grad=True)},
    "repeatability": {
        "forward": _set(),
        "deterministic": _set(deterministic=True),
        "batch_invariant": _batch_invariant,
    },
}
"""Every option and its values; the first is the default of the others' rows."""


@dataclass
class Value:
    """What each backend says about one value of one option, alone and together with each value of the others."""

    axis: str
    name: str
    alone: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    pairs: dict[tuple[str, str], dict[str, list[str]]] = field(
        default_factory=dict[tuple[str, str], dict[str, list[str]]]
    )

    def reasons(self, backend: str, refused: set[tuple[str, str]]) -> list[str]:
        """What the backend says against it: alone, else with partners that are not `refused` themselves."""
        if self.alone[backend]:
            return self.alone[backend]
        found = [r for partner, said in self.pairs.items() if partner not in refused for r in said[backend]]
        return list(dict.fromkeys(found))


@dataclass
class Answers:
    """Everything that was asked: values in order, and pairs that the call refuses, by message."""

    values: list[Value] = field(default_factory=list[Value])
    refused: dict[str, tuple[dict[str, None], dict[str, None]]] = field(
        default_factory=dict[str, tuple[dict[str, None], dict[str, None]]]
    )

    def no(self, backend: str) -> set[tuple[str, str]]:
        """Values that the backend refuses with the defaults of all other options."""
        return {(value.axis, value.name) for value in self.values if value.alone[backend]}

    def verdict(self, value: Value, backend: str) -> tuple[str, list[str]]:
        """yes, partly or no, and the reasons."""
        reasons = value.reasons(backend, self.no(backend))
        return "no" if value.alone[backend] else "partly" if reasons else "yes", reasons


def loaded() -> list[str]:
    """Backends that this version has and this machine can load, as far as the table goes."""
    return [name for name in registry.names() if name in DEVICES and not isinstance(registry.get(name), str)]


def absent() -> list[str]:
    """Names that are kept for backends to come."""
    return [name for name in registry.PREFERENCE if isinstance(registry.get(name), str)]


def _problem(chosen: dict[str, str]) -> Problem:
    call = Call()
    # The layout last: some values bring the layout that they need, unless the pair names one.
    for axis in sorted(chosen, key=lambda x: (x == "layout", x)):
        AXES[axis][chosen[axis]](call)
    return call.problem()


def _say(problem: Problem) -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    for name in loaded():
        said[name] = reasons_against(name, replace(problem, device=DEVICES[name]))
    return said


@functools.cache
def ask() -> Answers:
    """Every value alone, then every pair of values that are not defaults."""
    answers = Answers()
    for axis, names in AXES.items():
        for name in names:
            answers.values.append(Value(axis, name, _say(_problem({axis: name}))))
    extra = [(value, name == next(iter(AXES[value.axis]))) for value in answers.values for name in (value.name,)]
    for (one, one_default), (two, two_default) in itertools.combinations(extra, 2):
        if one.axis == two.axis or (one_default and one.axis != "layout") or two_default:
            continue
        try:
            said = _say(_problem({one.axis: one.name, two.axis: two.name}))
        except (TypeError, ValueError) as error:
            lefts, rights = answers.refused.setdefault(str(error), ({}, {}))
            lefts[f"{one.axis}: {one.name}"] = rights[f"{two.axis}: {two.name}"] = None
            continue
        one.pairs[two.axis, two.name] = said
        two.pairs[one.axis, one.name] = said
    return answers


def matrix() -> str:
    """The whole table, its notes, and the pairs that the call refuses."""
    answers, backends = ask(), loaded()
    notes: dict[str, int] = {}
    rows: list[list[str]] = []
    for value in answers.values:
        cells: list[str] = []
        for backend in backends:
            verdict, reasons = answers.verdict(value, backend)
            numbers = [notes.setdefault(f"`{backend}`: {reason}", len(notes) + 1) for reason in reasons]
            cells.append(f"{verdict} ({', '.join(map(str, numbers))})" if numbers else verdict)
        first = value.name == next(iter(AXES[value.axis]))
        rows.append([f"**{value.axis}**" if first else "", value.name, *cells])
    text = table(["option", "value", *(f"`{name}`" for name in backends)], rows) + "\n\n"
    text += "".join(f"{number}. {note}\n" for note, number in notes.items())
    text += "\nPairs that the call refuses on every backend:\n\n"
    pairs = [[_joined(lefts), _joined(rights), message] for message, (lefts, rights) in answers.refused.items()]
    return text + table(["value", "together with", "message"], pairs) + _absent()


def _joined(names: dict[str, None]) -> str:
    """`layout: dense, ragged` of the names that share an option."""
    by_axis: dict[str, list[str]] = {}
    layouts = [name for name in names if name.startswith("layout: ")]
    for name in layouts or names:  # a value that brings its layout is refused for that
        axis, _, value = name.partition(": ")
        by_axis.setdefault(axis, []).append(value)
    return "; ".join(f"{axis}: {'; '.join(values)}" for axis, values in by_axis.items())


def _absent() -> str:
    if not absent():
        return ""
    return f"\n\nNot part of this version: {', '.join(f'`{name}`' for name in absent())}."


def summary() -> str:
    """One row an option: its values, and which of them each backend does not take."""
    answers, backends = ask(), loaded()
    rows: list[list[str]] = []
    for axis, names in AXES.items():
        cells: list[str] = []
        for backend in backends:
            found = {v.name: answers.verdict(v, backend)[0] for v in answers.values if v.axis == axis}
            less = [f"{name} ({verdict})" for name, verdict in found.items() if verdict != "yes"]
            cells.append("all" if not less else "all but: " + ", ".join(less))
        rows.append([axis, "; ".join(names), *cells])
    return table(["option", "values asked for", *(f"`{name}`" for name in backends)], rows) + _absent()
