"""The kernels before and after the Hopper backward, in Triton's interpreter (they are plain Triton)."""

from __future__ import annotations

import dataclasses
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
    "broad-192": Setting(130, 30, batch=2, heads=(3, 1), dim=192, dim_v=129),
    "one": Setting(63, 1, heads=(3, 3), dim=1),
    "63": Setting(1, 129, batch=3, heads=(2, 1), dim=63, dim_v=65),
    "65": Setting(129, 63, batch=2, heads=(3, 1), dim=65, dim_v=72),
    "72": Setting(129, 63, batch=2, heads=(3, 1), dim=72, dim_v=1),
    "129": Setting(65, 1, batch=2, heads=(3, 3), dim=129, dim_v=63),
    "ragged-wide": Setting(dim=128, dim_v=65, ragged=((63, 1, 0, 129), (5, 170, 20, 0)), heads=(3, 1)),
    "ragged-broad": Setting(dim=129, dim_v=200, ragged=((1, 63, 0, 129, 2), (5, 170, 20, 0, 0)), heads=(3, 1)),
    "padded-broad": Setting(67, 131, batch=3, dim=256, padded=((67, 0, 33), (3, 9, 131)), heads=(2, 1)),
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
    tensors = [o.q, o.k, o.v, do, out, lse, work, *(torch.full(x.shape, torch.nan) for x in (o.q, o.k, o.v))]
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
    for x, lengths in zip(tensors[7:10], _used(s), strict=True):
        check_gaps(x, lengths, 0 if s.ragged else None)


def _used(s: Setting) -> list[Any]:
    """Lengths of the sequences of dq, dk and dv."""
    q, kv = s.ragged or s.padded or ((s.q_len,) * s.batch, (s.kv_len,) * s.batch)
    return [q, kv, kv]


def check_gaps(x: torch.Tensor, lengths: tuple[int, ...], start: int | None) -> None:
    """Tokens of no sequence are 0, all others untouched; ragged sequences begin at token `start`."""
    owned = torch.zeros(x.shape, dtype=torch.bool)
    if start is None:
        for b, n in enumerate(lengths):
            owned[b, :n] = True
    else:
        owned[start : start + sum(lengths)] = True
    assert x[owned].isnan().all()
    assert (x[~owned] == 0).all()


GAPS = {
    "ragged-first": (Setting(dim=64, ragged=((1,), (1,))), 2),
    "ragged-odd": (Setting(dim=33, ragged=((63, 0, 5), (129, 1, 0)), heads=(2, 1)), 3),
    "ragged-empty": (Setting(dim=72, dim_v=8, ragged=((0, 0), (0, 0)), heads=(2, 1)), 1),
    "padded": (Setting(129, 131, batch=3, dim=40, dim_v=17, padded=((1, 63, 129), (131, 0, 63)), heads=(2, 1)), None),
    "padded-long": (Setting(63, 1, batch=2, dim=128, padded=((1, 0), (0, 1)), heads=(4, 2)), None),
}


@pytest.mark.parametrize("name", GAPS)
def test_gaps(name: str) -> None:
    """Also before the first offset; of gradients that nobody wants nothing is touched."""
    s, start = GAPS[name]
    problem, operands, out, lse, do = _call(s)
    if start:
        operands.cu_seqlens_q, operands.cu_seqlens_kv = operands.cu_seqlens_q + start, operands.cu_seqlens_kv + start
    for wanted in ("qkv", "k"):
        one = dataclasses.replace(problem, grad_of=frozenset(wanted), memo={})
        plan = backward_launch.plan_of(one)
        work = torch.zeros((plan.all_tiles + plan.pieces) * 128)
        tensors, optional = _tensors(operands, do, out, lse, work, None)
        backward_launch._prepare(one, tensors, optional).through_triton(tensors)
        for gradient, x, lengths in zip("qkv", tensors[7:10], _used(s), strict=True):
            if gradient in wanted:
                check_gaps(x, lengths, start)
            else:
                assert x.isnan().all()


@pytest.mark.parametrize("name", SETTINGS)
def test_finish(name: str) -> None:
    """dQ = scale times the accumulator, taken out of fragment order."""
    s = SETTINGS[name]
    problem, operands, out, lse, do = _call(s)
    plan = backward_launch.plan_of(problem)
    work = torch.randn((plan.all_tiles + plan.pieces) * 128)
    pieces = work[plan.all_tiles * 128 :].view(-1, 128)
    tensors, optional = _tensors(operands, do, out, lse, work, None)
    dq = tensors[backward_launch.DQ].zero_()
    backward_launch._finish(problem, tensors, optional).through_triton(tensors)
    rows, want = harness.unfragmented(pieces.numpy(), plan.width)[:, : s.dim] * s.scale, np.zeros(dq.shape, np.float32)
    for b, h, start, n, tile in _sequences(s, problem):
        (want if s.ragged else want[b])[start : start + n, h] = rows[tile * 64 : tile * 64 + n]
    np.testing.assert_allclose(dq.numpy(), want, rtol=1e-6)


@pytest.mark.parametrize("dims", [(72, 8), (63, 65)])
def test_strides(dims: tuple[int, int]) -> None:
    """O and dO need not be contiguous; pieces of 8 elements are taken only where all strides allow it."""
    s = Setting(70, 30, batch=2, heads=(2, 1), dim=dims[0], dim_v=dims[1])
    problem, operands, out, lse, do = _call(s)
    plan = backward_launch.plan_of(problem)
    found = []
    for gap in (0, 3, 8):
        work = torch.zeros((plan.all_tiles + plan.pieces) * 128)
        apart = [torch.nn.functional.pad(x, (0, gap), value=torch.nan)[..., : s.dim_v] for x in (out, do)]
        tensors, optional = _tensors(operands, apart[1], apart[0], lse, work, None)
        backward_launch._prepare(problem, tensors, optional).through_triton(tensors)
        found.append(work[: plan.all_tiles * 128])
    assert found[0][plan.all_tiles * 64 :].count_nonzero()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_nan_of_unseen_rows() -> None:
    """A row whose output is zero, with a finite lse if there is a sink, ignores its dO."""
    s = Setting(70, 30, heads=(2, 1), dim=64)
    problem, operands, out, lse, do = _call(s)
    plan, dlse = backward_launch.plan_of(problem), torch.ones(lse.shape)
    out[:, 7:9], do[:, 7:9], lse[:, :, 7] = 0, torch.nan, -torch.inf
    work = torch.zeros((plan.all_tiles + plan.pieces) * 128)
    tensors, optional = _tensors(operands, do, out, lse, work, dlse)
    backward_launch._prepare(problem, tensors, optional).through_triton(tensors)
    rows = work[: plan.all_tiles * 128].view(2, 2, -1)
    assert (rows[1, :, 7] == 0).all()
    assert (rows[1, :, 8] == -1).all()
    assert not rows.isnan().any()
