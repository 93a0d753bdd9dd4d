"""CPU tensors that lie on a GPU that is not there, and calls with them; Triton is not imported.

The driver is `fake_libcuda.c`: it remembers what was last launched.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kilat.backends import common
from kilat.backends.gluon import backward_launch, forward_launch
from kilat.masks import Causal, Window
from kilat.problem import Operands, Problem
from kilat.scores import Softcap

STREAM = 7
CASES: dict[str, dict[str, Any]] = {
    "d128-causal": {"dim": 128, "seqlen": 129, "mask": Causal()},
    "d64-window": {"dim": 64, "seqlen": 63, "mask": Window(9, 0)},
    "d96-two-boxes": {"dim": 96, "seqlen": 256, "heads": (8, 2)},
    "d72-deterministic": {"dim": 72, "seqlen": 256, "deterministic": True, "dtype": "float16"},
    "d17-rows-by-pointer": {"dim": 17, "seqlen": 1},
    "ragged": {"dim": 128, "seqlen": 129, "mask": Causal(), "ragged": True},
    "softcap": {"dim": 128, "seqlen": 128, "scores": (Softcap(20.0),)},
    "misaligned": {"dim": 64, "seqlen": 65, "offset": 3},
}


def load(folder: Path) -> Any:
    """The fake driver, built in a folder; found by its name from now on."""
    source, made = Path(__file__).with_name("fake_libcuda.c"), folder / "libcuda.so.1"
    options = ("-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1")
    subprocess.run(["cc", *options, "-o", made, source], check=True)
    (folder / "libcuda.so").symlink_to(made)
    library = ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)
    library.fake_launched.restype = ctypes.c_size_t
    return library


def pretend() -> None:
    """Every tensor lies on GPU 0, which is an H200."""
    torch.Tensor.get_device = lambda self: 0  # type: ignore[method-assign]
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM  # type: ignore[attr-defined]
    common.empty_on_gpu = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    forward_launch._processors = lambda device: 132  # type: ignore[assignment]


def call(dim: int, seqlen: int, **more: Any) -> tuple[Problem, Operands]:
    """A Problem and its tensors."""
    heads, ragged, dtype = more.pop("heads", (2, 1)), more.pop("ragged", False), more.pop("dtype", "bfloat16")
    offset, batch = more.pop("offset", 0), 3
    kind = getattr(torch, dtype)

    def tensor(n: int) -> torch.Tensor:
        shape = (batch * seqlen, n, dim) if ragged else (batch, seqlen, n, dim)
        size = batch * seqlen * n * dim
        return torch.zeros(size + offset, dtype=kind)[offset:].view(shape)

    operands = Operands(tensor(heads[0]), tensor(heads[1]), tensor(heads[1]))
    if ragged:
        operands.cu_seqlens_q = operands.cu_seqlens_kv = torch.arange(batch + 1, dtype=torch.int32) * seqlen
    operands.score_tensors = ((),) * len(more.get("scores", ()))
    total = batch * seqlen if ragged else seqlen
    problem = Problem(
        layout="ragged" if ragged else "dense", dtype=dtype, out_dtype=dtype, device="cuda", head_dim=dim,
        head_dim_v=dim, num_heads_q=heads[0], num_heads_kv=heads[1], needs_grad=True, grad_of=frozenset("qkv"),
        batch=batch, seqlen_q=total, seqlen_kv=total, scale=0.3,
    )  # fmt: skip
    return replace(problem, **more), operands


def run(problem: Problem, operands: Operands) -> None:
    """Forward and backward, without and with the gradient of lse."""
    out, lse = forward_launch.forward(problem, operands)
    backward_launch.backward(problem, operands, out, lse, out, None)
    backward_launch.backward(problem, operands, out, lse, out, lse)
