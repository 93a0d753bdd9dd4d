"""The Triton backward, interpreted: gradients of the cases within their budgets, and what the cases do not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BY_NAME, Case
from helpers import Call, build, expectation, expected, poisoned_memory, same_bits

from kilat.masks.ranges import visible
from kilat.scores import Bias, Score

NAMES = """
q1-kv1-causal q63-kv129-causal q257-kv31-none q65-kv257-causal
zero-b0-q5-kv5-causal zero-b2-q0-kv5-none zero-b2-q5-kv0-causal-sink
heads6-2 heads4-1 d3-5-float32 d192-128-float32 d5-512-float32 d17-17-bfloat16 d251-127-bfloat16
bfloat16-causal-sink float16-huge bfloat16-out-float32
mask-causal_top_left-70x37 mask-window-70x37 mask-window_first-70x37 mask-window_first_range-37x130
mask-prefix_chunked-37x130 mask-documents_batch-70x37 mask-key_range_empty-65x65 mask-dense-37x130
mask-predicate_tensor-70x37 mask-everything-37x130
score-softcap-none score-alibi_batch-none score-bias-causal score-bias_keys-dense score-bias_holes-none
score-score_tensor-causal score-all-none
dropout-philox-0.1-window dropout-philox-1.0-none dropout-keep-0.5-none
strides-heads_first-float32 strides-sliced-bfloat16 strides-expanded_heads-float32
padded-window_first-alibi padded-dense-bias padded-bfloat16 padded-dropout
ragged-causal ragged-window_first ragged-documents_batch ragged-empty-q1 ragged-empty-kv0 ragged-no-sequences
ragged-all-empty ragged-tail ragged-keep ragged-bias_keys
"""
CHOSEN = [BY_NAME[name] for name in NAMES.split()]
"""A few of each kind: the interpreter takes a second a case; a GPU runs them all."""


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_case(case: Case) -> None:
    """Gradients are allocated full of NaN; so is what no sequence owns."""
    call = build(case)
    with poisoned_memory():
        out, lse, grads = call.gradients("triton")
    for name, x in call.inputs().items():
        assert grads[name].shape == x.shape, name
        assert grads[name].dtype == x.dtype, name
    expected(case, backward=True).check({"out": out, "lse": lse} | grads)


def test_deterministic() -> None:
    """As exact as the default, and the same bits again; tensors of user scores are summed in integers."""
    case = Case("repeat", batch=1, seqlen=(20, 70), mask="causal", scores="all", sink=True, dropout="keep")
    first, again = (build(case).gradients("triton", deterministic=True) for _ in range(2))
    expected(case, backward=True).check({"out": first[0], "lse": first[1]} | first[2])
    assert all(same_bits(first[2][name], again[2][name]) for name in first[2])


def test_a_sum_that_is_not_finite() -> None:
    """Integers cannot hold NaN: the gradient of the table says so all the same."""
    call = build(Case("nan", batch=1, seqlen=(20, 20), scores="score_tensor"))
    assert call.dout is not None
    call.dout[0, 3, 1, 0] = torch.inf
    (table,) = call.scores[0].tensors()
    table.requires_grad_()
    out, lse = call.run("triton", deterministic=True)
    (grad,) = torch.autograd.grad((out, lse), [table], (call.dout, call.dlse))
    assert torch.isnan(grad).any()


@pytest.mark.parametrize("only", ["q", "k", "v", "sink", "score.0.0"])
def test_one_gradient_alone(only: str) -> None:
    case = Case("alone", seqlen=(33, 70), heads=(2, 1), mask="causal", scores="bias", sink=True)
    call = build(case)
    x = call.inputs()[only].requires_grad_()
    out, lse = call.run("triton")
    (grad,) = torch.autograd.grad((out, lse), [x], (call.dout, call.dlse))
    expected(case, backward=True).check({only: grad})


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 65, 1), (1, 2, 1, 70), (2, 2, 65, 1)])
def test_broadcast_bias(shape: tuple[int, ...]) -> None:
    """The gradient is the sum over every axis of length 1."""
    call = build(Case("broadcast", seqlen=(65, 70), mask="causal"))
    call.scores = (Bias(torch.randn(shape, generator=torch.Generator().manual_seed(1))),)
    wanted = expectation(call, backward=True)
    _, _, grads = call.gradients("triton")
    wanted.check({"score.0.0": grads["score.0.0"]})


def _by_head(z: torch.Tensor) -> Score:
    return Score(lambda s, b, h, q_pos, j, x: s * x[h], tensors=(z[0, :2],))


def _by_key(z: torch.Tensor) -> Score:
    return Score(lambda s, b, h, q_pos, j, x: s + x[h, j] * x[h, 1], tensors=(z,))


def _by_query(z: torch.Tensor) -> Score:
    return Score(lambda s, b, h, q_pos, j, x: s + x[b, q_pos], tensors=(z,))


def _by_number(z: torch.Tensor) -> Score:
    return Score(lambda s, b, h, q_pos, j, x: s * x, tensors=(z[0, 0],))


@pytest.mark.parametrize("made", [_by_head, _by_key, _by_query, _by_number])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tables(made: object, deterministic: bool) -> None:
    """Tensors that are read by head, key, query, or whole: sums over a tile before they are added."""
    call = build(Case("tables", seqlen=(20, 70), heads=(2, 1), mask="causal"))
    z = torch.randn((2, 70), generator=torch.Generator().manual_seed(2)).mul(0.5)
    call.scores = (made(z),)  # type: ignore[operator]
    wanted = expectation(call, backward=True)
    _, _, grads = call.gradients("triton", deterministic=deterministic)
    wanted.check({"score.0.0": grads["score.0.0"], "q": grads["q"]})


@pytest.mark.parametrize("case", ["padded-none-none", "ragged-tail"])
def test_padding_never_changes_a_bit(case: str) -> None:
    """Rows that no sequence owns may hold anything in q, k, v, do and dlse."""
    results: list[list[torch.Tensor]] = []
    for value in (torch.nan, -3e38):
        call = build(BY_NAME[case])
        for x in (call.q, call.k, call.v, call.dout, call.dlse):
            assert isinstance(x, torch.Tensor)
            x[torch.isnan(x)] = value
        out, lse, grads = call.gradients("triton", deterministic=True)
        results.append([out, lse, *grads.values()])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_rows_that_see_nothing_ignore_their_gradients() -> None:
    """NaN in do and q of rows that see nothing reaches no key, and only dlse reaches the sink."""
    call = build(Case("blind", seqlen=(70, 20), mask="causal", sink=True, heads=(2, 1)))
    assert call.dout is not None
    call.dout[:, :50] = torch.nan
    call.q[:, :50] = torch.nan
    _, _, grads = call.gradients("triton")
    assert not grads["q"][:, :50].any()
    assert all(torch.isfinite(x).all() for x in grads.values())


@pytest.mark.parametrize("mask", ["causal", "window_first"])
def test_a_sick_value_reaches_only_tiles_that_see_it(mask: str) -> None:
    """A key or query that no partner in a tile sees leaves that tile's gradients as they are, bit by bit."""
    case = Case("sick", batch=1, heads=(1, 1), seqlen=(130, 130), mask=mask)
    _, _, clean = build(case).gradients("triton")
    shown = torch.from_numpy(visible(build(case).mask, 0, 0, 130, 130))
    for first in (0, 64, 128):
        tile = slice(first, first + 64)
        for sides, names, seen in (
            (("k", "v"), ("q",), shown[tile].any(0)),
            (("q", "dout"), "kv", shown[:, tile].any(1)),
        ):
            call = build(case)
            for side in sides:
                getattr(call, side)[:, ~seen] = torch.nan
            _, _, grads = call.gradients("triton")
            for name in names:
                assert same_bits(grads[name][:, tile], clean[name][:, tile]), (first, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0])
def test_any_scale(scale: float, dtype: str) -> None:
    call = build(Case("scale", seqlen=(33, 70), mask="causal", scores="softcap", scale=scale, dtype=dtype, sink=True))
    _check(call)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 1, 0, 3), (3, 0, 1, 2)])
def test_any_strides_of_do(order: tuple[int, ...]) -> None:
    call = build(Case("do", seqlen=(33, 40), heads=(2, 1), mask="causal"))
    back = [order.index(n) for n in range(4)]
    assert call.dout is not None
    assert call.dlse is not None
    call.dout = call.dout.permute(order).contiguous().permute(back)
    call.dlse = call.dlse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    _check(call)


def _check(call: Call) -> None:
    wanted = expectation(call, backward=True)
    out, lse, grads = call.gradients("triton")
    wanted.check({"out": out, "lse": lse} | grads)


def test_offsets_that_lie() -> None:
    """Bad offsets and lengths never reach outside the tensors (the interpreter's loads would fault)."""
    from kilat.backends.triton import BACKEND

    call = build(Case("lies", "ragged", 2, lengths_q=(20, 20), lengths_kv=(20, 20), mask="documents"))
    problem, op = call.core()
    problem = replace(problem, grad_of=frozenset("qkv"), needs_grad=True)
    for offsets in ([0, 90, 40], [0, -5, 40], [7, 3, 2**31 - 1], [0, 40, 20]):
        op.cu_seqlens_q = op.cu_seqlens_kv = torch.tensor(offsets, dtype=torch.int32)
        out, lse = BACKEND.forward(problem, op)
        assert call.dout is not None
        BACKEND.backward(problem, op, out, lse, call.dout, None)
