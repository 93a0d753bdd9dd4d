"""Launching the forward kernel: task lists, buffers, splits over keys, and the merge of their parts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kilat import config
from kilat.backends.cpu import forward, forward_half, forward_tasks, jit, pool, scratch
from kilat.backends.cpu.forward import FORWARD
from kilat.backends.cpu.forward_tiles import geometry
from kilat.backends.cpu.gemm import Blocking, blocking
from kilat.backends.cpu.host import Call, byte_strides, compute_type, dtype_code, torch_compute
from kilat.backends.cpu.isa import Isa, host_isa

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kilat.backends.cpu.emit import Type
    from kilat.problem import Operands, Problem

# Bytes behind the parameters: the task counter and, on another cache line, the counter of scratch slots.
_COUNTERS = 192
_CACHED_PLANS = 256


@dataclass
class Plan:
    """Everything about a call that does not change with the tensors' addresses."""

    address: int
    template: bytes  # parameters, addresses of tensors left 0
    threads: int
    scratch: int  # bytes
    call: Call  # owns the arrays that the template points to
    n_splits: int
    has_tasks: bool


_plans: dict[tuple[Any, ...], Plan] = {}


@dataclass(frozen=True)
class Kernel:
    """A compiled worker and what its scratch looks like."""

    address: int
    block: Blocking
    layout: Callable[[int, int], tuple[dict[str, int], int]]


def variant(problem: Problem, isa: Isa) -> str:
    """Which kernel runs: "amx" and "dot" for bfloat16 with pair products in hardware, else "fma".

    On Intel the dot instruction has half the rate of two float32 ones (measured: 117 against 200 GFLOP/s), so there
    it is used only if the instruction set is asked for by name.
    """
    if problem.dtype == "bfloat16" and isa.has_amx:
        return "amx"
    if (
        problem.dtype == "bfloat16"
        and isa.has_dot_bf16
        and (isa.cpu.startswith("znver") or config.cpu_isa() == isa.name)
    ):
        return "dot"
    return "fma"


@lru_cache(maxsize=64)
def kernel(isa: Isa, compute: Type, kind: str) -> Kernel:
    """The worker of one variant."""
    name = f"forward {kind} {compute}"
    if kind == "fma":
        block = blocking(isa.lanes32, compute)
        found = jit.compile_module(lambda: forward.build(isa, compute), name, ["worker"], isa)
        return Kernel(found["worker"], block, lambda d, d_v: forward.scratch_layout(block, d, d_v))
    found = jit.compile_module(lambda: forward_half.build(isa, kind == "amx"), name, ["worker"], isa)
    return Kernel(found["worker"], forward_half.BLOCK, forward_half.scratch_layout)


def run_forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of any Problem without quantised pages."""
    plan = _plan(problem, operands)
    out, lse = _outputs(plan.call, operands, plan.n_splits)
    if plan.has_tasks:
        _execute(plan, operands, out, lse)
    if plan.n_splits == 1:
        return out, lse
    return merge_splits(problem, operands, out, lse)


def _plan(problem: Problem, o: Operands) -> Plan:
    """The plan of this call: remembered if nothing in it comes from inside a tensor."""
    fixed = o.cu_seqlens_q is None and o.seqlens_q is None and o.seqlens_kv is None and o.page_table is None
    if not fixed or o.mask_tensors or problem.dropout or any(o.score_tensors):
        return _make_plan(problem, o)
    threads = torch.get_num_threads()
    key = (problem, o.q.stride(), o.k.stride(), o.v.stride(), threads, config.cpu_isa())
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _CACHED_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(problem, o)
    return plan


def _make_plan(problem: Problem, operands: Operands) -> Plan:
    isa, compute = host_isa(), compute_type(problem)
    chosen = kernel(isa, compute, variant(problem, isa))
    block = chosen.block
    call = Call(problem, operands)
    n_splits, chunk = forward_tasks.splits(call, block)
    tasks = forward_tasks.tasks(call, block, n_splits, chunk)
    params = np.zeros(FORWARD.size, np.int64)
    if not len(tasks):
        return Plan(0, b"", 0, 0, call, n_splits, False)
    call.common(params, tasks, geometry(block), isa)
    _put_strides(params, call)
    threads = min(torch.get_num_threads(), len(tasks))
    offsets, stride = chosen.layout(problem.head_dim, problem.head_dim_v)
    for name, offset in (*offsets.items(), ("scratch_stride", stride)):
        params[FORWARD.index[name]] = offset
    return Plan(chosen.address, params.tobytes(), threads, threads * stride, call, n_splits, True)


_AT = {name: FORWARD.index[name] for name in FORWARD.names}
_Buffer = ctypes.c_int64 * (FORWARD.size + _COUNTERS // 8)
_EMPTY_COUNTERS = bytes(_COUNTERS)


def _execute(plan: Plan, o: Operands, out: Tensor, lse: Tensor) -> None:
    """Put the addresses in and run the kernel on torch's threads."""
    p = plan.call.problem
    buffer = _Buffer.from_buffer_copy(plan.template + _EMPTY_COUNTERS)
    buffer[_AT["q"]], buffer[_AT["k"]], buffer[_AT["v"]] = o.q.data_ptr(), o.k.data_ptr(), o.v.data_ptr()
    buffer[_AT["out"]], buffer[_AT["lse"]] = out.data_ptr(), lse.data_ptr()
    _put_output_strides(buffer, plan, out, lse)
    sink = None
    if o.sink is not None and plan.n_splits == 1:
        sink = o.sink.detach().to(torch_compute(p)).contiguous()
        buffer[_AT["sink"]] = sink.data_ptr()
    start = ctypes.addressof(buffer)
    buffer[_AT["counter"]] = start + 8 * FORWARD.size
    with scratch.borrow(plan.scratch) as address:
        buffer[_AT["scratch"]] = address
        pool.run(plan.address, start, plan.threads)


def _outputs(call: Call, o: Operands, splits: int) -> tuple[Tensor, Tensor]:
    """Output tensors (or one partial result a split, in the compute type), rows outside every sequence filled."""
    p = call.problem
    dtype, compute = getattr(torch, p.out_dtype), torch_compute(p)
    shape = (*o.q.shape[:-1], p.head_dim_v)
    lse_shape = (p.num_heads_q, o.q.shape[0]) if call.ragged_q else (o.q.shape[0], p.num_heads_q, o.q.shape[1])
    if splits > 1:
        out, lse = torch.empty((splits, *shape), dtype=compute), torch.empty((splits, *lse_shape), dtype=compute)
    else:
        given = o.out is not None and o.out.dtype == dtype
        out = o.out if given and o.out is not None else torch.empty(shape, dtype=dtype)
        lse = torch.empty(lse_shape, dtype=compute)
    if not call.covers_queries:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def _put_strides(params: NDArray[np.int64], call: Call) -> None:
    """Strides of the inputs, and where pages lie."""
    p, o = call.problem, call.operands
    for name, t, ragged in (("q", o.q, call.ragged_q), ("k", o.k, call.ragged_kv), ("v", o.v, call.ragged_kv)):
        strides = [0, *byte_strides(t)] if ragged else byte_strides(t)
        for axis, stride in zip("bnh", strides, strict=False):
            params[_AT[f"{name}_{axis}"]] = stride
    if o.page_table is not None:
        for name, t in (("k", o.k), ("v", o.v)):
            params[_AT[f"{name}_page"]], params[_AT[f"{name}_b"]] = byte_strides(t)[0], 0
        params[_AT["pages"]] = call.pointer(o.page_table)
        params[_AT["pages_b"]], params[_AT["page_size"]] = byte_strides(o.page_table)[0], p.page_size


def _put_output_strides(buffer: Any, plan: Plan, out: Tensor, lse: Tensor) -> None:
    parts = plan.n_splits > 1
    first_out, first_lse = (out[0], lse[0]) if parts else (out, lse)
    strides, size = byte_strides(first_out), lse.element_size()
    if plan.call.ragged_q:
        strides = [0, *strides]
    buffer[_AT["out_b"]], buffer[_AT["out_n"]], buffer[_AT["out_h"]] = strides[0], strides[1], strides[2]
    buffer[_AT["out_dtype"]] = dtype_code(out)
    buffer[_AT["lse_b"]] = 0 if plan.call.ragged_q else first_lse.stride(0) * size
    buffer[_AT["lse_h"]], buffer[_AT["lse_n"]] = first_lse.stride(-2) * size, size
    if parts:
        buffer[_AT["out_slot"]], buffer[_AT["lse_slot"]] = byte_strides(out)[0], lse.stride(0) * size


def merge_splits(p: Problem, o: Operands, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the splits in order, one at a time, so that an empty split changes no bit; then the sink."""

    def rows(x: Tensor) -> Tensor:  # lse layout to out layout
        return (x.transpose(-1, -2)).unsqueeze(-1)

    top = lses.amax(0)
    sink = None if o.sink is None else o.sink.detach().to(lses.dtype)
    shape = (-1, 1)
    if sink is not None:
        top = torch.maximum(top, sink.view(shape))
    base = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    total = torch.zeros_like(top) if sink is None else torch.exp(sink.view(shape) - base)
    out = torch.zeros_like(outs[0])
    for part, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - base)
        total = total + weight
        out = out + torch.where(rows(weight) == 0, torch.zeros_like(part), part * rows(weight))
    dead = total == 0
    out = torch.where(rows(dead), torch.zeros_like(out), out / rows(torch.where(dead, torch.ones_like(total), total)))
    lse = torch.where(dead, torch.full_like(top, -torch.inf), base + torch.log(total))
    result = out.to(getattr(torch, p.out_dtype))
    if o.out is not None:
        result = o.out.copy_(result)
    return result, lse
