"""Ragged batches: every case within budget, equal to padded ones, no sequence in another's bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import CASES, Case
from helpers import BACKENDS, build, expected, same_bits, skip_unless_supported

import kilat

RAGGED = [case for case in CASES if case.layout == "ragged"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_ragged(case: Case, backend: str) -> None:
    call = build(case)
    skip_unless_supported(call, backend)
    out, lse, grads = call.gradients(backend)
    assert lse.shape == (case.heads[0], call.q.shape[0])
    expected(case, backward=True).check({"out": out, "lse": lse} | grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_past_the_last_offset(backend: str) -> None:
    """out 0, lse -inf even with a sink, gradients 0; what stands there never matters."""
    call = build(Case("tail", "ragged", lengths_q=(5, 9), lengths_kv=(9, 9), tail=4, sink=True))
    out, lse, grads = call.gradients(backend)
    assert not out[14:].any()
    assert (lse[:, 14:] == -torch.inf).all()
    assert not grads["q"][14:].any()
    assert not grads["k"][18:].any()
    assert not grads["v"][18:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hints", [(None, None), (63, 70), (1000, 1000)])
def test_hints_change_nothing(backend: str, hints: tuple[int | None, int | None]) -> None:
    call = build(next(case for case in RAGGED if case.name == "ragged-causal"))
    plain = call.run(backend)
    hinted = call.run(backend, max_seqlen_q=hints[0], max_seqlen_kv=hints[1])
    assert all(same_bits(a, b) for a, b in zip(plain, hinted, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_sequence_touches_another(backend: str, dtype: str) -> None:
    """NaN in the middle sequence leaves every bit of the others, gradients under deterministic=True."""
    case = Case(
        "apart", "ragged", 3, heads=(4, 2), lengths_q=(40, 33, 65), lengths_kv=(70, 33, 65), mask="causal", dtype=dtype
    )
    clean, sick = build(case), build(case)
    for x, rows in ((sick.q, slice(40, 73)), (sick.k, slice(70, 103)), (sick.v, slice(70, 103))):
        x[rows] = torch.nan
    results = [call.gradients(backend, deterministic=True) for call in (clean, sick)]
    (out, lse, grads), (out_sick, lse_sick, grads_sick) = results
    for rows in (slice(0, 40), slice(73, None)):
        assert same_bits(out[rows], out_sick[rows])
        assert same_bits(lse[:, rows], lse_sick[:, rows])
        assert same_bits(grads["q"][rows], grads_sick["q"][rows])
    for rows in (slice(0, 70), slice(103, None)):
        assert same_bits(grads["k"][rows], grads_sick["k"][rows])
        assert same_bits(grads["v"][rows], grads_sick["v"][rows])


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_invariant(backend: str) -> None:
    """A request's bits depend neither on its companions nor on their number."""
    case = Case(
        "alone", "ragged", 4, heads=(4, 2), lengths_q=(1, 40, 3, 200), lengths_kv=(300, 40, 5, 200), mask="causal"
    )
    call = build(case)
    options = {"mask": kilat.Causal(), "batch_invariant": True, "return_lse": True, "backend": backend}
    q, k, v, offsets = call.q, call.k, call.v, call.lengths
    out, lse = kilat.ragged_attention(q, k, v, offsets["cu_seqlens_q"], offsets["cu_seqlens_kv"], **options)
    for b in range(4):
        (q0, q1), (k0, k1) = (offsets[f"cu_seqlens_{side}"][b : b + 2].tolist() for side in ("q", "kv"))
        one = [torch.tensor([0, n], dtype=torch.int32) for n in (q1 - q0, k1 - k0)]
        alone, alone_lse = kilat.ragged_attention(q[q0:q1], k[k0:k1], v[k0:k1], *one, **options)
        assert same_bits(alone, out[q0:q1])
        assert same_bits(alone_lse, lse[:, q0:q1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scores", ["none", "all"])
def test_ragged_equals_padded(backend: str, scores: str) -> None:
    """The same sequences, padded: masks, scores and dropout count inside a sequence, so results agree within budget."""
    lengths = {"lengths_q": (9, 0, 33), "lengths_kv": (40, 5, 20), "batch": 3, "scores": scores, "mask": "prefix"}
    padded_case = Case("same", "padded", seqlen=(33, 40), dropout="philox", heads=(4, 2), **lengths)
    padded, ragged = build(padded_case), build(replace(padded_case, layout="ragged"))
    ragged.mask, ragged.scores = padded.mask, padded.scores
    starts_q, starts_kv = ragged.lengths["cu_seqlens_q"].tolist(), ragged.lengths["cu_seqlens_kv"].tolist()
    for b in range(3):
        ragged.q[starts_q[b] : starts_q[b + 1]] = padded.q[b, : lengths["lengths_q"][b]]
        for name in ("k", "v"):
            theirs = getattr(padded, name)[b, : lengths["lengths_kv"][b]]
            getattr(ragged, name)[starts_kv[b] : starts_kv[b + 1]] = theirs
    out, lse = ragged.run(backend)
    exact = expected(padded_case)
    spread, spread_lse = torch.zeros_like(padded.dout), torch.full_like(exact.exact["lse"], -torch.inf)
    for b, length in enumerate(lengths["lengths_q"]):
        spread[b, :length] = out[starts_q[b] : starts_q[b + 1]]
        spread_lse[b, :, :length] = lse[:, starts_q[b] : starts_q[b + 1]]
    exact.check({"out": spread, "lse": spread_lse})
