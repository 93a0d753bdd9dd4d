"""The Triton backend's two entry points."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import cache

from kilat.backends import kernel_files
from kilat.backends.triton import decode_launch, tuning
from kilat.backends.triton._compat import OPTIONS
from kilat.backends.triton.adapt import adapt, query_tiles, rows
from kilat.backends.triton.forward import forward_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.backends.triton.heuristics import Config
    from kilat.problem import Grads, Operands, Problem


kernel_files.shorten(cache)


def forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse); see `Backend.forward`."""
    o, q = operands, operands.q
    out, lse = _outputs(problem, o)
    if problem.layout == "cached" and decode_launch.wanted(problem, o):
        decode_launch.decode(problem, o, out, lse, capability(q))
    else:
        _forward(problem, o, out, lse)
    if o.out is not None and o.out is not out:
        return o.out.copy_(out), lse
    return out, lse


def _forward(problem: Problem, o: Operands, out: Tensor, lse: Tensor) -> None:
    """The kernel for many queries."""
    q, args = o.q, adapt(problem, o)
    chosen = tuning.chosen("forward", problem, args, q, capability(q))
    grid = query_tiles(problem, o, chosen.block_q)
    if grid:
        tensors = (rows(q), rows(o.k), rows(o.v), rows(out), lse)
        with on_device(q):
            run(forward_kernel, grid, (*tensors, *args), chosen)


def run(kernel: Any, grid: int, args: tuple[Any, ...], chosen: Config) -> None:
    """Launch a kernel whose last parameters are its tile sizes."""
    tiles, options = (chosen.block_q, chosen.block_kv), {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    start(kernel, grid, (*args, *tiles), options)


_checked: dict[int, Any] = {}
"""Compiled kernels whose files were looked at, by id."""


def start(kernel: Any, grid: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch a kernel with all of its arguments.

    It is compiled anew if its files on disk are damaged. Raises DamagedError where that shows only after the launch:
    what the call wrote is not to be trusted then, and the next one compiles anew.
    """
    try:
        made = kernel[(grid,)](*args, **options, **OPTIONS)
    except Exception as error:
        if not kernel_files.is_damage(error):
            raise
        made = _anew(kernel, grid, args, options, error)
    if made is not None and id(made) not in _checked:
        try:
            kernel_files.check(made)
        except kernel_files.DamagedError as error:
            kernel.device_caches.clear()
            kernel_files.forget(made, compile_again=True)
            text = f"{error}: what this call computed is not to be trusted, and the next one compiles anew"
            raise kernel_files.DamagedError(text) from None
        _checked[id(made)] = made


def _anew(kernel: Any, grid: int, args: tuple[Any, ...], options: dict[str, Any], error: Exception) -> Any:
    """Launch a kernel that Triton could not read from disk."""
    from triton import knobs

    kernel_files.warn(kernel.__name__, error)
    kernel.device_caches.clear()
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        made = kernel[(grid,)](*args, **options, **OPTIONS)
    kernel_files.forget(made)
    return made


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
