"""The kernels before and after the Hopper backward, in Triton's interpreter (they are plain Triton)."""

from __future__ import annotations

import os
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in a process of its own", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

import numpy as np
import torch
from simulated import backward_harness as harness
from simulated.backward_harness import LOG2E, Setting

from kilat import reference
from kilat.backends.gluon import backward_launch
from kilat.backends.gluon.launching import Of

SETTINGS = {
    "wide": Setting(70, 30, batch=2, heads=(4, 2), dim=96),
    "narrow": Setting(200, 30, dim=40),
    "broad": Setting(70, 30, heads=(2, 1), dim=192, dim_v=251),
    "broad-256": Setting(70, 30, dim=256, dim_v=3),
    "ragged": Setting(dim=64, ragged=((5, 63, 0, 200), (5, 170, 20, 0)), heads=(2, 1)),
    "padded": Setting(67, 131, batch=4, padded=((67, 0, 5, 33), (3, 9, 0, 131)), heads=(2, 1)),
}


def _call(s: Setting) -> tuple[Any, Any, Any, Any, Any]:
    x = harness.tensors(s, 0)
    problem, operands = harness.problem(s, x)
    out, lse = reference.forward(problem, operands)
    do = torch.from_numpy(x["do"][0] if s.ragged else x["do"])
    return problem, operands, out, lse, do


def _tensors(operands: Any, do: Any, out: Any, lse: Any, work: Any, dlse: Any) -> tuple[list[Any], dict[str, Any]]:
    """The tensors of a backward call, and where the optional ones stand."""
    o = operands
    tensors = [o.q, o.k, o.v, do, out, lse, work, *(torch.zeros(x.shape) for x in (o.q, o.k, o.v))]
    given = (dlse, o.cu_seqlens_q, o.cu_seqlens_kv, o.seqlens_q, o.seqlens_kv)
    optional: dict[str, Any] = dict.fromkeys(backward_launch.OPTIONAL)
    for name, x in zip(backward_launch.OPTIONAL, given, strict=True):
        if x is not None:
            optional[name] = Of(len(tensors))
            tensors.append(x)
    return tensors, optional


def _sequences(s: Setting, problem: Any) -> Any:
    plan = backward_launch.plan_of(problem)
    return harness._rows(s, problem, plan.tiles, plan.block_q)


@pytest.mark.parametrize("name", SETTINGS)
def test_prepare(name: str) -> None:
    """lse in log2 units, +inf where a row sees nothing or is none; delta - dlse; the accumulator cleared."""
    s = SETTINGS[name]
    problem, operands, out, lse, do = _call(s)
    dlse, plan = torch.randn(lse.shape), backward_launch.plan_of(problem)
    work = torch.full(((plan.all_tiles + plan.pieces) * 128,), torch.nan)
    tensors, optional = _tensors(operands, do, out, lse, work, dlse)
    backward_launch._prepare(problem, tensors, optional).through_triton(tensors)
    rows, pieces = work[: plan.all_tiles * 128], work[plan.all_tiles * 128 :]
    want = torch.stack((torch.full((plan.all_tiles * 64,), torch.inf), torch.zeros(plan.all_tiles * 64)))
    for b, h, start, n, tile in _sequences(s, problem):
        at = (h, slice(start, start + n)) if s.ragged else (b, h, slice(n))
        o, g = ((t if s.ragged else t[b])[start : start + n, h] for t in (out, do))
        seen = lse[at] > -torch.inf
        want[0, tile * 64 : tile * 64 + n] = torch.where(seen, lse[at] * LOG2E, torch.inf)
        want[1, tile * 64 : tile * 64 + n] = torch.where(seen, (o * g).sum(-1) - dlse[at], 0.0)
    torch.testing.assert_close(rows.view(2, -1), want, rtol=1e-5, atol=1e-5)
    assert (pieces == 0).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_finish(name: str) -> None:
    """dQ = scale times the accumulator, taken out of fragment order."""
    s = SETTINGS[name]
    problem, operands, out, lse, do = _call(s)
    plan = backward_launch.plan_of(problem)
    work = torch.randn((plan.all_tiles + plan.pieces) * 128)
    pieces = work[plan.all_tiles * 128 :].view(-1, 128)
    tensors, optional = _tensors(operands, do, out, lse, work, None)
    dq = tensors[backward_launch.DQ]
    backward_launch._finish(problem, tensors, optional).through_triton(tensors)
    rows, want = harness.unfragmented(pieces.numpy(), plan.width)[:, : s.dim] * s.scale, np.zeros(dq.shape, np.float32)
    for b, h, start, n, tile in _sequences(s, problem):
        (want if s.ragged else want[b])[start : start + n, h] = rows[tile * 64 : tile * 64 + n]
    np.testing.assert_allclose(dq.numpy(), want, rtol=1e-6)
