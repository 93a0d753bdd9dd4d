"""The CPU backend; its kernels and llvmlite are imported when the first call needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from kilat.problem import Grads, Operands, Problem


class CpuBackend:
    """Attention on any CPU: kernels in LLVM IR, compiled at first use."""

    name = "cpu"
    reads_rings = True
    _launch: ModuleType | None = None

    def _module(self) -> ModuleType:
        if self._launch is None:
            from kilat.backends.cpu import launch

            self._launch = launch
            # From now on calls go straight to the kernels' host code.
            self.forward = launch.forward
            self.backward = launch.backward
        return self._launch

    def unsupported(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot do the problem; empty if it can."""
        if problem.device != "cpu":
            return [f"the cpu backend works on CPU tensors; got device={problem.device!r}"]
        try:
            launch = self._module()
        except ImportError as error:
            return [f"the cpu backend cannot be imported: {error}"]
        return launch.unsupported(problem)

    def forward(self, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse) in the layouts of the semantics page."""
        return self._module().forward(problem, operands)

    def backward(
        self, problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Grads:
        """Gradients of what `problem.grad_of` names."""
        return self._module().backward(problem, operands, out, lse, dout, dlse)


BACKEND = CpuBackend()
