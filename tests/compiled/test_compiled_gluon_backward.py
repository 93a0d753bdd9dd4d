"""The Hopper backward compiled for sm_90 without a GPU: no spills in loops, products that overlap, TMA in use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

import torch
import triton
from compiled.gluon_offline import Compiled, compiling

from kilat.backends.gluon import backward_launch
from kilat.masks import Causal
from kilat.problem import Operands, Problem
from kilat.scores import Softcap

SHARED_MEMORY = 227 * 1024
ASSEMBLER = tuple(int(n) for n in triton.__version__.split(".")[:2])


def compiled(dim: int, dtype: str = "bfloat16", seqlen: int = 256, **more: Any) -> dict[str, Compiled]:
    """The kernels of one call by name."""
    ragged = more.pop("ragged", False)
    heads = (4, 2)
    shape = (seqlen,) if ragged else (1, seqlen)
    q, k, v = (torch.zeros(*shape, n, dim, dtype=getattr(torch, dtype)) for n in (heads[0], heads[1], heads[1]))
    operands = Operands(q, k, v)
    if ragged:
        operands.cu_seqlens_q = operands.cu_seqlens_kv = torch.tensor([0, seqlen], dtype=torch.int32)
    problem = Problem(
        layout="ragged" if ragged else "dense", dtype=dtype, out_dtype=dtype, device="cuda", head_dim=dim,
        head_dim_v=dim, num_heads_q=heads[0], num_heads_kv=heads[1], needs_grad=True, grad_of=frozenset("qkv"),
        batch=1, seqlen_q=seqlen, seqlen_kv=seqlen,
    )  # fmt: skip
    problem = replace(problem, **more)
    lse = torch.zeros(heads[0], seqlen)
    with compiling() as found:
        backward_launch.backward(problem, operands, q, lse if ragged else lse[None], q, None)
    return found


CONFIGURATIONS: dict[str, tuple[dict[str, Any], int, int]] = {
    # name: (arguments, spilled bytes in all, spill instructions in the loops of both warpgroups)
    "wide": ({"dim": 128}, 16, 0),
    "wide-causal": ({"dim": 128, "mask": Causal()}, 64, 8),
    "wide-ragged": ({"dim": 128, "mask": Causal(), "ragged": True}, 256, 16),
    "wide-float16": ({"dim": 96, "dtype": "float16"}, 16, 0),
    "narrow": ({"dim": 64}, 80, 4),
    "narrow-causal": ({"dim": 64, "mask": Causal()}, 160, 12),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_budget(name: str) -> None:
    """Spills in peeled turns cost nothing that can be measured; in the loops they do."""
    arguments, spilled, in_loops = CONFIGURATIONS[name]
    kernel = compiled(**arguments)["backward_kernel"]
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.products >= 100
    assert kernel.loads >= 6
    assert kernel.reductions >= 2
    if ASSEMBLER < (3, 9):  # 3.9 brings another ptxas
        assert not kernel.serialised
        assert kernel.spilled <= spilled, kernel
        assert kernel.in_loops <= in_loops, kernel


@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic(dim: int) -> None:
    kernels = compiled(dim, deterministic=True, mask=Causal())
    assert kernels["backward_kernel"].reductions == 0
    assert not kernels["backward_kernel"].serialised
    kernel = kernels["backward_dq_kernel"]
    assert kernel.spilled == 0
    assert not kernel.serialised
    assert kernel.products >= 40


def test_softcap_compiles() -> None:
    kernel = compiled(128, scores=(Softcap(20.0),))["backward_kernel"]
    assert not kernel.serialised
