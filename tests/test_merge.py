"""merge: attention over disjoint sets of keys, put together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cases import BY_NAME, Case
from helpers import BACKENDS, build, expected, same_bits

import kilat
from kilat import numerics


def parts(dtype: torch.dtype = torch.float32, count: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(count)
    outs = [torch.randn(2, 5, 3, 4, generator=g, dtype=torch.float64).to(dtype) for _ in range(count)]
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return outs, [torch.randn(2, 3, 5, generator=g, dtype=torch.float64).mul(5).to(lse_dtype) for _ in range(count)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("cuts", [(0, 20, 129), (0, 0, 1, 64, 129), (0, 129, 129)])
def test_split_keys_merge_to_the_whole(backend: str, out_dtype: torch.dtype | None, cuts: tuple[int, ...]) -> None:
    """Parts of the keys, hidden by KeyRange, with the sink in the first part only."""
    case = Case("split", seqlen=(33, 129), heads=(4, 2), sink=True, mask="causal")
    call = build(case)
    outs, lses = [], []
    for n, (start, stop) in enumerate(pairwise(cuts)):
        ends = [torch.full((2,), x, dtype=torch.int32) for x in (start, stop)]
        mask, sink = kilat.Causal() & kilat.KeyRange(*ends), call.sink if n == 0 else None
        out, lse = call.run(backend, mask=mask, sink=sink, out_dtype=out_dtype)
        outs.append(out)
        lses.append(lse)
    out, lse = kilat.merge(outs, lses)
    expected(case).check({"out": out, "lse": lse})


def test_ragged_parts_merge_by_rank() -> None:
    call = build(BY_NAME["ragged-tail"])
    out, lse = call.run("cpu")
    merged, merged_lse = kilat.merge([out, torch.zeros_like(out)], [lse, torch.full_like(lse, -torch.inf)])
    assert same_bits(merged, out)
    assert same_bits(merged_lse, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equals_the_formula(dtype: torch.dtype) -> None:
    outs, lses = parts(dtype)
    out, lse = kilat.merge(outs, lses)
    wide = [x.double().numpy() for x in outs], [x.double().numpy() for x in lses]
    exact, exact_lse = numerics.merge_partials(*wide)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), torch.from_numpy(exact), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), torch.from_numpy(exact_lse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_part_that_saw_nothing_changes_nothing(where: int) -> None:
    outs, lses = parts(count=2)
    plain = kilat.merge(outs, lses)
    outs.insert(where, torch.full_like(outs[0], torch.nan))
    lses.insert(where, torch.full_like(lses[0], -torch.inf))
    assert all(same_bits(a, b) for a, b in zip(plain, kilat.merge(outs, lses), strict=True))


def test_nothing_seen_at_all() -> None:
    out, lse = kilat.merge([torch.full((1, 2, 1, 3), torch.nan)] * 2, [torch.full((1, 1, 2), -torch.inf)] * 2)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_far_apart_and_large() -> None:
    """lse values whose exp overflows or vanishes."""
    outs = [torch.ones(1, 1, 1, 2) * n for n in (1.0, 2.0)]
    for a, b, expected_out in [(1e4, 1e4, 1.5), (-1e4, -1e4, 1.5), (1e4, -1e4, 1.0), (3e38, -3e38, 1.0)]:
        out, lse = kilat.merge(outs, [torch.full((1, 1, 1), x) for x in (a, b)])
        assert torch.isfinite(lse).all()
        assert out.tolist() == [[[[expected_out] * 2]]]


def test_gradients() -> None:
    outs, lses = parts(torch.float64)
    lses[1][0] = -torch.inf
    inputs = [x.requires_grad_() for x in (*outs, lses[0], lses[2])]

    def merged(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return kilat.merge(list(tensors[:3]), [tensors[3], lses[1], tensors[4]])

    assert torch.autograd.gradcheck(merged, inputs)


def test_gradients_where_nothing_is_seen() -> None:
    outs = [torch.ones(1, 1, 1, 2, requires_grad=True) for _ in range(2)]
    lses = [torch.full((1, 1, 1), -torch.inf, requires_grad=True) for _ in range(2)]
    out, lse = kilat.merge(outs, lses)
    for grad in torch.autograd.grad((out, lse), outs + lses, (torch.ones_like(out), torch.ones_like(lse))):
        assert not torch.isnan(grad).any()


@pytest.mark.parametrize("layout", ["dense", "ragged"])
def test_gradients_through_two_attentions(layout: str) -> None:
    """The gradient of merged halves is the gradient of the whole."""
    lengths = {"lengths_q": (9, 20), "lengths_kv": (30, 20)} if layout == "ragged" else {"seqlen": (20, 30)}
    call = build(Case("halves", layout, heads=(2, 1), mask="none", **lengths))
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    ends = [torch.full((2,), n, dtype=torch.int32) for n in (0, 11, 100)]
    halves = [call.run("cpu", mask=kilat.KeyRange(*ends[n : n + 2])) for n in range(2)]
    merged = kilat.merge(*(list(x) for x in zip(*halves, strict=True)))
    grads = torch.autograd.grad(merged, inputs, (call.dout, call.dlse))
    expected(call.case, backward=True).check(dict(zip(("q", "k", "v"), grads, strict=True)))
