"""NaN never comes from memory that nobody wrote, from storage that nobody owns, or from rows that see nothing."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, CASES, Case
from helpers import BACKENDS, Call, build, expectation, expected, poisoned_memory, same_bits

import kilat
from kilat import numerics

# One of every kind: sizes that leave parts of tiles unused, empty rows, empty sequences, splits, every modifier.
SAMPLE = [
    case for case in CASES if case.name.startswith(("zero-", "q1-", "q65-", "padded", "ragged-empty", "ragged-a"))
]
SAMPLE += [
    case for case in CASES if case.name.endswith(("-rich", "-long", "-decode-all", "everything-70x37", "-prefill"))
]
SAMPLE += [
    BY_NAME[name] for name in ("mask-key_range_empty-65x65", "score-bias_holes-causal", "ragged-tail", "d1-1-float32")
]
SAMPLE += [
    BY_NAME[name] for name in ("d251-127-bfloat16", "paged-ragged", "cached-empty", "paged-empty", "float16-bias")
]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_poisoned_memory(case: Case, backend: str) -> None:
    """Everything that kilat allocates unwritten holds NaN first; results do not change a bit."""
    call = build(case)
    if case.cached:
        plain = list(call.run(backend))
        with poisoned_memory():
            again = list(call.run(backend))
    else:
        out, lse, grads = call.gradients(backend, deterministic=True)
        plain = [out, lse, *grads.values()]
        with poisoned_memory() as seen:
            out, lse, grads = build(case).gradients(backend, deterministic=True)
        again = [out, lse, *grads.values()]
        assert seen or not out.numel(), "nothing was poisoned"
    for a, b in zip(plain, again, strict=True):
        assert not torch.isnan(b).any()
        assert same_bits(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_padding_never_changes_a_bit(backend: str, dtype: str) -> None:
    """Rows past a used length may hold anything in q, k, v, do and dlse."""
    case = Case(
        "padding",
        "padded",
        3,
        heads=(4, 2),
        seqlen=(70, 90),
        lengths_q=(70, 0, 33),
        lengths_kv=(1, 90, 65),
        dtype=dtype,
    )
    results = []
    for value in (torch.nan, 0.0, torch.inf, -3e38):
        call = build(case)
        for x in (call.q, call.k, call.v, call.dout, call.dlse):
            x[torch.isnan(x)] = value
        out, lse, grads = call.gradients(backend, deterministic=True)
        results.append([out, lse, *grads.values()])
        assert not out[0, 70:].any()
        assert (lse[1] == -torch.inf).all()
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("mask", ["key_range_empty", "causal"])
def test_rows_that_see_nothing(backend: str, sink: bool, mask: str) -> None:
    """out 0, lse -inf (or the sink), no gradient but dlse to the sink."""
    call = build(Case("nothing", seqlen=(70, 20), mask=mask, sink=sink, heads=(4, 2), scores="bias"))
    empty = slice(None) if mask == "key_range_empty" else slice(0, 50)
    out, lse, grads = call.gradients(backend)
    assert not out[:, empty].any()
    wanted = (
        call.sink[None, :, None].expand_as(lse[..., empty]) if sink else torch.full_like(lse[..., empty], -torch.inf)
    )
    torch.testing.assert_close(lse[..., empty], wanted, rtol=1e-6, atol=0)
    assert not grads["q"][:, empty].any()
    assert not grads["score.0.0"][:, :, empty].any()
    assert all(torch.isfinite(x).all() for x in grads.values())
    if mask == "key_range_empty" and sink:
        torch.testing.assert_close(grads["sink"], call.dlse.sum((0, 2)))


def _sick(case: Case, side: str, where: int, value: float) -> Call:
    call = build(case)
    getattr(call, side)[1, where, 0, 0] = value
    return call


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("side", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sick_row_reaches_only_who_sees_it(backend: str, dtype: str, side: str, value: float) -> None:
    """Row or key 100 of batch entry 1, head 0 is not finite: what does not see it stays within its budget."""
    if backend not in ("cpu", "reference"):
        pytest.skip("GPUs may spread it over a tile")
    case = Case("sick", seqlen=(200, 200), heads=(2, 2), mask="causal", dtype=dtype)
    exact = expected(case, backward=True)
    out, lse, grads = build(case).gradients(backend, deterministic=True)
    found, found_lse, found_grads = _sick(case, side, 100, value).gradients(backend, deterministic=True)
    clean, sick = {"out": out, "lse": lse} | grads, {"out": found, "lse": found_lse} | found_grads
    rows = torch.arange(200)
    blind_rows = rows < 100 if side in ("k", "v") else rows != 100
    blind = {"q": blind_rows, "out": blind_rows if side != "dout" else rows >= 0, "lse": rows >= 0}
    blind |= dict.fromkeys(("k", "v"), rows > 100 if side in ("q", "dout") else rows < 0)
    if side in ("q", "k"):
        blind["lse"] = blind_rows
    for name, free in blind.items():
        a, b, wanted = (x.transpose(1, 2) if name == "lse" else x for x in (clean[name], sick[name], exact.exact[name]))
        numerics.check(name, b[1, free, 0], wanted[1, free, 0], exact.budgets[name])
        assert same_bits(a[:, :, 1], b[:, :, 1]), name  # another head
        assert same_bits(a[0], b[0]), name  # another sequence
    if side != "dout" and value != torch.inf:
        assert torch.isnan(found[1, ~blind_rows, 0]).any(-1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["window", "dense", "predicate", "window_first"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sick_value_that_is_hidden(backend: str, mask: str, dtype: str) -> None:
    """Under any mask, exactly the rows that see a NaN value become NaN."""
    if backend not in ("cpu", "reference"):
        pytest.skip("GPUs may spread it over a tile")
    case = Case("hidden", seqlen=(70, 70), mask=mask, dtype=dtype)
    call = _sick(case, "v", 33, torch.nan)
    out, _ = call.run(backend)
    from kilat.reference_parts import places, visible

    problem, op = call.core()
    at = list(places(problem, op))[1]
    sees = visible(problem, op, at, 0, torch.arange(70))[:, 33]
    assert torch.equal(torch.isnan(out[1, :, 0, 0]), sees)
    assert not torch.isnan(out[1, :, 0, 1:]).any()
    assert not torch.isnan(out[0]).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_minus_infinity_in_a_bias_hides(backend: str, dtype: str) -> None:
    """Only -inf hides a key, and then also a NaN value there; the lowest finite number is a number."""
    case = Case("minus", seqlen=(33, 40), dtype=dtype)
    call = _sick(case, "v", 7, torch.nan)
    bias = torch.zeros(1, 1, 1, 40, dtype=call.q.dtype)
    bias[..., 7] = -torch.inf
    call.scores = (kilat.Bias(bias),)
    out, lse = call.run(backend)
    other = build(case)
    other.mask = kilat.Dense((torch.arange(40) != 7)[None])
    expectation(other).check({"out": out, "lse": lse})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_lowest_number_hides_nothing(backend: str, dtype: str) -> None:
    """A bias near the lowest number everywhere leaves the mean of the values; -inf instead leaves nothing."""
    call = build(Case("lowest", seqlen=(33, 40), dtype=dtype))
    bias = torch.full((1, 1, 1, 40), torch.finfo(call.q.dtype).min / 2, dtype=call.q.dtype)
    call.scores = (kilat.Bias(bias),)
    out, lse = call.run(backend)
    assert torch.isfinite(lse).all()
    mean = call.v.double().mean(1, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.double(), mean, rtol=2e-2, atol=2e-2)
    bias.fill_(-torch.inf)
    out, lse = call.run(backend)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["float32-huge", "bfloat16-huge", "float64-huge", "float16-huge"])
def test_huge_scores_stay_finite(backend: str, name: str) -> None:
    out, lse, grads = build(BY_NAME[name]).gradients(backend)
    assert all(torch.isfinite(x).all() for x in (out, lse, *grads.values()))
    expected(BY_NAME[name]).check({"out": out, "lse": lse})
