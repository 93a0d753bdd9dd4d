"""The backward of bfloat16 by products of pairs against the float64 oracle: masks, odd sizes, layouts, NaN, threads."""

from __future__ import annotations

from dataclasses import replace

import helpers
import pytest
import torch
from cases import BY_NAME, MASKS, SCORES, Case
from test_cpu_backward import prepared

from kilat import accuracy, reference
from kilat.backends.cpu import backward_half
from kilat.backends.cpu.backward_host import backward
from kilat.backends.cpu.isa import host_isa

pytestmark = pytest.mark.skipif(not host_isa().has_dot_bf16, reason="needs products of bfloat16 pairs")

SIZES = [(1, 1), (1, 130), (31, 33), (63, 65), (64, 64), (129, 200), (200, 129)]
DIMS = [(1, 1), (3, 37), (32, 64), (33, 17), (64, 64), (65, 128), (128, 96), (256, 160), (512, 5), (512, 512)]
CASES = [
    *(Case(f"size-{n}x{m}-{mask}", seqlen=(n, m), heads=(2, 1), head_dim=64, mask=mask)
      for n, m in SIZES for mask in ("none", "causal")),
    *(Case(f"dims-{d}-{dv}", seqlen=(70, 140), heads=(2, 1), head_dim=d, head_dim_v=dv, mask="causal")
      for d, dv in DIMS),
    *(Case(f"mask-{mask}", seqlen=(150, 170), heads=(2, 1), head_dim=32, mask=mask) for mask in MASKS),
    *(replace(BY_NAME[name], name=name + "-half") for name in (
        "padded-bfloat16", "ragged-bfloat16", "ragged-causal", "ragged-ones", "ragged-all-empty", "padded-none-none",
        "strides-packed-float32", "strides-expanded_heads-float32", "heads6-2", "sink-key_range_empty",
        "bfloat16-huge", "bfloat16-tiny", "bfloat16-scale0", "bfloat16-rich", "bfloat16-negative",
        "ragged-all", "padded-keep")),
    *(
        Case(f"score-{scores}-{mask}", seqlen=(150, 130), heads=(2, 1), head_dim=32, mask=mask, scores=scores)
        for scores in SCORES
        for mask in ("none", "causal")
        if scores != "none"
    ),
    *(
        Case(f"dropout-{kind}-{mask}", seqlen=(70, 130), head_dim=40, mask=mask, dropout=kind)
        for kind in ("philox", "keep")
        for mask in ("none", "window")
    ),
    Case("chunks-64", batch=1, heads=(2, 1), seqlen=(300, 1100), mask="causal", head_dim=64, sink=True),
    Case("chunks-128", batch=1, heads=(1, 1), seqlen=(200, 600), mask="window_first", head_dim=128),
    Case("chunks-256", batch=1, heads=(1, 1), seqlen=(100, 300), mask="dense", head_dim=200),
    Case("split-causal", batch=1, heads=(2, 1), seqlen=(300, 4500), mask="causal", head_dim=24, sink=True),
    Case("split-window", batch=1, heads=(1, 1), seqlen=(2500, 2500), mask="window_first", head_dim=64),
    Case("split-ragged", "ragged", batch=3, lengths_q=(70, 3, 9), lengths_kv=(2200, 3, 4100), heads=(2, 2),
         head_dim=40),
]  # fmt: skip
ALL_CASES = [replace(case, dtype="bfloat16") for case in CASES]
BY = {case.name: case for case in ALL_CASES}


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_gradients_agree_with_the_oracle(case: Case) -> None:
    call = helpers.build(case)
    problem, op, out, lse = prepared(call)
    assert backward_half.supports(problem, host_isa())
    with helpers.poisoned_memory():
        grads = accuracy.named(backward(problem, op, out, lse, call.dout, call.dlse))
    want = helpers.expected(case, backward=True)
    if "sink" in grads:  # the largest error of two to four random sums is no bound for that of others
        sink = want.budgets["sink"]
        want = replace(want, budgets={**want.budgets, "sink": replace(sink, rounding=2.0 * sink.rounding)})
    want.check(grads)


def test_other_types_stay_with_the_float_kernels() -> None:
    half = host_isa()
    for name in ("bfloat16-out-float32", "float32-full", "float16-full"):
        problem, *_ = prepared(helpers.build(BY_NAME[name]))
        assert not backward_half.supports(problem, half), name
    problem, *_ = prepared(helpers.build(BY["size-64x64-none"]))
    assert not backward_half.supports(problem, replace(half, has_dot_bf16=False))


@pytest.mark.parametrize(
    "name", ["mask-dense", "bfloat16-rich-half", "chunks-64", "split-causal", "split-window", "split-ragged"]
)
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    call = helpers.build(BY[name])
    args = (*prepared(call), call.dout, call.dlse)
    results = []
    for count in (1, 2, 5):
        with helpers.threads(count):
            results.append(accuracy.named(backward(*args)))
    for other in results[1:]:
        for which, x in results[0].items():
            assert helpers.same_bits(x, other[which]), which


@pytest.mark.parametrize(
    "wanted", [{"q"}, {"k"}, {"v"}, {"q", "v"}, {"sink"}, set()], ids=lambda wanted: " ".join(sorted(wanted))
)
def test_only_what_is_asked_for_comes_back_and_is_the_same(wanted: set[str]) -> None:
    call = helpers.build(BY["chunks-64"])
    problem, *rest = prepared(call)
    args = (*rest, call.dout, call.dlse)
    whole = accuracy.named(backward(problem, *args))
    some = accuracy.named(backward(replace(problem, grad_of=frozenset(wanted), memo={}), *args))
    assert set(some) == wanted
    for name, x in some.items():
        assert helpers.same_bits(x, whole[name]), name


# Tiles that are partial, whole, and whole but ragged.
SICK = ["mask-causal", "mask-window_first", "mask-dense", "mask-none", "size-64x64-none", "size-129x200-causal"]
SICK += ["score-all-causal", "score-bias_holes-none", "dropout-philox-none"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("name", SICK)
def test_a_non_finite_number_reaches_only_what_sees_it(name: str, where: str, value: float) -> None:
    call = helpers.build(BY[name])
    row = {"q": 20, "k": 5, "v": 30, "dout": 33}[where]
    getattr(call, where)[0, row, 0, 3] = value
    problem, op, out, lse = prepared(call)
    got = backward(problem, op, out, lse, call.dout, call.dlse)
    want = reference.backward(problem, op, None, None, call.dout, call.dlse, exact=True)
    for which, x, y in (("q", got.q, want.q), ("k", got.k, want.k), ("v", got.v, want.v)):
        sick, well = ~torch.isfinite(x), torch.isfinite(y)
        assert not (sick & well).any(), f"d{which}: non-finite where the oracle is finite"
        assert torch.allclose(x[well].double(), y[well], rtol=0.05, atol=0.05), f"d{which}: finite entries"


@pytest.mark.parametrize("scale", [1e18, 3e37])
def test_scores_near_the_largest_float_stay_finite(scale: float) -> None:
    call = helpers.build(replace(BY["size-64x64-causal"], scale=scale / 40))
    problem, op, out, lse = prepared(call)
    grads = backward(problem, op, out, lse, call.dout * 1e-30, None)
    assert torch.isfinite(grads.v).all()
    for x in (grads.q, grads.k):
        assert not torch.isnan(x).any()
