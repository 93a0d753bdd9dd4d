"""The Hopper backward on a GPU, by itself: out and lse come from the oracle."""

from __future__ import annotations

import zlib
from dataclasses import replace
from unittest import mock

import helpers
import pytest
import torch
from cases import CASES, Case
from gpu_calls import moved

from kilat import accuracy, reference
from kilat.backends import registry
from kilat.problem import Operands

pytestmark = pytest.mark.gpu


def _cases() -> list[Case]:
    """Cases of the list in half precision, and the sizes at which tiles begin and end."""
    found: list[Case] = []
    for case in CASES:
        if case.cached or case.dropout or case.scores not in ("none", "softcap"):
            continue
        if max(case.head_dim, case.head_dim_v or 0) > 256 or case.dtype == "float64":
            continue
        for dtype in ("bfloat16", "float16"):
            if case.logits <= 1e3 or dtype == "bfloat16":
                found.append(replace(case, name=f"{case.name}-{dtype}", dtype=dtype))
    found += [
        Case(
            f"{q}x{kv}-d{dim}-{mask}", seqlen=(q, kv), head_dim=dim, mask=mask, batch=1, heads=(4, 2), dtype="bfloat16"
        )
        for q, kv in [(1, 1), (63, 129), (192, 192), (257, 513), (600, 400), (128, 1024), (1000, 777)]
        for dim in (17, 64, 96, 128)
        for mask in ("none", "causal", "window", "causal_top_left", "window_left")
    ]
    found += [
        Case(
            f"{q}x{kv}-d{dim}-{dim_v}-{mask}", seqlen=(q, kv), head_dim=dim, head_dim_v=dim_v, mask=mask, batch=1,
            heads=(4, 2), dtype="bfloat16",
        )
        for q, kv in [(1, 1), (63, 129), (192, 192), (257, 513), (1000, 777)]
        for dim, dim_v in [(129, 129), (160, 200), (192, 128), (40, 192), (256, 64), (256, 256)]
        for mask in ("none", "causal", "window", "causal_top_left")
    ]  # fmt: skip
    return found


def _on_gpu(operands: Operands) -> Operands:
    """The same tensors, strides included, on the GPU."""
    names = ("q", "k", "v", "sink", "cu_seqlens_q", "cu_seqlens_kv", "seqlens_q", "seqlens_kv")
    given = {name: getattr(operands, name) for name in names}
    return replace(operands, **{name: moved(x) for name, x in given.items() if x is not None})


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
    """In place of fresh memory."""
    return torch.full(shape, torch.nan, dtype=dtype, device=f"cuda:{device}")


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_gradients(case: Case) -> None:
    """Within the budget; every other case deterministically; dK and dV repeat bit by bit in any case."""
    call = helpers.build(case)
    problem, operands = call.core()
    found = registry.get("gluon")
    assert not isinstance(found, str), found
    names = frozenset(("q", "k", "v", "sink") if operands.sink is not None else ("q", "k", "v"))
    deterministic = zlib.crc32(case.name.encode()) % 2 == 0
    problem = replace(problem, device="cuda:0", needs_grad=True, grad_of=names, deterministic=deterministic, memo={})
    if reasons := found.unsupported(problem):
        pytest.skip("; ".join(reasons))
    out, lse = reference.forward(problem, operands)
    given = (_on_gpu(operands), out.cuda(), lse.cuda(), call.dout.cuda(), call.dlse.cuda())
    with mock.patch("kilat.backends.gluon.backward_launch.empty", _poisoned):
        runs = [accuracy.named(found.backward(problem, *given)) for _ in range(2)]
    helpers.expectation(call, True).check({name: x.cpu() for name, x in runs[0].items()})
    for name in ("q", "k", "v") if deterministic else ("k", "v"):
        assert helpers.same_bits(runs[0][name].cpu(), runs[1][name].cpu()), f"d{name} changes from run to run"
