"""Attention over caches: every case within budget, decode loops, garbage, splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BY_NAME, CASES, QUANTISED, Case
from helpers import BACKENDS, build, expectation, expected, same_bits, skip_unless_supported
from hypothesis import given
from hypothesis import strategies as st

import kilat

CACHED = [case for case in CASES if case.cached]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CACHED, ids=str)
def test_cached(case: Case, backend: str) -> None:
    call = build(case)
    skip_unless_supported(call, backend)
    out, lse = call.run(backend)
    assert out.shape == (*call.q.shape[:-1], call.v.shape[-1])
    assert lse.shape == (*call.q.shape[:-3], call.q.shape[-2], call.q.shape[-3])
    expected(case).check({"out": out, "lse": lse})


@st.composite
def random_caches(draw: st.DrawFn) -> Case:
    """Random decode, speculative and prefill steps, with and without offsets for the queries."""
    batch, heads_kv = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    lengths_kv = tuple(draw(st.sampled_from([0, 1, 2, 15, 63, 64, 65, 130, 257])) for _ in range(batch))
    ragged = draw(st.booleans())
    return Case(
        "random",
        draw(st.sampled_from(["cached", "paged"])),
        batch,
        heads=(heads_kv * draw(st.sampled_from([1, 2, 5, 8])), heads_kv),
        seqlen=(draw(st.integers(0, 9)), 260),
        lengths_q=tuple(draw(st.integers(0, 20)) for _ in range(batch)) if ragged else None,
        lengths_kv=lengths_kv,
        tail=draw(st.integers(0, 2)) if ragged else 0,
        head_dim=draw(st.sampled_from([1, 17, 64])),
        head_dim_v=draw(st.sampled_from([None, 1, 33])),
        dtype=draw(st.sampled_from(["float32", "float64", "bfloat16", "float16"])),
        mask=draw(st.sampled_from(["none", "causal", "window_first", "prefix", "documents_batch", "everything"])),
        scores=draw(st.sampled_from(["none", "softcap", "alibi_batch", "bias_keys", "score_tensor", "all"])),
        sink=draw(st.booleans()),
        strides=draw(st.sampled_from(["contiguous", "heads_first", "sliced"])),
        page_size=draw(st.sampled_from([1, 7, 16, 64, 300])),
        kv=draw(st.sampled_from(["", "", *QUANTISED])),
    )


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@given(case=random_caches(), num_splits=st.sampled_from([None, 1, 3]))
def test_random_caches(backend: str, case: Case, num_splits: int | None) -> None:
    call = build(case)
    out, lse = call.run(backend, num_splits=num_splits)
    expectation(call).check({"out": out, "lse": lse})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["cached-long", "paged-long", "paged-ragged", "paged-decode-all"])
@pytest.mark.parametrize("num_splits", [None, 1, 2, 7, 100])
def test_splits_are_as_exact(backend: str, name: str, num_splits: int | None) -> None:
    out, lse = build(BY_NAME[name]).run(backend, num_splits=num_splits)
    expected(BY_NAME[name]).check({"out": out, "lse": lse})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["cached", "paged"])
def test_batch_invariant(backend: str, layout: str) -> None:
    """A request's bits are the same alone and among others."""
    case = Case("decode", layout, 3, heads=(4, 2), seqlen=(2, 1600), lengths_kv=(1600, 9, 700), mask="causal")
    call = build(case)
    out, lse = call.run(backend, batch_invariant=True)
    for b in range(3):
        one = build(case)
        one.q = call.q[b : b + 1]
        one.lengths = {name: x[b : b + 1] for name, x in call.lengths.items()}
        one.k, one.v = (call.k, call.v) if layout == "paged" else (call.k[b : b + 1], call.v[b : b + 1])
        alone, alone_lse = one.run(backend, batch_invariant=True)
        assert same_bits(alone, out[b : b + 1])
        assert same_bits(alone_lse, lse[b : b + 1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["cached", "paged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_garbage_never_changes_a_bit(backend: str, layout: str, dtype: str) -> None:
    """What no sequence owns may hold NaN, infinities or numbers."""
    case = Case("garbage", layout, 3, heads=(4, 2), seqlen=(3, 90), lengths_kv=(3, 77, 0), mask="causal", dtype=dtype)
    poisoned = build(case)
    first = poisoned.run(backend)
    for value in (0.0, torch.inf, -1e30):
        call = build(case)
        for x in (call.k, call.v):
            x[torch.isnan(x)] = value
        assert all(same_bits(a, b) for a, b in zip(first, call.run(backend), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["cached", "paged"])
def test_decode_loop_equals_prefill(backend: str, layout: str) -> None:
    """Appending 5 tokens, then one, then 3, and attending after each gives the rows of one causal attention."""
    case = Case("loop", heads=(4, 2), seqlen=(9, 9), mask="causal", sink=True)
    whole = build(case)
    k, v = (torch.full((2, 12, 2, 16), torch.nan) for _ in range(2))
    lengths = torch.zeros(2, dtype=torch.int32)
    if layout == "cached":
        cache = kilat.ContiguousCache(k, v, lengths)
    else:
        table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
        cache = kilat.PagedCache(*(x.reshape(6, 4, 2, 16).contiguous() for x in (k, v)), table, lengths)
    outs = []
    for start, stop in [(0, 5), (5, 6), (6, 9)]:
        new = slice(start, stop)
        cache.append(whole.k[:, new], whole.v[:, new])
        outs.append(kilat.cached_attention(whole.q[:, new], cache, sink=whole.sink, backend=backend))
    assert lengths.tolist() == [9, 9]
    expected(case).check({"out": torch.cat(outs, 1)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_inside_the_keys(backend: str) -> None:
    """Absorbed MLA: 576 channels of keys, the first 512 of which are the values, one kv head."""
    case = Case("mla", "paged", 2, heads=(8, 1), seqlen=(1, 64), lengths_kv=(64, 33), head_dim=576, head_dim_v=512)
    call = build(replace(case, mask="causal", scale=0.1))
    call.v = call.k[..., :512]
    wanted = expectation(call)
    cache = kilat.PagedCache(call.k, None, call.lengths["page_table"], call.lengths["seqlens_kv"], head_dim_v=512)
    out, lse = kilat.cached_attention(call.q, cache, scale=0.1, return_lse=True, backend=backend)
    wanted.check({"out": out, "lse": lse})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["cached", "paged"])
def test_out_buffer(backend: str, layout: str) -> None:
    call = build(BY_NAME[f"{layout}-prefill"])
    buffer = torch.full((*call.q.shape[:-1], call.v.shape[-1] + 3), torch.nan)[..., :-3]
    out, _ = call.run(backend, out=buffer)
    assert out.data_ptr() == buffer.data_ptr()
    assert same_bits(buffer, call.run(backend)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_refused(backend: str) -> None:
    call = build(BY_NAME["cached-four"])
    call.q.requires_grad_()
    with pytest.raises(ValueError, match="caches are forward only"):
        call.run(backend)
    with torch.no_grad():
        call.run(backend)
