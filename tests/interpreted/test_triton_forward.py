"""The Triton forward, interpreted: the cases within their budgets, and what the cases do not reach."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, CASES, MASKS, SCORES, Case
from helpers import build, expectation, expected, poisoned_memory, same_bits

from kilat.masks.ranges import visible

TABLES = ("prefix", "key_range", "documents", "window_first_range", "two_dense", "predicate_tensor", "everything")
"""Masks whose tables differ between ragged and dense sequences."""

SAME_PATH = ("none", "window_left", "window_right", "window_open", "window_wide", "chunked_one", "prefix_", "two_dense")
SAME_PATH += ("window_first_beyond", "key_range", "dense_keys", "dense_shared", "causal_", "window_first_causal")
"""Masks that take a kernel the way that another one of the list does."""


def _chosen(case: Case) -> bool:
    """Each mask and score in one shape (the backward's tests take another), everything else as it is."""
    kind, _, rest = case.name.partition("-")
    if case.dtype == "float64" or case.kv:  # neither is read by this backend
        return False
    if kind == "mask":
        return rest.endswith("37x130") and not rest.startswith(SAME_PATH)
    if kind == "score":
        return rest.endswith("causal")
    if kind == "ragged" and (rest in MASKS or rest in SCORES):
        return rest in (*TABLES, "alibi_batch", "bias", "score_tensor")
    return not (kind == "paged" and case.name.replace("paged", "cached") in BY_NAME and "ragged" not in rest)


@pytest.mark.parametrize("case", [case for case in CASES if _chosen(case)], ids=str)
def test_case(case: Case) -> None:
    """Outputs are allocated full of NaN; so is what no sequence owns."""
    call = build(case)
    with poisoned_memory():
        out, lse = call.run("triton")
    assert out.dtype == getattr(torch, case.out_dtype or case.dtype)
    assert lse.dtype == torch.float32
    expected(case).check({"out": out, "lse": lse})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rise", [5.0, 150.0, 5000.0])
def test_scores_that_rise_late(rise: float, dtype: str) -> None:
    """Scores grow by `rise` at each quarter of the keys, so the first tiles' maximum stands far below the last's."""
    call = build(Case("rising", batch=1, seqlen=(70, 200), dtype=dtype, head_dim=40))
    call.q[..., 0] = 40**0.5
    call.k[..., 0] = (torch.arange(200) * 4 // 200 * rise)[None, :, None].to(call.k.dtype)
    out, lse = call.run("triton")
    expectation(call).check({"out": out, "lse": lse})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0])
@pytest.mark.parametrize("scores", ["none", "softcap"])
def test_any_scale(scale: float, scores: str, dtype: str) -> None:
    call = build(Case("scale", seqlen=(33, 70), mask="causal", scores=scores, scale=scale, dtype=dtype, sink=True))
    out, lse = call.run("triton")
    expectation(call).check({"out": out, "lse": lse})


@pytest.mark.parametrize("mask", ["causal", "window_self", "documents", "window_first", "dense", "predicate"])
def test_a_sick_value_reaches_only_tiles_that_see_it(mask: str) -> None:
    """Keys whose v is not finite: rows of a tile that does not see them keep their bits, even in a block it visits."""
    case = Case("sick", batch=1, heads=(1, 1), seqlen=(130, 130), mask=mask)
    clean, _ = build(case).run("triton")
    call = build(case)
    shown = torch.from_numpy(visible(call.mask, 0, 0, 130, 130))
    for first in (0, 64, 128):
        tile = slice(first, first + 64)
        unseen = (~shown[tile].any(0)).nonzero()[:, 0]
        call.v.copy_(build(case).v)
        call.v[:, unseen] = torch.nan
        out, _ = call.run("triton")
        assert same_bits(out[:, tile], clean[:, tile])


def test_a_value_that_is_not_finite_is_not_lost() -> None:
    call = build(Case("seen", batch=1, seqlen=(20, 20), mask="causal"))
    call.v[:, 5, 0, 3] = torch.inf
    out, _ = call.run("triton")
    assert not torch.isfinite(out[:, 5:, 0, 3]).any()


def test_rows_far_apart() -> None:
    """Rows 2^24 elements apart: a tile of them spans 2^30 elements, so offsets are 64 bits wide."""
    case = Case("apart", batch=1, heads=(1, 1), seqlen=(70, 70), mask="causal", dtype="float16")
    call = build(case)
    call.q, call.k, call.v = (_apart(x) for x in (call.q, call.k, call.v))
    out, lse = call.run("triton")
    expected(case).check({"out": out, "lse": lse})


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same values, each row 2^24 elements behind the one before; the memory between is never touched."""
    step = 2**24
    memory = torch.empty(x.shape[1] * step, dtype=x.dtype)
    wide = memory.as_strided(x.shape, (memory.numel(), step, x.shape[-1], 1))
    return wide.copy_(x)


def test_offsets_that_lie() -> None:
    """Bad offsets and lengths never reach outside the tensors (the interpreter's loads would fault)."""
    q = torch.randn(40, 2, 16)
    problem, op = build(Case("lies", "ragged", 2, lengths_q=(20, 20), lengths_kv=(20, 20))).core()
    from kilat.backends.triton import BACKEND

    for offsets in ([0, 90, 40], [0, -5, 40], [7, 3, 2**31 - 1], [0, 40, 20]):
        op.q = op.k = op.v = q
        op.cu_seqlens_q = op.cu_seqlens_kv = torch.tensor(offsets, dtype=torch.int32)
        BACKEND.forward(problem, op)
