"""The CPU backward alone against the float64 oracle: NaN rules, splits over keys, determinism, partial requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helpers
import pytest
import torch
from cases import BY_NAME, CASES, Case
from torch import Tensor

from kilat import accuracy, numerics, reference
from kilat.backends.cpu.backward_host import backward
from kilat.backends.cpu.backward_tasks import chunk_tasks
from kilat.backends.cpu.host import Call
from kilat.problem import Grads, Operands, Problem

EVERYTHING = frozenset({"q", "k", "v", "sink", "bias", "score_tensors"})
SOME = [case for case in CASES if not case.cached][::8]  # all of them run through the public calls elsewhere


def prepared(call: helpers.Call) -> tuple[Problem, Operands, Tensor, Tensor]:
    """Problem and operands of a call, and the out and lse that its forward gave."""
    problem, op = call.core()
    out, lse = reference.forward(problem, op)
    return replace(problem, needs_grad=True, grad_of=EVERYTHING, memo={}), op, out, lse


def gradients(call: helpers.Call, **changes: Any) -> Grads:
    """The CPU backward of a call."""
    problem, op, out, lse = prepared(call)
    if changes:
        problem = replace(problem, memo={}, **changes)
    assert call.dout is not None
    return backward(problem, op, out, lse, call.dout, call.dlse)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_gradients_agree_with_the_oracle(case: Case) -> None:
    call = helpers.build(case)
    problem, _ = call.core()
    with helpers.poisoned_memory():
        grads = accuracy.named(gradients(call))
    want = helpers.expected(case, backward=True)
    assert set(grads) == set(want.exact) - {"out", "lse"}, "every gradient is there"
    if "sink" in grads and problem.out_dtype in ("float16", "bfloat16"):
        # A handful of sums of rounded `out`: the oracle's own rounding may be small by luck, the bound of it is not.
        sink, unit = want.budgets["sink"], numerics.ACCUMULATION["float32"]
        bound = numerics.EPS[problem.out_dtype] / 2 * sink.accumulation / unit
        want = replace(want, budgets={**want.budgets, "sink": replace(sink, rounding=bound)})
    want.check(grads)


SPLIT = [
    Case("split-causal", batch=1, heads=(2, 1), seqlen=(100, 1100), mask="causal", head_dim=24, sink=True),
    Case("split-window", batch=1, heads=(1, 1), seqlen=(600, 600), mask="window_first", dtype="bfloat16"),
    Case("split-ragged", "ragged", batch=3, lengths_q=(70, 3, 9), lengths_kv=(800, 3, 1100), heads=(2, 2), head_dim=40),
    Case("split-all", batch=1, heads=(2, 2), seqlen=(130, 520), scores="all", dropout="philox"),
]


def test_long_keys_of_few_heads_are_split() -> None:
    for case in SPLIT:
        problem, op, *_ = prepared(helpers.build(case))
        _, splits = chunk_tasks(Call(problem, op), 256)
        assert splits.max() > 1, case.name


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_keys_split_over_tasks(case: Case) -> None:
    call = helpers.build(case)
    with helpers.poisoned_memory():
        grads = accuracy.named(gradients(call))
    helpers.expected(case, backward=True).check(grads)


DETERMINISM = ["float32-rich", "bfloat16-causal-sink", "padded-causal-softcap", "ragged-all", "score-bias_keys-dense"]


@pytest.mark.parametrize("case", [*(BY_NAME[name] for name in DETERMINISM), *SPLIT], ids=str)
def test_the_number_of_threads_changes_no_bit(case: Case) -> None:
    call, threads = helpers.build(case), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = accuracy.named(gradients(call))
        for count in (2, 5):
            torch.set_num_threads(count)
            many = accuracy.named(gradients(call))
            assert one.keys() == many.keys()
            for name, x in one.items():
                assert helpers.same_bits(x, many[name]), f"{name} with {count} threads"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "wanted",
    [{"q"}, {"k"}, {"v"}, {"q", "v"}, {"sink"}, {"bias"}, {"score_tensors"}, set()],
    ids=lambda wanted: " ".join(sorted(wanted)),
)
def test_only_what_is_asked_for_comes_back_and_is_the_same(wanted: set[str]) -> None:
    case = replace(BY_NAME["float32-rich"], seqlen=(65, 300))
    call = helpers.build(case)
    whole, some = accuracy.named(gradients(call)), accuracy.named(gradients(call, grad_of=frozenset(wanted)))
    kinds = {"score.2.0": "bias", "score.3.0": "score_tensors"}
    assert set(some) == {name for name in whole if kinds.get(name, name) in wanted}
    for name, x in some.items():
        assert helpers.same_bits(x, whole[name]), name


NON_FINITE = [
    "mask-causal-70x37",
    "mask-window_first-65x65",
    "mask-dense-37x130",
    "bfloat16-causal-sink",
    "score-bias_holes-causal",
]


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("name", NON_FINITE)
def test_a_non_finite_number_reaches_only_what_sees_it(name: str, where: str, value: float) -> None:
    call = helpers.build(BY_NAME[name])
    row = {"q": 20, "k": 5, "v": 30, "dout": 33}[where]
    getattr(call, where)[0, row, 0, 3] = value
    problem, op, out, lse = prepared(call)
    got = backward(problem, op, out, lse, call.dout, call.dlse)
    want = reference.backward(problem, op, None, None, call.dout, call.dlse, exact=True)
    for which, x, y in (("q", got.q, want.q), ("k", got.k, want.k), ("v", got.v, want.v)):
        sick, well = ~torch.isfinite(x), torch.isfinite(y)
        assert not (sick & well).any(), f"d{which}: non-finite where the oracle is finite"
        assert torch.allclose(x[well].double(), y[well], rtol=0.05, atol=0.05), f"d{which}: finite entries"


def test_rows_past_used_lengths_do_not_matter() -> None:
    case = BY_NAME["padded-causal-softcap"]
    call = helpers.build(case)
    first = accuracy.named(gradients(call))
    for x, lengths in ((call.q, "seqlens_q"), (call.dout, "seqlens_q"), (call.k, "seqlens_kv"), (call.v, "seqlens_kv")):
        for b, length in enumerate(call.lengths[lengths].tolist()):
            x[b, length:] = -7.0
    for name, x in accuracy.named(gradients(call)).items():
        assert helpers.same_bits(x, first[name]), name


@pytest.mark.parametrize("scale", [1e18, 3e37])
def test_scores_near_the_largest_float_stay_finite(scale: float) -> None:
    call = helpers.build(replace(BY_NAME["mask-causal-65x65"], scale=scale / 40))
    problem, op, out, lse = prepared(call)
    grads = backward(problem, op, out, lse, call.dout * 1e-30, None)
    assert torch.isfinite(grads.v).all()
    for x in (grads.q, grads.k):
        assert not torch.isnan(x).any()
