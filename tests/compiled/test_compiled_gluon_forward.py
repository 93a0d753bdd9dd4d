"""The Hopper forward compiled for sm_90 without a GPU: no spills in loops, products that overlap, TMA in use."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton.experimental.gluon")

import torch
from compiled.gluon_offline import Compiled, compiling, of_version

from kilat.backends.gluon import forward_launch, heuristics
from kilat.masks import Causal, Window
from kilat.problem import Operands, Problem
from kilat.scores import Softcap

SHARED_MEMORY = 227 * 1024


@functools.cache
def of(name: str) -> Compiled:
    """The kernel of a configuration."""
    return compiled(**CONFIGURATIONS[name][0])


def compiled(dim: int, dim_v: int | None = None, **more: Any) -> Compiled:
    """The kernel of one call."""
    ragged, dtype, seqlen = more.pop("ragged", False), more.pop("dtype", "bfloat16"), more.pop("seqlen", 2048)
    dim_v = dim if dim_v is None else dim_v
    shape = (seqlen,) if ragged else (1, seqlen)
    q, k, v = (torch.zeros(*shape, n, d, dtype=getattr(torch, dtype)) for n, d in ((4, dim), (2, dim), (2, dim_v)))
    operands = Operands(q, k, v)
    if ragged:
        operands.cu_seqlens_q = operands.cu_seqlens_kv = torch.tensor([0, seqlen], dtype=torch.int32)
    problem = Problem(
        layout="ragged" if ragged else "dense", dtype=dtype, out_dtype=dtype, device="cuda", head_dim=dim,
        head_dim_v=dim_v, num_heads_q=4, num_heads_kv=2, batch=1, seqlen_q=seqlen, seqlen_kv=seqlen, scale=dim**-0.5,
    )  # fmt: skip
    problem = replace(problem, **more)
    consumers = heuristics.forward_config(problem).consumers
    with mock.patch.object(forward_launch, "_processors", return_value=132), compiling(consumers, 12) as found:
        forward_launch.forward(problem, operands)
    return found["forward_kernel"]


CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    # name: (arguments, spilled bytes in all: at the edges of tiles)
    "d64": ({"dim": 64}, 36),
    "d64-short": ({"dim": 64, "seqlen": 256, "mask": Causal()}, 0),
    "d64-causal": ({"dim": 64, "mask": Causal()}, 0),
    "d64-ragged": ({"dim": 64, "mask": Causal(), "ragged": True}, 104),
    "d64-window": ({"dim": 64, "mask": Window(127, 0)}, 0),
    "d96-window": ({"dim": 96, "mask": Window(100, 0), "dtype": "float16"}, 4),
    "d128": ({"dim": 128}, 44),
    "d128-causal": ({"dim": 128, "mask": Causal()}, 12),
    "d128-ragged": ({"dim": 128, "mask": Causal(), "ragged": True}, 24),
    "d128-softcap": ({"dim": 128, "scores": (Softcap(20.0),)}, 44),
    "d128-float32": ({"dim": 128, "out_dtype": "float32"}, 56),
    "d192-128": ({"dim": 192, "dim_v": 128, "mask": Causal()}, 12),
    "d256": ({"dim": 256}, 56),
    "d256-causal": ({"dim": 256, "mask": Causal()}, 8),
}
TWO_CONSUMERS = ("d64-short", "d64-window")  # of head_dim 64, where three would waste more
THREE_CONSUMERS = ("d64", "d64-causal", "d64-ragged")
OTHERS: dict[tuple[int, int], dict[str, tuple[int, int]]] = {
    # where another ptxas needs more: spilled bytes, spill instructions in loops
    (3, 6): {"d64-ragged": (156, 0), "d96-window": (28, 2), "d256-causal": (20, 0)},
    (3, 7): {"d96-window": (4, 2)},
    (3, 9): {
        "d64-short": (132, 0),
        "d64-causal": (140, 0),
        "d64-ragged": (388, 0),
        "d64-window": (136, 0),
        "d96-window": (200, 0),
        "d128-causal": (152, 0),
        "d128-ragged": (148, 0),
        "d192-128": (156, 0),
        "d256-causal": (108, 0),
    },
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_budget(name: str) -> None:
    kernel = of(name)
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.products >= (48 if name in TWO_CONSUMERS else 60)
    assert kernel.loads >= 5
    assert kernel.votes == (3 if name in THREE_CONSUMERS else 2)  # one a consumer: whether any row of a warp moved
    assert not kernel.serialised
    spilled, in_loops = of_version(OTHERS).get(name, (CONFIGURATIONS[name][1], 0))
    assert kernel.in_loops <= in_loops, kernel
    assert kernel.spilled <= spilled, kernel


def test_a_capture_of_what_was_never_called_is_refused() -> None:
    wanted = r"once with these shapes before a CUDA graph captures it.*q \(1, 2048, 4, 64\)"
    capturing = mock.patch.object(forward_launch, "_is_capturing", return_value=True)
    with capturing, pytest.raises(RuntimeError, match=wanted):
        compiled(64)
