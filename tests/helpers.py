"""Cases turned into tensors, calls of the public API, what the oracle expects, and memory filled with NaN."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from cases import MASKS, SCORES, Case
from torch import Tensor

import kilat
from kilat import accuracy
from kilat.accuracy import Expected
from kilat.backends import registry
from kilat.dropout import Dropout
from kilat.problem import Operands, Options, Problem
from kilat.scores import in_order
from kilat.validate import problem_of


def _takes_cpu_tensors(name: str) -> bool:
    found, x = registry.get(name), torch.empty(1, 1, 1, 8)
    return not isinstance(found, str) and not found.unsupported(problem_of(Options("dense"), Operands(x, x, x)))


BACKENDS = [name for name in registry.names() if _takes_cpu_tensors(name)]
"""Every backend that this machine can run on CPU tensors; the reasons of the others stand in `kilat info`."""

SEED, OFFSET = 0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_0000_0007


@dataclass
class Call:
    """The tensors and arguments of one case."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    scores: tuple[Any, ...]
    sink: Tensor | None
    dropout: Any
    lengths: dict[str, Tensor] = field(default_factory=dict)  # cu_seqlens_* or seqlens_*, page_table, scales
    dout: Tensor | None = None
    dlse: Tensor | None = None

    def options(self) -> dict[str, Any]:
        """The keyword arguments that all functions share."""
        case = self.case
        out_dtype = None if case.out_dtype is None else getattr(torch, case.out_dtype)
        given = {"mask": self.mask, "scores": self.scores, "sink": self.sink, "scale": case.scale}
        given |= {"return_lse": True, "out_dtype": out_dtype}
        return given if case.cached else given | {"dropout": self.dropout}

    def cache(self) -> Any:
        """The KV cache of a cached case."""
        lengths = self.lengths["seqlens_kv"]
        scales = (self.lengths.get("k_scale"), self.lengths.get("v_scale"))
        if self.case.layout == "cached":
            return kilat.ContiguousCache(self.k, self.v, lengths, *scales)
        return kilat.PagedCache(self.k, self.v, self.lengths["page_table"], lengths, *scales)

    def run(self, backend: str, **more: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) from the public function that the case's layout names."""
        with threads(1 if backend == "reference" else torch.get_num_threads()):
            return self._run(self.options() | {"backend": backend} | more)

    def _run(self, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if self.case.layout in ("dense", "padded"):
            return kilat.attention(self.q, self.k, self.v, **self.lengths, **options)
        if self.case.layout == "ragged":
            offsets = (self.lengths["cu_seqlens_q"], self.lengths["cu_seqlens_kv"])
            return kilat.ragged_attention(self.q, self.k, self.v, *offsets, **options)
        offsets_q = self.lengths.get("cu_seqlens_q")
        return kilat.cached_attention(self.q, self.cache(), cu_seqlens_q=offsets_q, **options)

    def inputs(self) -> dict[str, Tensor]:
        """The tensors whose gradients exist, by name; score tensors are score.<n>.<m> in order of application."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        if self.sink is not None:
            named["sink"] = self.sink
        for n, score in enumerate(in_order(self.scores)):
            if type(score).__name__ in ("Bias", "Score"):
                named |= {f"score.{n}.{m}": x for m, x in enumerate(score.tensors()) if _has_gradient(x)}
        return named

    def gradients(self, backend: str, **more: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(out, lse, gradients by name) of sum(dout * out) + sum(dlse * lse)."""
        named = self.inputs()
        try:
            for x in named.values():
                x.requires_grad_()
            out, lse = self.run(backend, **more)
            with threads(1 if backend == "reference" else torch.get_num_threads()):
                grads = torch.autograd.grad((out, lse), list(named.values()), (self.dout, self.dlse))
        finally:
            for x in named.values():
                x.requires_grad_(False)
        return out.detach(), lse.detach(), dict(zip(named, grads, strict=True))

    def core(self) -> tuple[Problem, Operands]:
        """The Problem and Operands of the call, for the oracle."""
        case, scores = self.case, in_order(self.scores)
        op = Operands(self.q, self.k, self.v, sink=self.sink)
        for name, value in self.lengths.items():
            setattr(op, name, value)
        op.mask_tensors = tuple(self.mask.tensors()) if self.mask is not None else ()
        op.score_tensors = tuple(tuple(score.tensors()) for score in scores)
        if case.dropout == "keep":
            op.keep = self.dropout.keep
        op.seed, op.offset = SEED, OFFSET
        layout = {"padded": "dense", "paged": "cached"}.get(case.layout, case.layout)
        options = Options(
            layout=layout,
            mask=None if self.mask is None else self.mask.structure(),
            scores=tuple(score.structure() for score in scores),
            scale=case.scale,
            dropout=case.dropout,
            dropout_p=case.dropout_p if case.dropout else 0.0,
            out_dtype=None if case.out_dtype is None else getattr(torch, case.out_dtype),
        )
        return problem_of(options, op), op


def _has_gradient(x: Tensor) -> bool:
    """Float tensors, but no expanded ones: those get their gradient in the shape that they were expanded from."""
    return x.is_floating_point() and 0 not in x.stride()


def build(case: Case) -> Call:
    """The tensors of a case: the same on every run."""
    g = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    z, dtype = case.sizes(g), getattr(torch, case.dtype)
    heads_q, heads_kv = case.heads
    dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    lengths, shape_q, shape_kv = _storage(case, g)
    q = z.normal(*shape_q, heads_q, case.head_dim, dtype=torch.float64).mul(case.logits).to(dtype)
    k, v = z.normal(*shape_kv, heads_kv, case.head_dim), z.normal(*shape_kv, heads_kv, dim_v)
    dout = z.normal(*shape_q, heads_q, dim_v, dtype=getattr(torch, case.out_dtype or case.dtype))
    dlse = z.normal(*shape_q, heads_q, dtype=torch.float64 if case.dtype == "float64" else torch.float32)
    _poison(case, lengths, (q, dout, dlse), (k, v))
    q, k, v, dout = _strided(case.strides, q, k, v, dout)
    if case.kv:
        (k, lengths["k_scale"]), (v, lengths["v_scale"]) = (_quantised(x, *case.kv.split("-")) for x in (k, v))
    mask, scores = MASKS[case.mask](z), SCORES[case.scores](z)
    sink = z.normal(heads_q, dtype=torch.float32) if case.sink else None
    return Call(case, q, k, v, mask, scores, sink, _dropout(case, z), lengths, dout, dlse.transpose(-1, -2))


def _dropout(case: Case, z: Any) -> Any:
    if not case.dropout:
        return None
    if case.dropout == "keep":
        return Dropout(case.dropout_p, keep=z.coins(z.batch, z.heads, z.seqlen_q, z.seqlen_kv, p=0.7))
    return Dropout(case.dropout_p, seed=SEED, offset=OFFSET)


def _offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _storage(case: Case, g: torch.Generator) -> tuple[dict[str, Tensor], tuple[int, ...], tuple[int, ...]]:
    """Length tensors, and the leading shapes of q and of k and v."""
    shape_q: tuple[int, ...] = (case.batch, case.seqlen[0])
    shape_kv: tuple[int, ...] = (case.batch, case.seqlen[1])
    lengths: dict[str, Tensor] = {}
    if case.layout == "ragged" or (case.cached and case.lengths_q is not None):
        assert case.lengths_q is not None
        lengths["cu_seqlens_q"], shape_q = _offsets(case.lengths_q), (sum(case.lengths_q) + case.tail,)
    elif case.lengths_q is not None:
        lengths["seqlens_q"] = torch.tensor(case.lengths_q, dtype=torch.int32)
    if case.layout == "ragged":
        assert case.lengths_kv is not None
        lengths["cu_seqlens_kv"], shape_kv = _offsets(case.lengths_kv), (sum(case.lengths_kv) + case.tail,)
    elif case.lengths_kv is not None:
        lengths["seqlens_kv"] = torch.tensor(case.lengths_kv, dtype=torch.int32)
    if case.layout == "paged":
        pages = -(-case.seqlen[1] // case.page_size)
        order = torch.randperm(case.batch * pages + 3, generator=g)[: case.batch * pages].int()
        table = order.reshape(case.batch, pages)
        for b, length in enumerate(case.lengths_kv or ()):
            table[b, -(-length // case.page_size) :] = 2**31 - 1  # never read
        lengths["page_table"], shape_kv = table, (case.batch * pages + 3, case.page_size)
    return lengths, shape_q, shape_kv


def _poison(case: Case, lengths: dict[str, Tensor], q_side: tuple[Tensor, ...], kv_side: tuple[Tensor, ...]) -> None:
    """NaN in everything that no sequence owns: padding, tails, pages and slots that are not used."""
    for side, tensors in (("q", q_side), ("kv", kv_side)):
        if case.layout == "paged" and side == "kv":
            used = torch.zeros(tensors[0].shape[:2], dtype=torch.bool)
            for b, length in enumerate(case.lengths_kv or ()):
                j = torch.arange(length)
                used[lengths["page_table"][b, j // case.page_size].long(), j % case.page_size] = True
        elif f"cu_seqlens_{side}" in lengths:
            used = torch.arange(tensors[0].shape[0]) < lengths[f"cu_seqlens_{side}"][-1]
        elif f"seqlens_{side}" in lengths:
            used = torch.arange(tensors[0].shape[1])[None] < lengths[f"seqlens_{side}"][:, None]
        else:
            continue
        for x in tensors:
            x[~used] = torch.nan


def _quantised(x: Tensor, dtype: str, per: str) -> tuple[Tensor, Tensor]:
    """x stored in `dtype` with x's strides, and its scales: one a head, or one a token and head."""
    largest, exact = {"int8": 127.0, "float8_e4m3fn": 448.0}[dtype], x.double()
    finite = exact.nan_to_num().abs().flatten(0, 1) if per == "head" else exact.abs()
    if not x.numel():
        return x.to(getattr(torch, dtype)), torch.ones(x.shape[2:3] if per == "head" else x.shape[:3])
    scale = (finite.amax((0, 2) if per == "head" else -1) / largest).float()
    numbers = (exact / scale[..., None]).clamp(-largest, largest)  # where nothing is stored, NaN as far as there are
    numbers = numbers.nan_to_num(nan=99.0).round() if dtype == "int8" else numbers
    size = x.untyped_storage().nbytes() // x.element_size()
    stored = torch.full((size,), 0x7F, dtype=torch.uint8).view(getattr(torch, dtype))
    stored = stored.as_strided(x.shape, x.stride(), x.storage_offset())
    return stored.copy_(numbers.to(stored.dtype)), scale


def _strided(kind: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same values in other memory orders, the last axis contiguous."""
    if kind == "heads_first":
        q, k, v, dout = (x.transpose(-2, -3).contiguous().transpose(-2, -3) for x in (q, k, v, dout))
    elif kind == "sliced":
        wide = [torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype) for x in (q, k, v, dout)]
        for big, x in zip(wide, (q, k, v, dout), strict=True):
            big[..., 3:-2] = x
        q, k, v, dout = (big[..., 3:-2] for big in wide)
    elif kind == "packed":
        q, k, v = torch.stack((q, k, v), -3).unbind(-3)
    elif kind == "expanded_heads":
        k, v, dout = (x[..., :1, :].expand_as(x) for x in (k, v, dout))
    elif kind == "expanded_batch":
        q, k, v, dout = (x[:1].expand_as(x) for x in (q, k, v, dout))
    return q, k, v, dout


@functools.cache
def expected(case: Case, backward: bool = False) -> Expected:
    """What a case must give, and how exactly."""
    return expectation(build(case), backward)


def expectation(call: Call, backward: bool = False) -> Expected:
    """What a call must give, and how exactly."""
    problem, op = call.core()
    with threads(1):  # tiny matrices: a second thread costs more than it does
        return accuracy.expected(problem, op, *((call.dout, call.dlse) if backward else ()))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's number of threads, set and put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def skip_unless_supported(call: Call, backend: str) -> None:
    """Skip with the backend's own reasons; on cpu and reference nothing that the cases hold may be refused."""
    problem, _ = call.core()
    found = registry.get(backend)
    assert not isinstance(found, str)
    reasons = found.unsupported(problem)
    if reasons and backend in ("cpu", "reference"):
        pytest.fail(f"{backend} refuses {problem.short_id()}: {'; '.join(reasons)}")
    if reasons:
        pytest.skip("; ".join(reasons))


@contextmanager
def poisoned_memory() -> Iterator[list[str]]:
    """Fill what kilat allocates without initialising with NaN (integers: a huge number); yields the callers' names."""
    seen: list[str] = []
    patches: list[tuple[Any, str, Callable[..., Any]]] = []

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def poisoned(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            if caller.startswith("kilat"):
                seen.append(caller)
                _fill(made)
            return made

        patches.append((owner, name, original))
        setattr(owner, name, poisoned)

    for name in ("empty", "empty_like", "empty_strided"):
        wrap(torch, name)
    for name in ("empty", "empty_like"):
        wrap(np, name)
    for name in ("new_empty", "new_empty_strided"):
        wrap(torch.Tensor, name)
    try:
        yield seen
    finally:
        for owner, name, original in patches:
            setattr(owner, name, original)


def _fill(made: Any) -> None:
    if isinstance(made, torch.Tensor):
        if made.is_floating_point():
            made.fill_(torch.nan)
        elif made.dtype not in (torch.bool, torch.uint8):
            made.fill_(torch.iinfo(made.dtype).max)
    elif made.dtype.kind == "f":
        made.fill(np.nan)
    elif made.dtype.kind == "i":
        made.fill(np.iinfo(made.dtype).max)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return torch.zeros(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)).view(torch.uint8)
