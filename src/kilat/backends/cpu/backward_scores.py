"""Gradients of the bias, of tensors of user scores and of the sink: their tasks and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kilat.backends.cpu import user
from kilat.backends.cpu.backward_bias import BOX
from kilat.backends.cpu.backward_products import BLOCK_Q, geometry
from kilat.backends.cpu.backward_tasks import Tasks
from kilat.backends.cpu.host import broadcast_strides, torch_compute
from kilat.backends.cpu.tiles_scores import USER, USER_TENSORS
from kilat.scores import Bias, Score

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kilat.backends.cpu.backward_host import Backward

# Queries and keys of one task of the bias kernel, where the bias is not broadcast along them.
TASK_QUERIES = 4 * BLOCK_Q
TASK_KEYS = 256


def sink_gradient(run: Backward, sink: Tensor) -> Tensor:
    """dsink [heads] in the sink's type."""
    compute = torch_compute(run.problem)
    dsink = torch.zeros(run.problem.num_heads_q, dtype=torch.float64, device="cpu")
    run.put({"sink": run.pointer(sink.detach().to(compute).contiguous()), "dsink": run.pointer(dsink)})
    run.run("sink", Tasks(np.arange(run.problem.num_heads_q, dtype=np.int64)))
    return dsink.to(sink.dtype)


def score_gradients(run: Backward) -> list[list[Tensor | None]]:
    """One list per score modifier, one entry per tensor of it; None where there is no gradient or none is wanted."""
    p, o = run.problem, run.operands
    grads: list[list[Tensor | None]] = [[None] * len(tensors) for tensors in o.score_tensors]
    for n, (modifier, tensors) in enumerate(zip(p.scores, o.score_tensors, strict=True)):
        if isinstance(modifier, Bias) and "bias" in p.grad_of:
            grads[n] = [_bias_gradient(run, tensors[0])]
    if "score_tensors" in p.grad_of and any(isinstance(m, Score) for m in p.scores):
        _tensor_gradients(run, grads)
    return grads


def _bias_gradient(run: Backward, bias: Tensor) -> Tensor:
    """dbias of the bias's own shape, summed over its broadcast axes in the compute type."""
    p = run.problem
    buffer = torch.zeros(bias.shape, dtype=torch_compute(p), device="cpu")
    if buffer.numel():
        strides = broadcast_strides(buffer)
        run.put({"dbias": run.pointer(buffer), "stages": USER})
        run.put({f"dbias_{axis}": stride for axis, stride in zip("bhij", strides, strict=True)})
        shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
        run.run("bias", Tasks(_boxes(run, shape)))
    return buffer.to(bias.dtype)


def _boxes(run: Backward, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """`BOX` tasks that are disjoint in a tensor of this shape: a broadcast axis is never cut."""
    p = run.problem
    full = (p.batch, p.num_heads_q, *run.plan.longest)
    axes = []
    for size, length, step in zip(full, shape, (1, 1, TASK_QUERIES, TASK_KEYS), strict=True):
        first = np.arange(0, size, step) if length > 1 else np.zeros(min(size, 1), np.int64)
        last = np.minimum(first + step, size) if length > 1 else np.full(len(first), size)
        axes.append(np.stack([first, last], 1))
    index = np.meshgrid(*(np.arange(len(a)) for a in axes), indexing="ij")
    boxes = np.concatenate([a[i.ravel()] for a, i in zip(axes, index, strict=True)], 1).astype(np.int64)
    return np.ascontiguousarray(boxes).reshape(-1, BOX.size)


def _tensor_gradients(run: Backward, grads: list[list[Tensor | None]]) -> None:
    """Gradients of the float tensors of user scores, by one thread: any element may be read at any pair."""
    p, o, table = run.problem, run.operands, []
    geo = geometry(run.plan.block)
    made: dict[int, list[Tensor | None]] = {}
    for n, (modifier, tensors) in enumerate(zip(p.scores, o.score_tensors, strict=True)):
        if not isinstance(modifier, Score):
            continue
        dtypes = user.dtype_names(tensors)
        tensors_function = user.score_tensors_function(modifier.expr, dtypes, geo, run.plan.isa)
        made[n] = [
            torch.zeros(t.shape, dtype=torch_compute(p), device="cpu")
            if t.is_floating_point() and tensors_function
            else None
            for t in tensors
        ]
        environment = user.environment([t.detach() for t in tensors], made[n], tensors_function)
        table.append(
            [
                user.score_function(modifier.expr, dtypes, geo, run.plan.isa),
                user.score_backward_function(modifier.d_expr, dtypes, geo, run.plan.isa),
                run.pointer(environment),
            ]
        )
    run.put({"scores": run.pointer(np.array(table, np.int64)), "dbias": 0, "stages": USER_TENSORS})
    run.run("bias", Tasks(_boxes(run, (1, 1, 1, 1))), threads=1)
    for n, buffers in made.items():
        grads[n] = [
            None if buffer is None else buffer.to(t.dtype)
            for buffer, t in zip(buffers, o.score_tensors[n], strict=True)
        ]
