"""The bfloat16 forward with pair products (AMX and the AVX-512 dot instruction) against float64 sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import kilat
from kilat.backends.cpu import forward_host
from kilat.backends.cpu.isa import host_isa
from kilat.masks import Causal, Window
from kilat.masks.core import Mask
from kilat.problem import Operands, Problem

ISA = host_isa()
KINDS = [
    pytest.param("amx", marks=pytest.mark.skipif(not ISA.has_amx, reason="no AMX")),
    pytest.param("dot", marks=pytest.mark.skipif(not ISA.has_dot_bf16, reason="no bfloat16 dot instruction")),
]


@dataclass
class Case:
    """A problem, its tensors, and which pairs are visible."""

    problem: Problem
    operands: Operands
    seen: Tensor  # bool [seqlen_q, seqlen_kv]


def make(
    queries: int, keys: int, dim: int, dim_v: int, mask: Mask | None = None, heads: int = 2, heads_kv: int = 1
) -> Case:
    generator = torch.Generator().manual_seed(queries * 1000 + keys + dim)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    problem = Problem(
        layout="dense", dtype="bfloat16", out_dtype="bfloat16", device="cpu", head_dim=dim, head_dim_v=dim_v,
        num_heads_q=heads, num_heads_kv=heads_kv, mask=mask, batch=1, seqlen_q=queries, seqlen_kv=keys,
        scale=dim**-0.5,
    )  # fmt: skip
    q, k, v = (
        tensor(1, n, h, d) for n, h, d in ((queries, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v))
    )
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if isinstance(mask, Causal):
        seen = j <= i
    elif isinstance(mask, Window):
        seen = (j <= i) & (j > i - WINDOW)
    return Case(problem, Operands(q, k, v), seen)


WINDOW = 70


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64; a hidden value does not count, whatever it is."""
    p, o = case.problem, case.operands
    q, k, v = o.q.double(), o.k.double(), o.v.double()
    k, v = (x.repeat_interleave(p.group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * p.scale
    scores = torch.where(case.seen, scores, torch.full_like(scores, -math.inf))
    lse = scores.logsumexp(-1)
    weights = torch.nan_to_num(torch.exp(scores - lse[..., None]))
    used = torch.where(case.seen[None, None, :, :, None], v.transpose(1, 2)[:, :, None], 0.0)
    return torch.einsum("bhij,bhijd->bihd", weights, used), lse


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], tuple[Tensor, Tensor]]:
    """Run one kernel variant, whatever the machine would choose."""
    kind = str(request.param)
    monkeypatch.setattr(forward_host, "variant", lambda *_: kind)
    monkeypatch.setattr(forward_host, "_plans", {})
    return lambda case: forward_host.run_forward(case.problem, case.operands)


def check(case: Case, got: tuple[Tensor, Tensor], scale: float = 1.0) -> None:
    out, lse = exact(case)
    assert got[0].isfinite().all()
    # Storing P and out in bfloat16 costs 2^-8 of a value each.
    torch.testing.assert_close(got[0].double(), out, atol=0.012 * scale, rtol=0.012)
    torch.testing.assert_close(got[1].double(), lse, atol=4e-6 * scale, rtol=2e-6)


@pytest.mark.parametrize("mask", [None, Causal(), Window(WINDOW - 1, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "dim_v"),
    [(1, 1, 1, 1), (63, 129, 40, 24), (129, 257, 64, 64), (65, 191, 72, 96), (257, 257, 96, 40), (70, 333, 192, 128),
     (64, 200, 512, 512), (1, 500, 128, 128), (300, 640, 64, 128)],
)  # fmt: skip
def test_shapes_and_masks(
    run: Callable[[Case], tuple[Tensor, Tensor]], queries: int, keys: int, dim: int, dim_v: int, mask: Mask | None
) -> None:
    case = make(queries, keys, dim, dim_v, mask)
    check(case, run(case))


@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_large_scores_form_p_again(run: Callable[[Case], tuple[Tensor, Tensor]], mask: Mask | None) -> None:
    """Row maxima that jump late: units are done again, step by step, while products of others are still due."""
    case = make(300, 700, 64, 64, mask, heads=4)
    for j, factor in ((40, 8.0), (200, 20.0), (390, 40.0), (640, 80.0)):
        case.operands.k[:, j] *= factor
    check(case, run(case), scale=100.0)


def test_scores_of_any_size(run: Callable[[Case], tuple[Tensor, Tensor]]) -> None:
    """Scores far below and above everything that exp can take."""
    for scale in (1e-30, 300.0, -300.0, 1e30, 1e36):
        case = make(80, 300, 32, 32)
        case.problem = replace(case.problem, scale=scale)
        out, lse = run(case)
        want, want_lse = exact(case)
        assert out.isfinite().all()
        torch.testing.assert_close(out.double(), want, atol=0.02, rtol=0.02)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_hidden_values_do_not_count(run: Callable[[Case], tuple[Tensor, Tensor]], bad: float) -> None:
    case = make(200, 200, 64, 64, Causal())
    clean = run(case)
    case.operands.v[:, 150] = bad
    out, lse = run(case)
    torch.testing.assert_close(lse, clean[1], atol=2e-6, rtol=1e-6)
    assert not out[:, 150:].isfinite().any()
    torch.testing.assert_close(out[:, :150], clean[0][:, :150], atol=0.01, rtol=0.01)


def test_nan_query_stays_in_its_row(run: Callable[[Case], tuple[Tensor, Tensor]]) -> None:
    case = make(200, 300, 64, 64)
    clean = run(case)
    case.operands.q[:, 77] = math.nan
    out, lse = run(case)
    others = torch.arange(200) != 77
    assert out[:, 77].isnan().all()
    assert lse[:, :, 77].isnan().all()
    torch.testing.assert_close(out[:, others], clean[0][:, others], atol=0.01, rtol=0.01)
    torch.testing.assert_close(lse[:, :, others], clean[1][:, :, others], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("mask", [None, Causal(), Window(WINDOW - 1, 0)], ids=["full", "causal", "window"])
def test_bits_do_not_depend_on_the_tasks(run: Callable[[Case], tuple[Tensor, Tensor]], mask: Mask | None,
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """How many query blocks share a task follows from the number of threads; bits must not."""
    case = make(700, 700, 64, 64, mask, heads=4, heads_kv=2)
    case.operands.k[:, 500] *= 30.0
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 16):
            monkeypatch.setattr(forward_host, "_plans", {})
            torch.set_num_threads(threads)
            results.append(run(case))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_softcap_and_bias(run: Callable[[Case], tuple[Tensor, Tensor]]) -> None:
    """Modified scores go step by step; a bias of -inf hides a NaN value."""
    del run  # only chooses the variant
    case = make(100, 150, 64, 64, heads=1)
    q, k, v = case.operands.q, case.operands.k, case.operands.v
    bias = torch.randn(1, 1, 100, 150, generator=torch.Generator().manual_seed(1))
    bias[..., 20] = -math.inf
    v[:, 20] = math.nan
    out = kilat.attention(q, k, v, scores=[kilat.Softcap(3.0), kilat.Bias(bias)], backend="cpu")
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * case.problem.scale
    weights = torch.softmax(3.0 * torch.tanh(scores / 3.0) + bias.double(), -1)
    want = torch.einsum("bhij,bjhd->bihd", weights, torch.nan_to_num(v.double()))
    torch.testing.assert_close(out.double(), want, atol=0.012, rtol=0.012)
