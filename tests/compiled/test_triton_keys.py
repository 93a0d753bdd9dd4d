"""What a Triton kernel is compiled for: never a length, a number of heads, a batch size or a seed (but: group 1)."""

from __future__ import annotations

import dataclasses

import pytest
from cases import Case
from configurations import tensors
from helpers import build
from offline import compiling

from kilat.backends.triton import BACKEND

SHAPES = [
    {"seqlen": (70, 70)},
    {"seqlen": (1, 1)},
    {"seqlen": (64, 1)},
    {"seqlen": (1, 128), "batch": 1},
    {"seqlen": (70, 71), "heads": (3, 3)},
    {"seqlen": (160, 160), "heads": (16, 16), "batch": 3},
]


def kernels(case: Case) -> dict[str, str]:
    """By name, a digest of each kernel that forward and backward of a case launch on Hopper."""
    call = build(case)
    problem, op = call.core()
    problem = dataclasses.replace(problem, needs_grad=True, grad_of=frozenset("qkv"), memo={})
    out, lse = tensors(problem, op)
    with compiling("sm_90") as found:
        BACKEND.forward(problem, op)
        BACKEND.backward(problem, op, out, lse, call.dout, call.dlse)
    return {name: kernel.hash for name, kernel in found.items()}


@pytest.mark.parametrize("mask", ["causal", "window_first"])
@pytest.mark.parametrize("dropout", ["", "philox"])
def test_no_size_is_compiled_in(mask: str, dropout: str) -> None:
    base = Case("keys", head_dim=64, dtype="bfloat16", mask=mask, dropout=dropout)
    first, *others = (kernels(dataclasses.replace(base, **shape)) for shape in SHAPES)
    for shape, other in zip(SHAPES[1:], others, strict=True):
        assert other == first, shape
