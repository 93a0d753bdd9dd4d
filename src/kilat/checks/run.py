"""Running a case: the public call, the oracle's budget for it, and torch's own answer where torch has one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kilat import accuracy, numerics
from kilat.api import attention, ragged_attention
from kilat.cached import cached_attention
from kilat.checks.cases import CASES, Case, Sizes
from kilat.checks.report import Report, Row
from kilat.checks.torch_peer import TorchPeer
from kilat.dropout import Dropout
from kilat.kv import Cache, ContiguousCache, PagedCache
from kilat.problem import Operands, Options, Problem
from kilat.scores import Bias, Score, in_order
from kilat.validate import problem_of

PAGE_SIZE = 16
SEED, OFFSET, DROPOUT = 1234, 5678, 0.25


@dataclass
class Call:
    """The tensors and options of a case."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    mask: Any
    scores: tuple[Any, ...]
    sink: Tensor | None
    dropout: Dropout | None
    counts: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    cache: Cache | None = None

    def run(self, backend: str) -> tuple[Tensor, Tensor]:
        """(out, lse) of the public function for the layout."""
        options: dict[str, Any] = {"mask": self.mask, "scores": self.scores, "sink": self.sink}
        options |= {"scale": self.case.scale, "return_lse": True, "backend": backend}
        if self.cache is not None:
            return cached_attention(self.q, self.cache, **options)
        if self.case.layout == "ragged":
            return ragged_attention(self.q, self.k, self.v, **self.counts, dropout=self.dropout, **options)
        return attention(self.q, self.k, self.v, **self.counts, dropout=self.dropout, **options)

    def differentiable(self) -> dict[str, Tensor]:
        """The tensors that have gradients, by the names that the oracle uses."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        if self.sink is not None:
            named["sink"] = self.sink
        for n, score in enumerate(in_order(self.scores)):
            if isinstance(score, Bias | Score):
                named |= {f"score.{n}.{m}": x for m, x in enumerate(score.tensors()) if x.is_floating_point()}
        return named

    def core(self) -> tuple[Problem, Operands]:
        """The Problem and Operands of the call, for the oracle."""
        operands = Operands(self.q, self.k, self.v) if self.cache is None else self.cache.operands(self.q)
        for name, value in self.counts.items():
            setattr(operands, name, value)
        ordered = in_order(self.scores)
        operands.sink = self.sink
        operands.mask_tensors = tuple(self.mask.tensors()) if self.mask is not None else ()
        operands.score_tensors = tuple(tuple(score.tensors()) for score in ordered)
        operands.seed, operands.offset = SEED, OFFSET
        if self.dropout is not None:
            operands.keep = self.dropout.keep
        options = Options(
            layout="cached" if self.cache is not None else "ragged" if self.case.layout == "ragged" else "dense",
            mask=None if self.mask is None else self.mask.structure(),
            scores=tuple(score.structure() for score in ordered),
            scale=self.case.scale,
            dropout=self.case.dropout,
            dropout_p=DROPOUT if self.case.dropout else 0.0,
        )
        return problem_of(options, operands), operands


def _offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def _cache(case: Case, k: Tensor, v: Tensor) -> Cache:
    """Put keys and values into a cache with room to spare; what no length reaches holds NaN."""
    lengths = torch.tensor(case.seqlens_kv, dtype=torch.int32)
    if case.layout == "cached":
        return ContiguousCache(k, v, lengths)
    pages = -(-k.shape[1] // PAGE_SIZE)
    table = torch.randperm(len(lengths) * pages, generator=torch.Generator().manual_seed(3)).view(len(lengths), pages)
    stored: list[Tensor] = []
    for x in (k, v):
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * PAGE_SIZE - x.shape[1]), value=float("nan"))
        page = torch.empty_like(padded).reshape(-1, PAGE_SIZE, *x.shape[2:])
        page[table.flatten()] = padded.reshape(page.shape)
        stored.append(page)
    return PagedCache(stored[0], stored[1], table.to(torch.int32), lengths)


def build(case: Case) -> Call:
    """Make the tensors of a case: the same in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    batch, longest_q, longest_kv = len(case.seqlens_q), max(case.seqlens_q), max(case.seqlens_kv)
    z = Sizes(batch, case.heads[0], longest_q, longest_kv, generator)
    ragged = case.layout == "ragged"
    rows_q = (sum(case.seqlens_q),) if ragged else (batch, longest_q)
    rows_kv = (sum(case.seqlens_kv),) if ragged else (batch, longest_kv)

    def normal(rows: tuple[int, ...], heads: int, dim: int, size: float = 1.0) -> Tensor:
        x = (z.normal(*rows, heads, dim) * size).to(getattr(torch, case.dtype))
        return x.transpose(1, 2).contiguous().transpose(1, 2) if case.transposed else x

    q = normal(rows_q, case.heads[0], case.head_dims[0], case.logits)
    k, v = normal(rows_kv, case.heads[1], case.head_dims[0]), normal(rows_kv, case.heads[1], case.head_dims[1])
    do = normal(rows_q, case.heads[0], case.head_dims[1])
    mask = None if case.mask is None else case.mask(z)
    scores = tuple(make(z) for make in case.scores)
    sink = z.normal(case.heads[0]) if case.sink else None
    dropout = None
    if case.dropout == "keep":
        dropout = Dropout(DROPOUT, keep=z.coins(batch, case.heads[0], longest_q, longest_kv))
    elif case.dropout == "philox":
        dropout = Dropout(DROPOUT, seed=SEED, offset=OFFSET)
    call = Call(case, q, k, v, do, mask, scores, sink, dropout)
    if ragged:
        call.counts = {"cu_seqlens_q": _offsets(case.seqlens_q), "cu_seqlens_kv": _offsets(case.seqlens_kv)}
    elif case.used is not None:
        used = [torch.tensor(lengths, dtype=torch.int32) for lengths in case.used]
        call.counts = {"seqlens_q": used[0], "seqlens_kv": used[1]}
    if case.layout in ("cached", "paged"):
        call.cache = _cache(case, k, v)
    return call


def _results(call: Call, backend: str) -> dict[str, Tensor]:
    """out, lse and, where there are any, gradients of sum(do * out), under their inputs' names."""
    named = call.differentiable() if call.case.gradients else {}
    for x in named.values():
        x.requires_grad_()
    out, lse = call.run(backend)
    found = {"out": out.detach(), "lse": lse.detach()}
    if named:
        grads = torch.autograd.grad(out, list(named.values()), call.do)
        found |= dict(zip(named, grads, strict=True))
    for x in named.values():
        x.requires_grad_(False)
    return found


@contextmanager
def _one_thread() -> Generator[None]:
    """Keep torch to one thread: the oracle's many small products are slower on more, by far where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_case(case: Case, backend: str = "auto") -> list[Row]:
    """Compare one case's results with float64; a call that raises becomes a row that is not ok."""
    call = build(case)
    problem, operands = call.core()
    with _one_thread():
        right = accuracy.expected(problem, operands, call.do if case.gradients else None)
    try:
        mine = _results(call, backend)
    except Exception as error:  # noqa: BLE001  whatever a case raises is what it found
        return [Row(case.name, "call", float("inf"), 0.0, note=f"{type(error).__name__}: {error}")]
    peer = TorchPeer(call.mask, call.scores, call.sink, call.dropout, call.counts, call.cache)
    with _one_thread():
        theirs, reason = peer.results(call.q, call.k, call.v, call.do, case.scale)
    rows: list[Row] = []
    for name, result in mine.items():
        error = numerics.max_error(result, right.exact[name])
        beside = numerics.max_error(theirs[name], right.exact[name]) if name in theirs else None
        note = reason or ("" if beside is not None else "not returned")
        shown = name if name in ("out", "lse") else f"d{name}"
        rows.append(Row(case.name, shown, error, right.budgets[name].limit, beside, note))
    return rows


def check(device: str = "cpu", *, on_case: Callable[[str], None] | None = None) -> Report:
    """Compare kilat with float64 over a sample of all options on a device; torch's errors stand beside.

    `on_case` is called with each case's name when it is done. Raises ValueError for a device other than cpu.
    """
    if device != "cpu":
        raise ValueError(f"device must be cpu, the only one with kernels so far; got {device}")
    rows: list[Row] = []
    for case in CASES:
        rows += run_case(case)
        if on_case is not None:
            on_case(case.name)
    return Report(device, tuple(rows))
