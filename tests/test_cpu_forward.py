"""The CPU forward's running maximum: scores that jump after the first tiles, by little, by much and by turns."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from helpers import build, expectation

LENGTH, DIM, STEPS = 333, 40, 4
# nats a step: below the lazy rescale's threshold, above it, beyond what exp can hold against the old maximum
RISES = (5.0, 20.0, 150.0, 5000.0)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("rise", RISES)
def test_scores_that_rise_late(rise: float, dtype: str, mask: str) -> None:
    """Scores grow by `rise` at each quarter of the keys, so the first tiles' maximum stands far below the last's."""
    call = build(Case("rising", seqlen=(LENGTH, LENGTH), mask=mask, dtype=dtype, head_dim=DIM))
    call.q[..., 0] = DIM**0.5
    call.k[..., 0] = (torch.arange(LENGTH) * STEPS // LENGTH * rise)[None, :, None].to(call.k.dtype)
    out, lse = call.run("cpu")
    assert lse.max() > 0.99 * (STEPS - 1) * rise - 10
    expectation(call).check({"out": out, "lse": lse})
