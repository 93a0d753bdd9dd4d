"""out and lse of every dense and padded case, on every backend, within the error budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import CASES, Case
from helpers import BACKENDS, build, expected, same_bits, skip_unless_supported, threads

import kilat

DENSE = [case for case in CASES if case.layout in ("dense", "padded")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_forward(case: Case, backend: str) -> None:
    call = build(case)
    skip_unless_supported(call, backend)
    out, lse = call.run(backend)
    q, v = call.q, call.v
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert out.dtype == getattr(torch, case.out_dtype or case.dtype)
    assert lse.dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
    expected(case).check({"out": out, "lse": lse})


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_changes_nothing(backend: str) -> None:
    call = build(Case("lse", seqlen=(33, 65), mask="causal", sink=True))
    assert same_bits(call.run(backend, return_lse=False), call.run(backend)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_in_numpy_out(backend: str, dtype: str) -> None:
    call = build(Case("numpy", seqlen=(17, 33), mask="causal", dtype=dtype, heads=(4, 2)))
    out, lse = call.run(backend)
    arrays = [x.numpy() for x in (call.q, call.k, call.v)]
    with threads(1 if backend == "reference" else torch.get_num_threads()):  # a BLAS keeps its bits at one count only
        got, got_lse = kilat.attention(*arrays, mask=kilat.Causal(), return_lse=True, backend=backend)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, out.numpy())
    np.testing.assert_array_equal(got_lse, lse.numpy())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["causal", "window_first", "documents_batch", "dense"])
def test_a_mask_is_what_it_shows(backend: str, mask: str) -> None:
    """An interval mask equals the Dense mask of the same keys, within the budget of either."""
    call = build(Case("shown", seqlen=(70, 65), mask=mask, heads=(2, 1), sink=True))
    problem, op = call.core()
    from kilat.reference_parts import places, visible

    shown = torch.stack(
        [torch.stack([visible(problem, op, at, h, torch.arange(70)) for h in range(2)]) for at in places(problem, op)]
    )
    call.mask = kilat.Dense(shown)
    out, lse = call.run(backend)
    expected(call.case).check({"out": out, "lse": lse})
