"""The oracle against things that share nothing with it: scalar loops in Python, torch SDPA, finite differences."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from cases import BY_NAME, Case
from helpers import Call, build
from torch import Tensor

from kilat import reference
from kilat.reference_parts import philox4x32

# What a query sees, in scalars, as the semantics page writes it. t holds the mask's tensors.
SCALAR_MASKS = {
    "none": lambda b, h, i, q_pos, j, t: True,
    "causal": lambda b, h, i, q_pos, j, t: j <= q_pos,
    "causal_top_left": lambda b, h, i, q_pos, j, t: j <= i,
    "window": lambda b, h, i, q_pos, j, t: q_pos - 9 <= j <= q_pos + 4,
    "window_self": lambda b, h, i, q_pos, j, t: j == q_pos,
    "window_int32_max": lambda b, h, i, q_pos, j, t: True,
    "window_first": lambda b, h, i, q_pos, j, t: q_pos - 8 <= j <= q_pos or j < 3,
    "prefix": lambda b, h, i, q_pos, j, t: j <= q_pos or j < t[0][b],
    "chunked": lambda b, h, i, q_pos, j, t: j // 16 == math.floor(q_pos / 16),
    "key_range": lambda b, h, i, q_pos, j, t: t[0][b] <= j < t[1][b],
    "documents_batch": lambda b, h, i, q_pos, j, t: q_pos >= 0 and t[0][b][q_pos] == t[0][b][j] >= 0,
    "dense": lambda b, h, i, q_pos, j, t: bool(t[0][b][h][i][j]),
    "predicate": lambda b, h, i, q_pos, j, t: (q_pos + j) % 3 != h % 3,
    "predicate_tensor": lambda b, h, i, q_pos, j, t: (q_pos - j) % t[0][h] == 0,
    "causal_window": lambda b, h, i, q_pos, j, t: q_pos - 7 <= j <= q_pos,
}


def scalar_score(name: str, s: float, b: int, h: int, i: int, q_pos: int, j: int, tensors: list) -> float:
    """One score through the modifiers of a case, `tensors` in order of application."""
    if name == "softcap":
        return 2.0 * math.tanh(s / 2.0)
    if name == "alibi":
        return s - tensors[0][h] * abs(q_pos - j)
    if name == "bias":
        return s + tensors[0][b][h][i][j]
    if name == "score_tensor":
        return s + 0.5 * tensors[0][h][min(max(q_pos - j, -4), 4) + 4]
    if name == "all":  # softcap, alibi, bias, then the user's scores in the order given
        s = 5.0 * math.tanh(s / 5.0) - tensors[0][h] * abs(q_pos - j) + tensors[1][0][h][i][j]
        s += 0.5 * tensors[2][h][min(max(q_pos - j, -4), 4) + 4]
        return 3.0 * math.tanh(s / 3.0) + 0.01 * (q_pos - j)
    return s


def scalar_row(call: Call, b: int, h: int, i: int) -> tuple[list[float], float]:
    """(out, lse) of one dense row with nothing but Python's floats."""
    case = call.case
    q_len, kv_len = case.seqlen
    q_pos, kv_head = i + kv_len - q_len, h // (case.heads[0] // case.heads[1])
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    masks = [x.tolist() for x in call.mask.tensors()] if call.mask is not None else []
    _, op = call.core()
    tensors = [x.tolist() for group in op.score_tensors for x in group]
    weights: dict[int, float] = {}
    for j in range(kv_len):
        if SCALAR_MASKS[case.mask](b, h, i, q_pos, j, masks):
            dot = math.fsum(
                x * y for x, y in zip(call.q[b, i, h].tolist(), call.k[b, j, kv_head].tolist(), strict=True)
            )
            weights[j] = math.exp(scalar_score(case.scores, scale * dot, b, h, i, q_pos, j, tensors))
    total = math.fsum(weights.values())
    if call.sink is not None:
        total += math.exp(float(call.sink[h]))
    out = [0.0] * call.v.shape[-1]
    for j, weight in weights.items():
        keep = 1.0 if case.dropout != "keep" else float(call.dropout.keep[b, h, i, j]) / (1.0 - case.dropout_p)
        for c, value in enumerate(call.v[b, j, kv_head].tolist()):
            out[c] += weight / total * keep * value
    return out, math.log(total) if total else -math.inf


SCALAR = [
    Case(f"scalar-{mask}-{q}x{kv}", seqlen=(q, kv), mask=mask, heads=(4, 2), head_dim=3, head_dim_v=2, sink=q == 9)
    for mask in SCALAR_MASKS
    for q, kv in [(9, 9), (12, 7), (5, 20)]
] + [
    Case(f"scalar-{scores}", seqlen=(7, 11), mask="causal", scores=scores, sink=True, dropout="keep", head_dim=5)
    for scores in ("softcap", "alibi", "bias", "score_tensor", "all")
]


@pytest.mark.parametrize("case", SCALAR, ids=str)
def test_forward_equals_scalar_loops(case: Case) -> None:
    call = build(case)
    out, lse = reference.forward(*call.core(), exact=True)
    for b in range(case.batch):
        for h in range(case.heads[0]):
            for i in range(case.seqlen[0]):
                row, total = scalar_row(call, b, h, i)
                assert out[b, i, h].tolist() == pytest.approx(row, abs=1e-13)
                assert float(lse[b, h, i]) == pytest.approx(total, abs=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_equals_sdpa(causal: bool) -> None:
    call = build(Case("sdpa", seqlen=(33, 33), heads=(4, 2), mask="causal" if causal else "none", dtype="float64"))
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(reference.forward(*call.core(), exact=True)[0], expected.transpose(1, 2))


class Oracle(torch.autograd.Function):
    """The oracle with its analytic backward, for gradcheck."""

    @staticmethod
    def forward(ctx, call: Call, *inputs: Tensor):
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return reference.forward(*call.core(), exact=True)

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor):
        grads = reference.backward(*ctx.call.core(), None, None, dout, dlse, exact=True)
        by_name = {"q": grads.q, "k": grads.k, "v": grads.v, "sink": grads.sink}
        by_name |= {f"score.{n}.{m}": x for n, group in enumerate(grads.score_tensors) for m, x in enumerate(group)}
        return None, *(by_name[name] for name in ctx.call.inputs())


GRADIENTS = [
    Case(f"gradcheck-{mask}-{scores}-{dropout}", mask=mask, scores=scores, dropout=dropout, **options)
    for mask, scores, dropout, options in [
        ("none", "none", "", {}),
        ("causal", "softcap", "philox", {"heads": (4, 2), "sink": True}),
        ("window_first", "bias_keys", "keep", {"heads": (2, 1)}),
        ("dense", "bias", "", {"sink": True}),
        ("causal", "bias_heads", "", {"layout": "ragged", "lengths_q": (3, 0, 4), "lengths_kv": (2, 3, 4), "batch": 3}),
        ("causal", "score_tensor", "", {"layout": "padded", "lengths_q": (3, 2), "lengths_kv": (5, 1)}),
        ("prefix", "all", "philox", {"sink": True}),
        ("none", "score_derivative", "", {"scale": -0.9}),
        ("none", "score", "", {}),
    ]
]


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients_equal_finite_differences(case: Case) -> None:
    call = build(replace(case, seqlen=(3, 5), head_dim=2, head_dim_v=1, dtype="float64"))
    if call.sink is not None:
        call.sink = call.sink.double()
    for side in (call.q, call.k, call.v):  # gradcheck cannot difference NaN padding
        side.nan_to_num_(0.0)
    inputs = [x.requires_grad_() for x in call.inputs().values()]

    def used(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = Oracle.apply(call, *tensors)
        return out, torch.where(lse > -torch.inf, lse, 0.0)  # -inf cannot be differenced either

    assert torch.autograd.gradcheck(used, inputs)


@pytest.mark.parametrize("name", ["float64-rich", "d17-17-float32", "score-all-none", "dropout-philox-0.1-none"])
def test_gradients_equal_autograd(name: str) -> None:
    call = build(BY_NAME[name])
    problem, op = call.core()
    inputs = list(call.inputs().values())
    for x in inputs:
        x.requires_grad_()
    out, lse = reference.forward(problem, op, exact=True)
    dlse = torch.where(lse > -torch.inf, call.dlse.double(), 0.0)
    by_autograd = torch.autograd.grad((out, lse), inputs, (call.dout.double(), dlse))
    with torch.no_grad():
        grads = reference.backward(problem, op, None, None, call.dout, dlse, exact=True)
    for name_of, expected in zip(call.inputs(), by_autograd, strict=True):
        actual = getattr(grads, name_of, None)
        if name_of.startswith("score"):
            n, m = (int(x) for x in name_of.split(".")[1:])
            actual = grads.score_tensors[n][m]
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}[expected.dtype]
        torch.testing.assert_close(actual, expected.double(), rtol=tolerance, atol=tolerance * 10)


def test_layouts_agree() -> None:
    """Padded, ragged, cached and paged storage of the same sequences give the same numbers."""
    lengths = {"lengths_q": (5, 0, 9), "lengths_kv": (7, 3, 9), "batch": 3, "heads": (4, 2), "mask": "window_first"}
    padded = build(Case("layouts", "padded", seqlen=(9, 48), dropout="", sink=True, **lengths))
    out, lse = reference.forward(*padded.core(), exact=True)
    others = {
        layout: build(Case("layouts", layout, seqlen=(9, 48), sink=True, **lengths))
        for layout in ("ragged", "cached", "paged")
    }
    for layout, call in others.items():
        call.sink = padded.sink
        starts_q, starts_kv = [0, 5, 5, 14], [0, 7, 10, 19]
        for b in range(3):
            q_len, kv_len = lengths["lengths_q"][b], lengths["lengths_kv"][b]
            call.q[starts_q[b] : starts_q[b + 1]] = padded.q[b, :q_len]
            for mine, theirs in ((call.k, padded.k), (call.v, padded.v)):
                if layout == "ragged":
                    mine[starts_kv[b] : starts_kv[b + 1]] = theirs[b, :kv_len]
                elif layout == "cached":
                    mine[b, :kv_len] = theirs[b, :kv_len]
                else:
                    j = torch.arange(kv_len)
                    mine[call.lengths["page_table"][b, j // 16].long(), j % 16] = theirs[b, :kv_len]
        other, other_lse = reference.forward(*call.core(), exact=True)
        for b in range(3):
            rows = slice(starts_q[b], starts_q[b + 1])
            q_len = lengths["lengths_q"][b]
            assert torch.equal(other[rows], out[b, :q_len]), layout
            assert torch.equal(other_lse[:, rows], lse[b, :, :q_len]), layout
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()


def test_chosen_rows_and_heads() -> None:
    call = build(Case("sampled", seqlen=(530, 300), heads=(4, 2), head_dim=8, mask="causal"))
    problem, op = call.core()
    out, lse = reference.forward(problem, op, exact=True)
    whole = reference.backward(problem, op, None, None, call.dout, call.dlse, exact=True)
    rows = torch.tensor([0, 229, 230, 511, 512, 529])
    some, some_lse = reference.forward(problem, op, exact=True, rows=rows, heads=(2, 3))
    grads = reference.backward(problem, op, None, None, call.dout, call.dlse, exact=True, heads=(2, 3))
    # equal up to the order of sums, in which a BLAS may treat six rows and 512 differently
    close = functools.partial(torch.testing.assert_close, rtol=1e-13, atol=1e-13)
    close(some[:, rows, 2:], out[:, rows, 2:])
    close(some_lse[:, 2:, rows], lse[:, 2:, rows])
    assert not some[:, :, :2].any()
    close(grads.q[:, :, 2:], whole.q[:, :, 2:])
    close(grads.k[:, :, 1], whole.k[:, :, 1])


def test_philox_known_answers() -> None:
    """The vectors that Random123 publishes for philox4x32-10."""
    import numpy as np

    pi = ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0])
    for (counter, key), answer in [
        (([0] * 4, [0] * 2), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]:
        words = philox4x32([np.array([x], np.uint64) for x in counter], key)
        assert " ".join(f"{int(x[0]):08x}" for x in words) == answer


@pytest.mark.parametrize("side", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_rows_reach_only_who_sees_them(side: str, value: float) -> None:
    """Row or key 20 of batch entry 1 is not finite: exactly the rows and keys that see it may change."""
    call, clean = (build(Case("sick", seqlen=(40, 40), mask="causal")) for _ in range(2))
    getattr(call, side)[1, 20, :, 0] = value
    results = []
    for one in (call, clean):
        out, _ = reference.forward(*one.core(), exact=True)
        grads = reference.backward(*one.core(), None, None, one.dout, one.dlse, exact=True)
        results.append((out, grads.q, grads.k, grads.v))
    (out, dq, dk, dv), (out_clean, dq_clean, dk_clean, dv_clean) = results
    rows = slice(0, 20) if side in ("k", "v") else [n for n in range(40) if n != 20]
    assert torch.equal(out[1, rows], out_clean[1, rows])
    assert torch.equal(dq[1, rows], dq_clean[1, rows])
    if side in ("q", "dout"):  # row 20 sees keys up to 20
        assert torch.equal(dk[1, 21:], dk_clean[1, 21:])
        assert torch.equal(dv[1, 21:], dv_clean[1, 21:])
    for sick, well in zip(results[0], results[1], strict=True):
        assert torch.equal(sick[0], well[0])
