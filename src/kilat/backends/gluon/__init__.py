"""The peak backend of Hopper (sm_90): TMA, wgmma, warp specialisation through Gluon; Triton comes in on first use."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kilat.masks.affine import affine

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kilat.problem import Grads, Operands, Problem

MAX_DIM = 256


@lru_cache(maxsize=16)
def _capabilities(device: str) -> frozenset[tuple[int, int]]:
    """(major, minor) of a GPU, of all where no number is said; none where there is no GPU, and one only asks."""
    import torch

    if not torch.cuda.is_available():
        return frozenset()
    numbers = [torch.device(device).index] if ":" in device else range(torch.cuda.device_count())
    return frozenset(torch.cuda.get_device_capability(n) for n in numbers)


def _module(name: str) -> Any:
    return importlib.import_module(f"kilat.backends.gluon.{name}")


class GluonBackend:
    """Attention on sm_90 for masks of one moving interval, dense, padded or ragged, forward and backward."""

    name = "gluon"

    def unsupported(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot do the problem; empty if it can."""
        p = problem
        if not p.device.startswith("cuda"):
            return [f"the gluon backend works on CUDA tensors; got device={p.device!r}"]
        reasons: list[str] = []
        if others := _capabilities(p.device) - {(9, 0)}:
            found = ", ".join(f"{major}.{minor}" for major, minor in sorted(others))
            reasons.append(f"the gluon backend needs compute capability 9.0; {p.device} has {found}")
        if p.dtype not in ("float16", "bfloat16"):
            reasons.append(f"the gluon backend takes float16 and bfloat16; got dtype={p.dtype!r}")
        if max(p.head_dim, p.head_dim_v) > MAX_DIM:
            dims = f"head_dim={p.head_dim}, head_dim_v={p.head_dim_v}"
            reasons.append(f"the gluon backend takes head dimensions up to {MAX_DIM}; got {dims}")
        if p.layout == "cached":
            reasons.append("the gluon backend reads no KV cache; got layout='cached'")
        if affine(p.mask) is None:
            reasons.append(f"the gluon backend takes causal and window masks; got mask={p.mask!r}")
        reasons += [f"the gluon backend has no {s.name} score" for s in p.scores if type(s).__name__ != "Softcap"]
        if p.dropout:
            reasons.append(f"the gluon backend has no dropout; got dropout={p.dropout!r}")
        return reasons or self._beyond_the_problem(problem)

    def _beyond_the_problem(self, problem: Problem) -> list[str]:
        """Reasons that lie in the installation."""
        kernels = _module("forward_launch").KERNELS
        if problem.needs_grad:
            kernels += _module("backward_launch").KERNELS
        if _module("ready").are_there(kernels[0]):
            return []
        try:
            if _capabilities(problem.device):
                _module("_compat").hashing()  # meanwhile the kernels are imported
            for kernel in kernels:
                importlib.import_module(kernel.partition(":")[0])
        except ImportError as error:
            return [f"the gluon backend cannot be imported: {error}"]
        return []

    def forward(self, problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse) in the layouts of the semantics page."""
        self.forward = _module("forward_launch").forward  # from now on calls go straight to the host code
        return self.forward(problem, operands)

    def direct(self, problem: Problem, operands: Operands) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """(q, k, v) -> (out, lse) for tensors like these; see `Backend`."""
        return _module("forward_launch").direct(problem, operands)

    def backward(
        self, problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Grads:
        """Gradients of what `problem.grad_of` names."""
        self.backward = _module("backward_launch").backward
        return self.backward(problem, operands, out, lse, dout, dlse)


BACKEND = GluonBackend()
