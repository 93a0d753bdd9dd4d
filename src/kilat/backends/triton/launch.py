"""The Triton backend's two entry points."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from kilat.backends.triton import tuning
from kilat.backends.triton._compat import OPTIONS
from kilat.backends.triton.adapt import adapt, query_tiles, rows
from kilat.backends.triton.forward import forward_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.backends.triton.heuristics import Config
    from kilat.problem import Grads, Operands, Problem


def forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse); see `Backend.forward`."""
    o, q = operands, operands.q
    out, lse = _outputs(problem, o)
    args = adapt(problem, o)
    chosen = tuning.chosen("forward", problem, args, q, capability(q))
    grid = query_tiles(problem, o, chosen.block_q)
    if grid:
        tensors = (rows(q), rows(o.k), rows(o.v), rows(out), lse)
        with on_device(q):
            run(forward_kernel, grid, (*tensors, *args), chosen)
    if o.out is not None and o.out is not out:
        return o.out.copy_(out), lse
    return out, lse


def run(kernel: Any, grid: int, args: tuple[Any, ...], chosen: Config) -> None:
    """Launch a kernel whose last parameters are its tile sizes."""
    kernel[(grid,)](
        *args, chosen.block_q, chosen.block_kv, num_warps=chosen.num_warps, num_stages=chosen.num_stages, **OPTIONS
    )


def capability(x: Tensor) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU."""
    if not x.is_cuda or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(x.device)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes x's GPU the current one: Triton launches there, on torch's stream."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def _outputs(problem: Problem, o: Operands) -> tuple[Tensor, Tensor]:
    q, dtype = o.q, getattr(torch, problem.out_dtype)
    usable = o.out is not None and (o.out.stride(-1) == 1 or o.out.shape[-1] == 1)
    if o.out is not None and usable:
        out = o.out
    else:
        out = torch.empty((*q.shape[:-1], problem.head_dim_v), dtype=dtype, device=q.device)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, torch.empty(lse_shape, dtype=torch.float32, device=q.device)


def backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Gradients; see `Backend.backward`."""
    from kilat.backends.triton.backward_launch import run_backward

    return run_backward(problem, operands, out, lse, dout, dlse)
