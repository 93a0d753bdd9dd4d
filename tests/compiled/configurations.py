"""What is compiled for every architecture, by name; `python tests/compiled/measure.py` writes the table of budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from cases import Case
from helpers import build
from offline import ARCHITECTURES, compiling, measured

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


BACKWARD = {
    "backward d64 causal": FORWARD["d64 causal"],
    "backward d128 full": FORWARD["d128 full"],
    "backward d256 window": FORWARD["d256 window"],
    "backward d128 float32": FORWARD["d128 float32"],
    "backward d128 bias keep": FORWARD["d128 bias keep"],
    "backward d64 table": Case(
        "table", seqlen=(256, 256), head_dim=64, dtype="bfloat16", mask="window_first", scores="score_tensor"
    ),
}
"""Backward configurations; the gradients of everything that has one."""

EVERYWHERE = ("backward d64 causal", "backward d128 full")
"""Backward configurations for all architectures; the others compile slowly, and only for `FEW_ARCHITECTURES`."""

FEW_ARCHITECTURES = ("sm_80", "sm_90", "gfx942")

PAIRS = [
    (name, architecture)
    for name in (*FORWARD, *BACKWARD)
    for architecture in (ARCHITECTURES if name in (*FORWARD, *EVERYWHERE) else FEW_ARCHITECTURES)
]
"""Everything that is compiled."""

SAMPLE = [
    *((name, "sm_90") for name in ("d64 causal", "backward d128 bias keep", "backward d64 table")),
    *(("d64 causal", architecture) for architecture in ARCHITECTURES if architecture != "sm_90"),
]
"""What is compiled under other Tritons than the pinned one: every kernel for sm_90, the others once."""


def results(name: str, architecture: str) -> dict[str, dict[str, int]]:
    """By kernel: registers, spills, shared memory and matrix instructions of a configuration."""
    case = FORWARD.get(name) or BACKWARD[name]
    call = build(case)
    problem, op = call.core()
    with compiling(architecture) as kernels:
        if name in FORWARD:
            BACKEND.forward(problem, op)
        else:
            assert call.dout is not None
            problem = replace(problem, needs_grad=True, grad_of=frozenset(("q", "k", "v", "bias", "score_tensors")))
            BACKEND.backward(problem, op, *tensors(problem, op), call.dout, None)
    return {kernel: measured(made, architecture) for kernel, made in kernels.items()}


def tensors(problem: Any, op: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the right shapes for a backward that is only compiled."""
    out = op.q.new_zeros((*op.q.shape[:-1], problem.head_dim_v))
    return out, torch.zeros((*op.q.shape[:-3], op.q.shape[-2], op.q.shape[-3]))
