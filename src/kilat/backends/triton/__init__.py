"""The portable GPU backend; Triton and the kernels are imported when the first call needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilat.backends.triton import limits

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from kilat.problem import Grads, Operands, Problem


class TritonBackend:
    """Attention on NVIDIA (sm_80 and newer) and AMD GPUs: kernels in Triton, compiled at first use."""

    name = "triton"
    _launch: ModuleType | None = None

    def _module(self) -> ModuleType:
        if self._launch is None:
            from kilat.backends.triton import launch

            self._launch = launch
            # From now on calls go straight to the kernels' host code.
            self.forward = launch.forward
            self.backward = launch.backward
        return self._launch

    def unsupported(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot do the problem; empty if it can."""
        return limits.unsupported(problem)

    def forward(self, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse) in the layouts of the semantics page."""
        return self._module().forward(problem, operands)

    def backward(
        self, problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Grads:
        """Gradients of what `problem.grad_of` names."""
        return self._module().backward(problem, operands, out, lse, dout, dlse)


BACKEND = TritonBackend()
