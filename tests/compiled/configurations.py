"""What is compiled for every architecture, by name; `python tests/compiled/measure.py` writes the table of budgets."""

from __future__ import annotations

from typing import Any

import torch
from cases import Case
from helpers import build
from offline import compiling, measured

from kilat.backends.triton import BACKEND

FORWARD = {
    "d64 causal": Case("d64", seqlen=(256, 256), head_dim=64, dtype="bfloat16", mask="causal"),
    "d128 full": Case("d128", seqlen=(256, 256), head_dim=128, dtype="float16"),
    "d256 window": Case("d256", seqlen=(256, 256), head_dim=256, dtype="bfloat16", mask="window"),
    "d512 causal": Case("d512", seqlen=(256, 256), head_dim=512, dtype="bfloat16", mask="causal"),
    "d96 everything": Case(
        "d96", seqlen=(256, 256), head_dim=96, dtype="float16", mask="everything", scores="all", dropout="philox"
    ),
    "d128 float32": Case("float32", seqlen=(256, 256), head_dim=128, mask="causal"),
    "d128 bias keep": Case(
        "bias", seqlen=(256, 256), head_dim=128, dtype="float16", scores="bias", mask="documents", dropout="keep"
    ),
    "d128 paged": Case("paged", "paged", seqlen=(1, 160), lengths_kv=(1, 130), head_dim=128, dtype="bfloat16"),
}
"""Forward configurations."""


def results(name: str, architecture: str) -> dict[str, dict[str, int]]:
    """By kernel: registers, spills, shared memory and matrix instructions of a configuration's forward."""
    problem, op = build(FORWARD[name]).core()
    with compiling(architecture) as kernels:
        BACKEND.forward(problem, op)
    return {kernel: measured(made, architecture) for kernel, made in kernels.items()}


def tensors(problem: Any, op: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the right shapes for a backward that is only compiled."""
    out = op.q.new_zeros((*op.q.shape[:-1], problem.head_dim_v))
    return out, torch.zeros((*op.q.shape[:-3], op.q.shape[-2], op.q.shape[-3]))
