"""What the Triton backend cannot do; no Triton is needed to say so."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from kilat import config
from kilat.backends.triton import bounds

if TYPE_CHECKING:
    from kilat.problem import Problem

LEAST_CAPABILITY = (8, 0)


def unsupported(problem: Problem) -> list[str]:
    """Every reason, as a sentence with values."""
    if problem.device != "cuda" and not (problem.device == "cpu" and config.triton_interprets()):
        return [f"the triton backend works on CUDA and ROCm tensors; got device={problem.device!r}"]
    reasons = bounds.why_not(problem.mask)
    if problem.dtype == "float64":
        reasons.append("dtype=float64: at most float32")
    if max(problem.head_dim, problem.head_dim_v) > 512 and problem.layout != "cached":
        reasons.append(f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}: at most 512")
    return reasons + (_machine(problem.device) or _memory(problem))


FLOAT32_BACKWARD = 133_120
"""Bytes of shared memory that the float32 backward takes at head_dim 512, with its smallest tiles."""


def _memory(problem: Problem) -> list[str]:
    """What does not fit into a GPU's shared memory."""
    wide = problem.needs_grad and problem.dtype == "float32" and max(problem.head_dim, problem.head_dim_v) > 256
    if not wide or problem.device != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    least = min(device.shared_memory_per_block_optin for device in devices)
    if least >= FLOAT32_BACKWARD:
        return []
    dims = f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}"
    return [f"{dims}: the float32 backward needs {FLOAT32_BACKWARD} bytes of shared memory; this GPU has {least}"]


def _machine(device: str) -> list[str]:
    """What is missing here; a machine without a GPU is asked for tables only, and says what others would."""
    if device == "cuda" and not torch.cuda.is_available():
        return []
    if importlib.util.find_spec("triton") is None:
        return ["the package triton is not installed"]
    if device != "cuda" or torch.version.hip is not None:
        return []
    least = min(torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count()))
    return [] if least >= LEAST_CAPABILITY else [f"compute capability {least[0]}.{least[1]}: at least 8.0"]
