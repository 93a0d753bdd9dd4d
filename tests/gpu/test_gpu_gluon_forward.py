"""The Hopper forward on a GPU at the sizes where its tiles begin and end, beside what `test_cases.py` runs."""

from __future__ import annotations

from dataclasses import replace

import helpers
import pytest
from cases import Case
from gpu_calls import moved

from kilat.backends import registry

pytestmark = pytest.mark.gpu

SIZES = [(1, 1), (63, 129), (129, 63), (192, 192), (193, 385), (257, 511), (640, 640)]
DIMS = [(64, 64), (72, 72), (80, 128), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256)]
RAGGED = Case(
    "", "ragged", batch=5, lengths_q=(128, 1, 300, 0, 192), lengths_kv=(128, 77, 300, 64, 500), tail=5, heads=(4, 2)
)
MASKS = ("none", "causal", "causal_top_left", "window", "window_right", "window_wide")


def _cases() -> list[Case]:
    found = [
        Case(
            f"{q}x{kv}-d{d}-{d_v}-{mask}", seqlen=(q, kv), mask=mask, head_dim=d, head_dim_v=d_v, heads=(4, 2),
            dtype="bfloat16" if (q + d) % 2 else "float16", scale=(None, -0.3, 0.0)[(q + kv + d) % 3],
        )
        for q, kv in SIZES
        for d, d_v in DIMS
        for mask in MASKS
    ]  # fmt: skip
    found += [
        replace(RAGGED, name=f"ragged-d{d}-{mask}", mask=mask, head_dim=d, dtype="bfloat16", sink=d == 64)
        for d in (64, 96, 128, 256)
        for mask in MASKS
    ]
    return found


def _growing() -> list[Case]:
    """Scores of 16 and more in log2 units, so that maxima grow by more than 2^8 in some rows and not in others."""
    found = [
        Case(
            f"growing-{q}x{kv}-d{d}-{mask}-{dtype}", seqlen=(q, kv), mask=mask, head_dim=d, heads=(4, 2),
            dtype=dtype, scale=8 * d**-0.5,
        )
        for q, kv in ((193, 385), (257, 511), (640, 1280))
        for d in (64, 96, 128, 192, 256)
        for mask in ("none", "causal", "window")
        for dtype in ("bfloat16", "float16")
    ]  # fmt: skip
    found += [
        replace(RAGGED, name=f"growing-ragged-d{d}", mask="causal", head_dim=d, dtype="float16", sink=True, scale=1.0)
        for d in (64, 128, 256)
    ]
    return found


@pytest.mark.parametrize("case", _cases() + _growing(), ids=str)
def test_forward(case: Case) -> None:
    """Within the budget, and the same bits again."""
    call = helpers.build(case)
    problem, operands = call.core()
    found = registry.get("gluon")
    assert not isinstance(found, str), found
    problem = replace(problem, device="cuda:0", memo={})
    if reasons := found.unsupported(problem):
        pytest.skip("; ".join(reasons))
    given = {name: getattr(operands, name) for name in ("q", "k", "v", "sink", "cu_seqlens_q", "cu_seqlens_kv")}
    operands = replace(operands, **{name: moved(x) for name, x in given.items() if x is not None})
    runs = [[x.cpu() for x in found.forward(problem, operands)] for _ in range(2)]
    helpers.expectation(call).check({"out": runs[0][0], "lse": runs[0][1]})
    assert all(map(helpers.same_bits, *runs))
