"""What a backend is: it says what it cannot do, and does the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.problem import Grads, Operands, Problem


class Backend(Protocol):
    """An implementation of attention for some Problems.

    It may also have `direct(problem, operands)`: a function (q, k, v) -> (out, lse) that does what `forward` does, for
    tensors with shapes, dtypes, strides and device of those, and with less work a call; or None. Problems with a ring
    cache come only if it has `reads_rings = True`.
    """

    name: str

    def unsupported(self, problem: Problem) -> list[str]:
        """Every reason, as a sentence with values, why this backend cannot do the problem; empty if it can."""
        ...

    def forward(self, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse) in the layouts of the semantics page; called only if `unsupported` is empty."""
        ...

    def backward(
        self, problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Grads:
        """Gradients of what `problem.grad_of` names; dlse is None if lse was not returned."""
        ...
