"""The Triton backend's three entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.problem import Grads, Operands, Problem


def unsupported(problem: Problem) -> list[str]:
    """What the Triton backend cannot do."""
    return ["kernels of the triton backend are not part of this version of kilat"]


def forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse); see `Backend.forward`."""
    raise NotImplementedError("the triton backend has no forward yet")


def backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Gradients; see `Backend.backward`."""
    raise NotImplementedError("the triton backend has no backward yet")
