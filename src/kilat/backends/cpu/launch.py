"""The CPU backend's three entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilat.backends.cpu.forward_host import run_forward

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.problem import Grads, Operands, Problem


def unsupported(problem: Problem) -> list[str]:
    """What the CPU backend cannot do."""
    reasons: list[str] = []
    if not problem.device.startswith("cpu"):
        reasons.append(f"device={problem.device}: runs on the CPU only")
    if max(problem.head_dim, problem.head_dim_v) > 512 and problem.layout != "cached":
        reasons.append(f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}: at most 512")
    return reasons


def forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse); see `Backend.forward`."""
    return run_forward(problem, operands)


def backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Gradients; see `Backend.backward`."""
    from kilat.backends.cpu.backward_host import backward as run_backward

    return run_backward(problem, operands, out, lse, dout, dlse)
