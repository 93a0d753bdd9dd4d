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


def _decode(name: str, **more: Any) -> Case:
    """One new token a sequence, whose query heads share a tile."""
    base = Case(name, "cached", heads=(8, 2), seqlen=(1, 8192), lengths_kv=(8192, 77), mask="causal")
    return replace(base, **{"dtype": "bfloat16", "head_dim": 128, **more})


MLA = {"layout": "paged", "seqlen": (1, 512), "lengths_kv": (512, 33), "head_dim": 576, "head_dim_v": 512}

DECODE = {
    "decode d64": _decode("d64", head_dim=64),
    "decode d128": _decode("d128"),
    "decode d128 page 16": _decode("page", layout="paged", page_size=16),
    "decode d128 page 3": _decode("page", layout="paged", page_size=3, seqlen=(1, 300), lengths_kv=(300, 77)),
    "decode d128 16 queries": _decode("queries", seqlen=(16, 8192)),
    "decode d128 e4m3": _decode("e4m3"),
    "decode d128 int8": _decode("int8"),
    "decode d128 first": _decode("first", layout="paged", mask="window_first", page_size=64),
    "decode d128 float32": _decode("float32", dtype="float32"),
    "decode d256 window": _decode("window", head_dim=256, mask="window_left"),
    "decode MLA 16 heads": _decode("mla", heads=(16, 1), page_size=64, **MLA),
    "decode MLA 128 heads": _decode("mla", heads=(128, 1), page_size=64, **MLA),
}
"""Decode configurations; those named MLA read the values from the keys, those named after a type store that."""

STORED = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}

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

DECODE_ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")

PAIRS = [
    (name, architecture)
    for name in (*FORWARD, *BACKWARD)
    for architecture in (ARCHITECTURES if name in (*FORWARD, *EVERYWHERE) else FEW_ARCHITECTURES)
] + [(name, architecture) for name in DECODE for architecture in DECODE_ARCHITECTURES]
"""Everything that is compiled."""

SAMPLE = [
    *((name, "sm_90") for name in ("d64 causal", "backward d128 bias keep", "backward d64 table")),
    ("decode d128 page 16", "sm_90"),
    *(("d64 causal", architecture) for architecture in ARCHITECTURES if architecture != "sm_90"),
]
"""What is compiled under other Tritons than the pinned one: every kernel for sm_90, the others once."""


def results(name: str, architecture: str) -> dict[str, dict[str, int]]:
    """By kernel: registers, spills, shared memory and matrix instructions of a configuration."""
    return {kernel: measured(made, architecture) for kernel, made in compiled(name, architecture).items()}


def compiled(name: str, architecture: str) -> dict[str, Any]:
    """By name, the kernels of a configuration."""
    call = build((FORWARD | BACKWARD | DECODE)[name])
    problem, op = call.core()
    if name in DECODE:
        problem, op = _in_cache(name, problem, op)
    with compiling(architecture) as kernels:
        if name not in BACKWARD:
            BACKEND.forward(problem, op)
        else:
            assert call.dout is not None
            problem = replace(problem, needs_grad=True, grad_of=frozenset(("q", "k", "v", "bias", "score_tensors")))
            BACKEND.backward(problem, op, *tensors(problem, op), call.dout, None)
    return kernels


def _in_cache(name: str, problem: Any, op: Any) -> tuple[Any, Any]:
    """The call with keys and values as the configuration's name says that they are stored."""
    if "MLA" in name:
        op.v = op.k[..., : problem.head_dim_v]
    stored = STORED.get(name.rpartition(" ")[2])
    if stored is not None:
        op.k, op.v = (x.nan_to_num(0.0).to(stored) for x in (op.k, op.v))
        op.k_scale = op.v_scale = torch.ones(problem.num_heads_kv)
        problem = replace(problem, quantised=True)
    return problem, op


def tensors(problem: Any, op: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the right shapes for a backward that is only compiled."""
    out = op.q.new_zeros((*op.q.shape[:-1], problem.head_dim_v))
    return out, torch.zeros((*op.q.shape[:-3], op.q.shape[-2], op.q.shape[-3]))
