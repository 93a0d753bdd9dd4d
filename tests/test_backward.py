"""Gradients of every dense and padded case, and of random ones, on every backend, within the error budget."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, CASES, Case
from helpers import BACKENDS, Call, Expected, build, expectation, expected, same_bits, skip_unless_supported
from hypothesis import given
from hypothesis import strategies as st

from kilat.scores import Bias

DENSE = [case for case in CASES if case.layout in ("dense", "padded")]


def check_all(call: Call, backend: str, wanted: Expected) -> None:
    """out, lse and every gradient, each of its input's dtype and shape."""
    out, lse, grads = call.gradients(backend)
    for name, x in call.inputs().items():
        assert grads[name].shape == x.shape, name
        assert grads[name].dtype == x.dtype, name
    wanted.check({"out": out, "lse": lse} | grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_backward(case: Case, backend: str) -> None:
    call = build(case)
    skip_unless_supported(call, backend)
    check_all(call, backend, expected(case, backward=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_is_as_exact(backend: str, deterministic: bool) -> None:
    case = BY_NAME["float32-rich"]
    out, lse, grads = build(case).gradients(backend, deterministic=deterministic)
    expected(case, backward=True).check({"out": out, "lse": lse} | grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("only", ["q", "k", "v", "sink", "score.0.0"])
def test_one_gradient_alone(backend: str, only: str) -> None:
    """Asking for one gradient gives what asking for all gives, within the budget."""
    case = Case("alone", seqlen=(65, 70), heads=(4, 2), mask="causal", scores="bias", sink=True)
    call = build(case)
    x = call.inputs()[only].requires_grad_()
    out, lse = call.run(backend)
    (grad,) = torch.autograd.grad((out, lse), [x], (call.dout, call.dlse))
    expected(case, backward=True).check({only: grad})


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_lse(backend: str) -> None:
    """Without a gradient of lse the result is that of dlse = 0."""
    call = build(Case("no-dlse", seqlen=(65, 33), heads=(2, 1), mask="window"))
    call.dlse.zero_()
    wanted = expectation(call, backward=True)
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    alone = torch.autograd.grad(call.run(backend, return_lse=False), inputs, call.dout)
    unused = torch.autograd.grad(call.run(backend)[0], inputs, call.dout)
    for grads in (alone, unused):
        wanted.check(dict(zip(("q", "k", "v"), grads, strict=True)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_lse(backend: str) -> None:
    call = build(Case("only-lse", seqlen=(65, 33), heads=(2, 1), mask="causal", sink=True))
    call.dout.zero_()
    wanted = expectation(call, backward=True)
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.sink)]
    grads = torch.autograd.grad(call.run(backend)[1], inputs, call.dlse)
    wanted.check(dict(zip(("q", "k", "sink"), grads, strict=True)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis_order", [(0, 2, 1, 3), (0, 1, 2, 3), (2, 1, 0, 3)])
def test_any_strides_of_dout(backend: str, axis_order: tuple[int, ...]) -> None:
    case = Case("dout", seqlen=(33, 40), heads=(2, 1), mask="causal")
    call = build(case)
    back = [axis_order.index(n) for n in range(4)]
    call.dout = call.dout.permute(axis_order).contiguous().permute(back)
    call.dlse = call.dlse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    expected(case, backward=True).check(call.gradients(backend)[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_dout(backend: str) -> None:
    """The gradient that sum() sends: one number, expanded along every axis."""
    call = build(Case("sum", seqlen=(33, 40), heads=(2, 1), mask="causal"))
    call.dout, call.dlse = torch.ones(1, 1, 1, 1).expand_as(call.dout), torch.ones(1, 1, 1).expand_as(call.dlse)
    expectation(call, backward=True).check(call.gradients(backend)[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_an_expanded_bias(backend: str) -> None:
    """The gradient of what was expanded is the sum, as if the bias had been given unexpanded."""
    call = build(Case("expanded", seqlen=(33, 40), mask="causal", scores="bias_keys"))
    wanted = expectation(call, backward=True)
    (small,) = call.scores[0].tensors()
    small.requires_grad_()
    call.scores = (Bias(small.expand(2, 2, 33, 40)),)
    (grad,) = torch.autograd.grad(call.run(backend), [small], (call.dout, call.dlse))
    wanted.check({"score.0.0": grad})


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_backwards_of_one_forward(backend: str) -> None:
    call = build(Case("twice", seqlen=(33, 40), mask="causal", dropout="philox"))
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    out = call.run(backend, return_lse=False, deterministic=True)
    first = torch.autograd.grad(out, inputs, call.dout, retain_graph=True)
    second = torch.autograd.grad(out, inputs, call.dout)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Random Problems whose kernels are among a fixed few: sizes, masks, scores and layouts are run-time values."""
    layout = draw(st.sampled_from(["dense", "padded", "ragged"]))
    batch = draw(st.integers(0, 3))
    length = st.integers(0, 70)
    lengths_q, lengths_kv = (tuple(draw(length) for _ in range(batch)) for _ in range(2))
    spare = draw(st.integers(0, 3))
    seqlen = (max(lengths_q, default=0) + spare, max(lengths_kv, default=0) + spare)
    heads_kv = draw(st.integers(1, 3))
    return Case(
        "random",
        layout,
        batch,
        heads=(heads_kv * draw(st.integers(1, 3)), heads_kv),
        seqlen=seqlen,
        lengths_q=None if layout == "dense" else lengths_q,
        lengths_kv=None if layout == "dense" else lengths_kv,
        tail=spare if layout == "ragged" else 0,
        head_dim=draw(st.sampled_from([1, 8, 17, 64, 72])),
        head_dim_v=draw(st.sampled_from([None, 1, 16, 33])),
        dtype=draw(st.sampled_from(["float32", "float64", "bfloat16", "float16"])),
        mask=draw(
            st.sampled_from(["none", "causal", "window_first", "prefix", "documents_batch", "dense", "everything"])
        ),
        scores=draw(st.sampled_from(["none", "softcap", "alibi", "bias_heads", "score_tensor", "all"])),
        sink=draw(st.booleans()),
        dropout=draw(st.sampled_from(["", "philox", "keep"])),
        strides=draw(st.sampled_from(["contiguous", "heads_first", "sliced"])),
        logits=draw(st.sampled_from([1.0, 1e-3, 30.0])),
    )


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@given(case=random_cases())
def test_random_problems(backend: str, case: Case) -> None:
    call = build(case)
    check_all(call, backend, expectation(call, backward=True))
