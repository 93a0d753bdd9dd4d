"""The public calls: what they return, that they agree with one another, and that options mean what they say."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import BACKENDS

import kilat
from kilat.planning import clear
from kilat.problem import Options, Problem

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def make(batch: int = 2, seqlen_q: int = 5, seqlen_kv: int = 7, dtype: torch.dtype = torch.float32) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    shapes = ((batch, seqlen_q, 4, 8), (batch, seqlen_kv, 2, 8), (batch, seqlen_kv, 2, 6))
    return [torch.randn(s, generator=g, dtype=dtype) for s in shapes]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_shapes_and_dtypes(backend: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        out, lse = kilat.attention(*make(dtype=dtype), return_lse=True, backend=backend)
        assert (out.shape, out.dtype) == ((2, 5, 4, 6), dtype)
        assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float64 if dtype == torch.float64 else torch.float32)
    out = kilat.attention(*make(dtype=torch.bfloat16), out_dtype=torch.float32, backend=backend)
    assert out.dtype == torch.float32


def test_agrees_with_torch(backend: str) -> None:
    q, k, v = make(seqlen_q=7)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    close(kilat.attention(q, k, v, mask=kilat.Causal(), backend=backend).transpose(1, 2), wanted)


def test_zero_and_negative_scales_are_values(backend: str) -> None:
    q, k, v = make()
    flat = kilat.attention(q, k, v, scale=0.0, backend=backend)
    close(flat, v.repeat_interleave(2, 2).mean(1, keepdim=True).expand_as(flat))
    close(kilat.attention(q, k, v, scale=-0.5, backend=backend), kilat.attention(-q, k, v, scale=0.5, backend=backend))
    close(kilat.attention(q, k, v, backend=backend), kilat.attention(q, k, v, scale=8**-0.5, backend=backend))


def test_scores_apply_in_one_order(backend: str) -> None:
    args = make()
    cap, alibi, bias = kilat.Softcap(2.0), kilat.Alibi(torch.rand(4)), kilat.Bias(torch.randn(5, 7))
    a = kilat.attention(*args, scores=(cap, alibi, bias), backend=backend)
    assert torch.equal(a, kilat.attention(*args, scores=[bias, alibi, cap], backend=backend))


def test_padded_and_ragged_are_the_same_sequences(backend: str) -> None:
    q, k, v = make(3, 6, 9)
    len_q, len_kv = torch.tensor([6, 0, 4], dtype=torch.int32), torch.tensor([9, 5, 2], dtype=torch.int32)
    mask, dropout = kilat.Window(3, 1), kilat.Dropout(0.3, seed=5, offset=9)
    more: dict[str, Any] = {"mask": mask, "dropout": dropout, "return_lse": True, "backend": backend}
    out, lse = kilat.attention(q, k, v, seqlens_q=len_q, seqlens_kv=len_kv, **more)
    keep_q = torch.arange(6)[None] < len_q[:, None]
    keep_kv = torch.arange(9)[None] < len_kv[:, None]
    cu_q, cu_kv = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (len_q, len_kv))
    flat, flat_lse = kilat.ragged_attention(q[keep_q], k[keep_kv], v[keep_kv], cu_q, cu_kv, **more)
    close(out[keep_q], flat)
    close(lse.transpose(1, 2)[keep_q], flat_lse.T)
    assert (out[~keep_q] == 0).all()
    assert (lse.transpose(1, 2)[~keep_q] == -torch.inf).all()


def test_hints_change_nothing(backend: str) -> None:
    q, k, v = (torch.randn(9, h, 8) for h in (4, 2, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    plain = kilat.ragged_attention(q, k, v, cu, cu, mask=kilat.Causal(), backend=backend)
    hinted = kilat.ragged_attention(
        q, k, v, cu, cu, max_seqlen_q=5, max_seqlen_kv=64, mask=kilat.Causal(), backend=backend
    )
    assert torch.equal(plain, hinted)


def test_any_strides(backend: str) -> None:
    q, k, v = make()
    wanted = kilat.attention(q, k, v, backend=backend)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(kilat.attention(*swapped, backend=backend), wanted)
    far = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    assert torch.equal(kilat.attention(*far, backend=backend), wanted)
    every_other = [torch.stack((x, x + 1), -1)[..., 0] for x in (q, k, v)]
    assert torch.equal(kilat.attention(*every_other, backend=backend), wanted)
    expanded = k[:, :, :1].expand(2, 7, 2, 8)
    assert torch.equal(
        kilat.attention(q, expanded, v, backend=backend), kilat.attention(q, expanded.contiguous(), v, backend=backend)
    )


def test_lazy_negation_is_never_misread(backend: str) -> None:
    z = torch.randn(2, 5, 4, 8, dtype=torch.complex64)
    q, k, v = z.conj().imag, z[:, :, :2].conj().imag, z[:, :, :2].real
    assert q.is_neg()
    real = [x.resolve_neg().contiguous() for x in (q, k, v)]
    assert torch.equal(kilat.attention(q, k, v, backend=backend), kilat.attention(*real, backend=backend))
    thin = [x[..., :1] for x in (q, k, v)]
    real = [x.resolve_neg().contiguous() for x in thin]
    assert torch.equal(kilat.attention(*thin, backend=backend), kilat.attention(*real, backend=backend))


def test_expanded_bias_costs_no_copy_and_says_the_same(backend: str) -> None:
    q, k, v = make()
    row = torch.randn(7)
    wanted = kilat.attention(q, k, v, scores=(kilat.Bias(row.repeat(2, 4, 5, 1)),), backend=backend)
    got = kilat.attention(q, k, v, scores=(kilat.Bias(row.expand(2, 4, 5, 7)),), backend=backend)
    close(got, wanted)
    column = torch.randn(5, 1)
    wanted = kilat.attention(q, k, v, scores=(kilat.Bias(column.repeat(1, 7)),), backend=backend)
    close(kilat.attention(q, k, v, scores=(kilat.Bias(column.expand(5, 7)),), backend=backend), wanted)


def test_dropout_draws_from_torch(backend: str) -> None:
    args, drop = make(), kilat.Dropout(0.5)
    torch.manual_seed(7)
    first = kilat.attention(*args, dropout=drop, backend=backend)
    assert not torch.equal(first, kilat.attention(*args, dropout=drop, backend=backend))
    torch.manual_seed(7)
    assert torch.equal(first, kilat.attention(*args, dropout=drop, backend=backend))
    mine = [kilat.Dropout(0.5, generator=torch.Generator().manual_seed(3)) for _ in "ab"]
    a, b = (kilat.attention(*args, dropout=d, backend=backend) for d in mine)
    assert torch.equal(a, b)


def test_dropout_seeds_as_ints_and_tensors(backend: str) -> None:
    args = make()
    a = kilat.attention(*args, dropout=kilat.Dropout(0.5, seed=11, offset=3), backend=backend)
    seed, offset = torch.tensor(11), torch.tensor(3)
    b = kilat.attention(*args, dropout=kilat.Dropout(0.5, seed=seed, offset=offset), backend=backend)
    assert torch.equal(a, b)
    none = kilat.attention(*args, dropout=kilat.Dropout(0.0), backend=backend)
    assert torch.equal(none, kilat.attention(*args, backend=backend))
    assert (kilat.attention(*args, dropout=kilat.Dropout(1.0), backend=backend) == 0).all()


def test_autocast_casts(backend: str) -> None:
    q, k, v = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kilat.attention(q, k.bfloat16(), v, backend=backend)
        double = kilat.attention(*make(dtype=torch.float64), backend=backend)
    assert out.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    assert torch.equal(out, kilat.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), backend=backend))


def test_a_new_call_of_a_known_kind_reads_its_own_tensors(backend: str) -> None:
    clear()
    q, k, v = make()
    for n in range(3):
        bias, start = torch.randn(5, 7), torch.tensor([n, 1], dtype=torch.int32)
        stop = torch.tensor([7, 5], dtype=torch.int32)
        more: dict[str, Any] = {"scores": (kilat.Bias(bias),), "mask": kilat.KeyRange(start, stop)}
        out = kilat.attention(q, k, v, **more, backend=backend)
        clear()
        close(out, kilat.attention(q, k, v, **more, backend="reference"))


def test_empty_calls(backend: str) -> None:
    for batch, seqlen_q, seqlen_kv in ((0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)):
        out, lse = kilat.attention(*make(batch, seqlen_q, seqlen_kv), return_lse=True, backend=backend)
        assert out.shape == (batch, seqlen_q, 4, 6)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def test_merge_of_key_parts_is_the_whole(backend: str) -> None:
    q, k, v = make(dtype=torch.float64)
    whole = kilat.attention(q, k, v, return_lse=True, backend=backend)
    parts = [
        kilat.attention(q, k[:, a:b], v[:, a:b], return_lse=True, backend=backend) for a, b in ((0, 3), (3, 3), (3, 7))
    ]
    out, lse = kilat.merge([p[0] for p in parts], [p[1] for p in parts])
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])


def test_problem_and_objects_pickle(backend: str) -> None:
    report = kilat.explain(
        *make(), mask=kilat.Causal() & kilat.Window(3, 0), scores=(kilat.Softcap(2.0),), backend=backend
    )
    report.problem.memo["x"] = object()
    again = pickle.loads(pickle.dumps(report))
    assert again.problem == report.problem
    assert hash(again.problem) == hash(report.problem)
    assert again.problem.memo == {}
    assert copy.deepcopy(again.problem) == report.problem
    assert again.chosen == backend


def test_problem_tells_static_from_dynamic(backend: str) -> None:
    a = kilat.explain(*make(2, 5, 7), backend=backend).problem
    b = kilat.explain(*make(3, 6, 9), backend=backend).problem
    assert a != b
    assert a.compile_key() == b.compile_key()
    assert isinstance(a, Problem)
    assert hash(Options("dense")) == hash(Options("dense"))


def test_threads_share_plans(backend: str) -> None:
    clear()
    calls = [(make(1 + n % 3, 3 + n % 4), kilat.Window(n % 5, 0)) for n in range(24)]
    wanted = [kilat.attention(*args, mask=mask, backend=backend) for args, mask in calls]
    clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda call: kilat.attention(*call[0], mask=call[1], backend=backend), calls))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_mask_leaves_nothing_behind(backend: str) -> None:
    bias = torch.zeros(5, 7)
    score = kilat.Bias(bias)
    kilat.attention(*make(), scores=(score,), backend=backend)
    gone = weakref.ref(bias)
    del bias, score
    gc.collect()
    assert gone() is None


def test_public_names_exist(backend: str) -> None:
    assert all(hasattr(kilat, name) for name in kilat.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kilat.nothing
