"""The Hopper backward compiled for sm_90 without a GPU: no spills in loops, products that overlap, TMA in use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

import torch
from compiled.gluon_offline import Compiled, compiling, of_version

from kilat.backends.gluon import backward_launch
from kilat.masks import Causal
from kilat.problem import Operands, Problem
from kilat.scores import Softcap

SHARED_MEMORY = 227 * 1024


def compiled(dim: int, dtype: str = "bfloat16", seqlen: int = 256, dim_v: int = 0, **more: Any) -> dict[str, Compiled]:
    """The kernels of one call by name."""
    ragged = more.pop("ragged", False)
    heads, dim_v = (4, 2), dim_v or dim
    shape = (seqlen,) if ragged else (1, seqlen)
    shapes = [(heads[0], dim), (heads[1], dim), (heads[1], dim_v), (heads[0], dim_v)]
    q, k, v, out = (torch.zeros(*shape, *x, dtype=getattr(torch, dtype)) for x in shapes)
    out = out.to(getattr(torch, more.get("out_dtype", dtype)))
    operands = Operands(q, k, v)
    if ragged:
        operands.cu_seqlens_q = operands.cu_seqlens_kv = torch.tensor([0, seqlen], dtype=torch.int32)
    problem = Problem(
        layout="ragged" if ragged else "dense", dtype=dtype, out_dtype=dtype, device="cuda", head_dim=dim,
        head_dim_v=dim_v, num_heads_q=heads[0], num_heads_kv=heads[1], needs_grad=True, grad_of=frozenset("qkv"),
        batch=1, seqlen_q=seqlen, seqlen_kv=seqlen,
    )  # fmt: skip
    problem = replace(problem, **more)
    lse = torch.zeros(heads[0], seqlen)
    with compiling(products=20 if max(dim, dim_v) <= 128 else 12) as found:
        backward_launch.backward(problem, operands, out, lse if ragged else lse[None], out, None)
    return found


CONFIGURATIONS: dict[str, tuple[dict[str, Any], int, int]] = {
    # name: (arguments, spilled bytes in all, spill instructions in the loops of both warpgroups)
    "wide": ({"dim": 128}, 32, 4),
    "wide-causal": ({"dim": 128, "mask": Causal()}, 80, 6),
    "wide-ragged": ({"dim": 128, "mask": Causal(), "ragged": True}, 256, 16),
    "wide-float16": ({"dim": 96, "dtype": "float16"}, 32, 4),
    # measured faster than with 12: 521 -> 538 TFLOP/s at 16k, blocks of queries downwards
    "narrow": ({"dim": 64}, 96, 4),
    "narrow-causal": ({"dim": 64, "mask": Causal()}, 160, 14),
}
OTHERS: dict[tuple[int, int], dict[str, tuple[int, int]]] = {
    # where another ptxas needs more: spilled bytes, spill instructions in loops
    (3, 6): {"wide-ragged": (256, 17)},
    (3, 7): {"wide-ragged": (280, 20)},
    (3, 9): {
        "wide": (164, 28),
        "wide-causal": (280, 38),
        "wide-ragged": (380, 28),
        "wide-float16": (164, 28),
        "narrow": (104, 18),
        "256": (48, 11),
        "256-causal": (12, 3),
        "256-ragged": (144, 26),
        "256-softcap": (160, 58),
        "192-128-ragged": (92, 0),
        "256-out-float32": (48, 11),
        "256-deterministic": (12, 5),
    },
}
SERIALISED: dict[tuple[int, int], tuple[str, ...]] = {(3, 6): (), (3, 9): ("narrow-causal", "deterministic-64")}
"""Known to fail, and asserted so that a better compiler or source is noticed."""


def check(name: str, kernel: Compiled, spilled: int, in_loops: int) -> None:
    """Within the budget, that of this Triton where it has one of its own."""
    spilled, in_loops = of_version(OTHERS).get(name, (spilled, in_loops))
    assert kernel.serialised == (name in of_version(SERIALISED)), kernel
    assert kernel.spilled <= spilled, kernel
    assert kernel.in_loops <= in_loops, kernel


def check_rows(kernels: dict[str, Compiled], *, odd: bool = False) -> None:
    """What runs before and after moves 16 bytes at a time where rows are a multiple of that, and spills nowhere.

    Where they are not, head_dim 129 spills 32 bytes, outside of any loop.
    """
    for name in ("prepare_kernel", "finish_kernel"):
        assert kernels[name].spilled <= (32 if odd else 0), name
        assert bool(kernels[name].narrow) == odd, name


def test_rows_of_eight() -> None:
    """A head_dim that is a multiple of 8 and not of 16 has wide loads too, and an odd one no spills."""
    check_rows(compiled(72, dim_v=40))
    for dims in ((63, 65), (65, 1), (129, 129), (1, 255)):
        check_rows(compiled(dims[0], dim_v=dims[1]), odd=True)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_budget(name: str) -> None:
    """Spills in peeled turns cost nothing that can be measured; in the loops they do."""
    arguments, spilled, in_loops = CONFIGURATIONS[name]
    kernels = compiled(**arguments)
    check_rows(kernels)
    kernel = kernels["backward_kernel"]
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.products >= 100
    assert kernel.loads >= 6
    assert kernel.reductions >= 2
    check(name, kernel, spilled, in_loops)


BROAD: dict[str, tuple[dict[str, Any], int, int]] = {
    "256": ({"dim": 256}, 0, 0),
    "256-causal": ({"dim": 256, "mask": Causal()}, 0, 0),
    "256-ragged": ({"dim": 256, "mask": Causal(), "ragged": True}, 160, 2),
    "256-softcap": ({"dim": 256, "scores": (Softcap(20.0),)}, 32, 4),
    "192-128": ({"dim": 192, "dim_v": 128, "mask": Causal()}, 0, 0),
    "192-128-ragged": ({"dim": 192, "dim_v": 128, "mask": Causal(), "ragged": True}, 48, 0),
    "129-float16": ({"dim": 129, "dtype": "float16"}, 192, 2),
    "256-out-float32": ({"dim": 256, "out_dtype": "float32"}, 0, 0),
}


@pytest.mark.parametrize("name", BROAD)
def test_broad_budget(name: str) -> None:
    """Above 128: dQ by vector reductions, wide products, no spill in a loop of the plain configurations."""
    arguments, spilled, in_loops = BROAD[name]
    kernels = compiled(**arguments)
    check_rows(kernels, odd=arguments["dim"] % 8 > 0)
    kernel = kernels["backward_broad_kernel"]
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.products >= 40
    assert kernel.loads >= 6
    assert kernel.vector_reductions >= 24
    check(name, kernel, spilled, in_loops)


@pytest.mark.parametrize("dims", [(256, 256), (192, 128)])
def test_broad_deterministic(dims: tuple[int, int]) -> None:
    kernels = compiled(dims[0], dim_v=dims[1], deterministic=True, mask=Causal())
    assert kernels["backward_broad_kernel"].vector_reductions == 0
    check(f"{dims[0]}-deterministic", kernels["backward_broad_kernel"], 0, 0)
    check("dq", kernels["backward_dq_kernel"], 4, 0)
    for name in ("backward_broad_kernel", "backward_dq_kernel"):
        assert kernels[name].shared <= SHARED_MEMORY
    assert kernels["backward_dq_kernel"].products >= 40


@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic(dim: int) -> None:
    kernels = compiled(dim, deterministic=True, mask=Causal())
    assert kernels["backward_kernel"].reductions == 0
    assert kernels["backward_kernel"].serialised == (f"deterministic-{dim}" in of_version(SERIALISED))
    kernel = kernels["backward_dq_kernel"]
    assert kernel.spilled == 0
    assert not kernel.serialised
    assert kernel.products >= 40


def test_softcap_compiles() -> None:
    kernel = compiled(128, scores=(Softcap(20.0),))["backward_kernel"]
    assert not kernel.serialised
