"""Budgets: generous to honest rounding, merciless to mistakes; and the merging of partial results."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import BY_NAME, Case
from helpers import build, expectation, expected
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kilat import accuracy, numerics, reference, reference_parts


def test_constants_are_those_of_torch() -> None:
    for name, eps in numerics.EPS.items():
        info = torch.finfo(getattr(torch, name))
        assert eps == info.eps
        assert numerics.TINY[name] == info.smallest_normal * info.eps
    assert math.isclose(numerics.LOG2E * numerics.LN2, 1.0)
    assert math.isclose(2.0 ** (3.0 * numerics.LOG2E), math.exp(3.0))


def budget(exact: np.ndarray, rounded: np.ndarray | None = None, **options: object) -> numerics.Budget:
    given_options = {"dtype": "float32", "accumulate": "float32", "max_score": 0.0} | options
    rounded = exact if rounded is None else rounded
    return numerics.budget(exact, rounded, np.zeros_like(exact), **given_options)  # type: ignore[arg-type]


def test_the_three_parts() -> None:
    exact = np.array([1.0, -4.0] * 6)
    found = numerics.budget(
        exact,
        (exact, exact + 0.25, exact - 0.125),
        np.full(12, 8.0),
        dtype="bfloat16",
        accumulate="float32",
        max_score=3.0,
    )
    assert found.rounding == 2 * (1 + 12 / 12) * 0.25
    assert found.storage == 2.0**-7 * 4 + 2.0**-133
    assert found.accumulation == 2.0**-21 * 4 * 8
    assert found.limit == found.rounding + found.storage + found.accumulation


def test_what_is_not_finite_must_be_equal() -> None:
    exact = np.array([1.0, -np.inf, np.nan, np.inf])
    allowed = budget(exact)
    assert numerics.check("x", exact, exact, allowed) == 0.0
    for at, value in [(0, np.nan), (0, np.inf), (1, np.inf), (1, 0.0), (2, 1.0), (3, np.nan)]:
        wrong = exact.copy()
        wrong[at] = value
        with pytest.raises(numerics.BudgetExceededError, match=rf"x\[{at}\] must be"):
            numerics.check("x", wrong, exact, allowed)


def test_the_message_names_the_worst_entry() -> None:
    exact = np.zeros((2, 3))
    actual = exact.copy()
    actual[0, 1], actual[1, 2] = 1e-3, -0.5
    with pytest.raises(numerics.BudgetExceededError, match=r"out\[1, 2\] must be 0 within .*; got -0.5 \(2 of 6"):
        numerics.check("out", actual, exact, budget(exact))
    with pytest.raises(numerics.BudgetExceededError, match="shape"):
        numerics.check("out", actual[:1], exact, budget(exact))


def test_empty_tensors() -> None:
    empty = np.zeros((0, 3))
    assert numerics.check("x", empty, empty, budget(empty)) == 0.0


def test_tensors_of_any_dtype() -> None:
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    assert numerics.max_error(x, np.ones(3)) == 0.0


@pytest.mark.parametrize("name", ["bfloat16-rich", "float16-causal-sink", "d64-64-bfloat16", "float16-full"])
def test_honest_rounding_is_within_the_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P, out and dS rounded to the nearest, as a kernel does."""
    case = BY_NAME[name]
    call, wanted = build(case), expected(case, backward=True)
    monkeypatch.setattr(reference_parts, "rounded", lambda x, dtype: x.to(dtype).double())
    problem, op = call.core()
    out, lse = reference.forward(problem, op, exact=True, mode="rounded")
    grads = reference.backward(problem, op, out, lse, call.dout, call.dlse, exact=True, mode="rounded")
    worst = wanted.check({"out": out, "lse": lse} | accuracy.named(grads))
    assert max(worst.values()) > 0.05  # and the budget is not out of all proportion


def test_rounding_moves_by_half_a_spacing() -> None:
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        away = (reference_parts.rounded(x, dtype) - x) / x.abs() / torch.finfo(dtype).eps
        torch.testing.assert_close(away.abs(), torch.full_like(away, 0.5), rtol=1e-6, atol=1e-6)
        assert 400 < int((away > 0).sum()) < 600
    assert not reference_parts.rounded(torch.zeros(3, dtype=torch.float64), torch.float16).any()


MISTAKES = {
    "one key too many": lambda call: setattr(call, "mask", None),
    "scale off by 2 %": lambda call: setattr(call, "case", replace(call.case, scale=1.02 * call.case.head_dim**-0.5)),
    "a key changed by 5 %": lambda call: call.k[0, 3].mul_(1.05),
    "a value changed by 5 %": lambda call: call.v[0, 3].mul_(1.05),
    "no sink": lambda call: setattr(call, "sink", None),
    "no softcap": lambda call: setattr(call, "scores", ()),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_beyond_the_budget(mistake: str, dtype: str) -> None:
    """Small mistakes in one row or one option are seen, in half precision too."""
    case = Case("mistake", seqlen=(33, 40), mask="window", dtype=dtype, sink=True, scores="softcap", head_dim=32)
    wanted, call = expected(case, backward=True), build(case)
    MISTAKES[mistake](call)
    wrong = expectation(call, backward=True).exact
    wrong = {name: x for name, x in wrong.items() if name in wanted.exact}
    with pytest.raises(numerics.BudgetExceededError):
        wanted.check(wrong)


NUMBERS = st.floats(-1e3, 1e3)
LSES = st.one_of(st.floats(-1e4, 1e4), st.just(-math.inf))


@given(
    outs=arrays(np.float64, (3, 4, 2, 3), elements=NUMBERS),
    lses=arrays(np.float64, (3, 2, 4), elements=LSES),
)
def test_merging_is_a_weighted_mean(outs: np.ndarray, lses: np.ndarray) -> None:
    """In any order, NumPy and torch alike: weights exp(lse) / sum, lse the log of the sum; -inf counts for nothing."""
    out, lse = numerics.merge_partials(list(outs), list(lses))
    for i in range(4):
        for h in range(2):
            peak = lses[:, h, i].max()
            if peak == -math.inf:
                assert lse[h, i] == -math.inf
                assert not out[i, h].any()
                continue
            weights = np.exp(lses[:, h, i] - peak)
            assert lse[h, i] == pytest.approx(peak + math.log(weights.sum()))
            mean = (weights[:, None] * outs[:, i, h]).sum(0) / weights.sum()
            np.testing.assert_allclose(out[i, h], mean, atol=1e-9)
    again, lse_again = numerics.merge_partials(
        [torch.from_numpy(x) for x in outs[::-1].copy()], [torch.from_numpy(x) for x in lses[::-1].copy()], torch
    )
    np.testing.assert_allclose(again.numpy(), out, atol=1e-9)
    np.testing.assert_allclose(lse_again.numpy(), lse)


def test_one_part_is_returned_bit_for_bit() -> None:
    out, lse = np.random.default_rng(0).normal(size=(5, 2, 3)), np.random.default_rng(1).normal(size=(2, 5))
    merged, merged_lse = numerics.merge_partials([out], [lse])
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_array_equal(merged_lse, lse)
