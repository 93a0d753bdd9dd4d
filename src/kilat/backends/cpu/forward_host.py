"""Launching the forward kernels: plans, buffers, and which kernel takes which sequence."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kilat import config
from kilat.backends.cpu import decode, decode_tasks, forward, forward_half, forward_tasks, jit, pool, scratch
from kilat.backends.cpu.decode import DECODE
from kilat.backends.cpu.decode_tiles import decode_geometry
from kilat.backends.cpu.forward import FORWARD
from kilat.backends.cpu.forward_tiles import geometry
from kilat.backends.cpu.gemm import Blocking, blocking
from kilat.backends.cpu.host import Call, byte_strides, compute_type, dtype_code, torch_compute
from kilat.backends.cpu.isa import Isa, host_isa
from kilat.backends.cpu.params import Params

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kilat.backends.cpu.emit import Type
    from kilat.backends.cpu.layout import Geometry
    from kilat.problem import Operands, Problem

# Bytes behind the parameters: the task counter and, on another cache line, the counter of scratch slots.
_COUNTERS = 192
_EMPTY_COUNTERS = bytes(_COUNTERS)
_CACHED_PLANS = 256
# A sequence with at most this many rows (queries times heads of a group) goes to the kernel for few queries.
FEW_ROWS = 32
# Against many keys the kernel for few queries also gets, by kernel of the forward ("amx" is too fast for either):
# sequences whose queries fill at most this part of the forward's blocks, since it works on live rows alone (one core,
# 2k and 16k keys: 8 heads of a group with 5 queries each 5 to 16 times as fast, with as many as FILL says 1.2 times);
# all sequences of a call with at most so many blocks, since it alone is split over keys (one core: 1.2 times as slow
# in float32, 2 times in bfloat16).
FILL = {"fma": 0.63, "dot": 0.35}
LONE_BLOCKS = {"fma": 4, "dot": 1}
MANY_KEYS = 1024


@dataclass
class Launch:
    """One kernel call of a plan: parameters with the addresses of tensors left 0."""

    address: int
    params: Params
    template: bytes
    threads: int
    scratch: int  # bytes
    parts: int = 0  # bytes of partial results
    blocks: int = 0  # counters of finished parts


@dataclass
class Plan:
    """Everything about a call that does not change with the tensors' addresses."""

    call: Call  # owns the arrays that the templates point to
    launches: list[Launch]


_plans: dict[tuple[Any, ...], Plan] = {}


@dataclass(frozen=True)
class Kernel:
    """A compiled worker and what its scratch looks like."""

    address: int
    block: Blocking
    layout: Callable[[int, int], tuple[dict[str, int], int]]


def variant(problem: Problem, isa: Isa) -> str:
    """Which kernel runs: "amx" and "dot" for bfloat16 with pair products in hardware, else "fma".

    Quantised keys are scaled as they come in, which only float32 has room for, and rings are for few queries.

    On Intel the dot instruction has half the rate of two float32 ones (measured: 117 against 200 GFLOP/s), so there
    it is used only if the instruction set is asked for by name.
    """
    if problem.quantised or problem.ring_first is not None:
        return "fma"
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


@lru_cache(maxsize=64)
def decode_kernel(isa: Isa, compute: Type) -> int:
    """The worker for few queries."""
    name = f"decode {compute}"
    return jit.compile_module(lambda: decode.build(isa, compute), name, ["worker"], isa)["worker"]


def run_forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of any Problem."""
    plan = _plan(problem, operands)
    out, lse = _outputs(plan.call, operands)
    for launch in plan.launches:
        _execute(plan, launch, operands, out, lse)
    if operands.out is not None and operands.out is not out:
        return operands.out.copy_(out), lse
    return out, lse


def _plan(problem: Problem, o: Operands) -> Plan:
    """The plan of this call: remembered by Problem, strides and lengths, unless masks or scores bring tensors.

    The layers of a model share their lengths, so all but the first find the plan of this step.
    """
    if o.mask_tensors or problem.dropout or any(o.score_tensors):
        return _make_plan(problem, o)
    lengths = tuple(
        None if t is None else t.numpy().tobytes() for t in (o.cu_seqlens_q, o.cu_seqlens_kv, o.seqlens_q, o.seqlens_kv)
    )
    table = None if o.page_table is None else o.page_table.stride()
    scales = None if o.k_scale is None or o.v_scale is None else (o.k_scale.stride(), o.v_scale.stride())
    strides = (o.q.stride(), o.k.stride(), o.v.stride(), table, scales)
    key = (problem, o.q.shape[0], strides, lengths, torch.get_num_threads(), config.cpu_isa())
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _CACHED_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(problem, o)
        del plan.call.operands  # a remembered plan must not keep tensors alive
    return plan


def for_few(call: Call, kind: str, block_q: int) -> NDArray[np.bool_]:
    """Which sequences go to the kernel for few queries; the Problem and lengths alone say so, never the threads.

    With batch_invariant no sequence's companions count either.
    """
    p = call.problem
    few = call.q_len * p.group <= (FEW_ROWS if p.group <= FEW_ROWS else decode.MAX_ROWS)
    if kind not in FILL or p.group > decode.MAX_ROWS:
        return few
    blocks, many = -(-call.q_len // block_q), call.kv_len >= MANY_KEYS
    few |= many & (call.q_len <= FILL[kind] * block_q * blocks)
    lone = int(blocks[~few].sum()) * p.num_heads_q <= LONE_BLOCKS[kind]
    return few | many if lone and not p.batch_invariant else few


def _make_plan(problem: Problem, operands: Operands) -> Plan:
    isa, compute = host_isa(), compute_type(problem)
    call = Call(problem, operands)
    plan = Plan(call, [])
    kind = variant(problem, isa)
    block = blocking(isa.lanes32, compute) if kind == "fma" else forward_half.BLOCK
    few = for_few(call, kind, block.lanes * block.vectors)
    if not few.all():
        chosen = kernel(isa, compute, kind)
        tasks = forward_tasks.tasks(call, chosen.block, ~few)
        layout = chosen.layout(problem.head_dim, problem.head_dim_v)
        _add(plan, _Target(chosen.address, FORWARD, geometry(chosen.block), layout), tasks, isa)
    if (few & (call.q_len > 0)).any():
        geo = decode_geometry(compute, isa.lanes32 * 4 // compute.bytes)
        tasks, blocks, rows = decode_tasks.tasks(call, few)
        layout = decode.scratch_layout(geo, problem.head_dim, problem.head_dim_v)
        launch = _add(plan, _Target(decode_kernel(isa, compute), DECODE, geo, layout), tasks, isa)
        if launch is not None:
            stride = decode.part_bytes(geo, rows, problem.head_dim_v)
            launch.parts, launch.blocks = stride * len(tasks), blocks
            params = np.frombuffer(bytearray(launch.template), np.int64)
            params[DECODE.index["part_stride"]] = stride
            launch.template = params.tobytes()
    return plan


@dataclass(frozen=True)
class _Target:
    """A kernel, what it reads, the tile it works on, and its scratch (offsets, bytes a thread)."""

    address: int
    names: Params
    geometry: Geometry
    layout: tuple[dict[str, int], int]


def _add(plan: Plan, target: _Target, tasks: NDArray[np.int64], isa: Isa) -> Launch | None:
    """Add one kernel call to a plan, if there is anything to do."""
    if not len(tasks):
        return None
    names = target.names
    params = np.zeros(names.size, np.int64)
    plan.call.common(params, tasks, target.geometry, isa)
    _put_strides(params, names, plan.call)
    threads = min(torch.get_num_threads(), len(tasks))
    offsets, stride = target.layout
    for name, offset in (*offsets.items(), ("scratch_stride", stride)):
        params[names.index[name]] = offset
    launch = Launch(target.address, names, params.tobytes(), threads, threads * stride)
    plan.launches.append(launch)
    return launch


@lru_cache(maxsize=8)
def _buffer_type(size: int) -> Any:
    return ctypes.c_int64 * (size + _COUNTERS // 8)


def _execute(plan: Plan, launch: Launch, o: Operands, out: Tensor, lse: Tensor) -> None:
    """Put the addresses in and run the kernel on torch's threads."""
    at, size = launch.params.index, launch.params.size
    buffer = _buffer_type(size).from_buffer_copy(launch.template + _EMPTY_COUNTERS)
    buffer[at["q"]], buffer[at["k"]], buffer[at["v"]] = o.q.data_ptr(), o.k.data_ptr(), o.v.data_ptr()
    buffer[at["out"]], buffer[at["lse"]] = out.data_ptr(), lse.data_ptr()
    _put_output_strides(buffer, at, plan.call.ragged_q, out, lse)
    sink = done = None
    if o.sink is not None:
        sink = o.sink.detach().to(torch_compute(plan.call.problem)).contiguous()
        buffer[at["sink"]] = sink.data_ptr()
    if o.page_table is not None:
        buffer[at["pages"]] = o.page_table.data_ptr()
    if o.k_scale is not None and o.v_scale is not None:
        buffer[at["k_scale"]], buffer[at["v_scale"]] = o.k_scale.data_ptr(), o.v_scale.data_ptr()
    if launch.blocks:
        done = np.zeros(launch.blocks, np.int64)
        buffer[at["done"]] = done.ctypes.data
    start = ctypes.addressof(buffer)
    buffer[at["counter"]] = start + 8 * size
    with scratch.borrow(launch.scratch + launch.parts) as address:
        buffer[at["scratch"]] = address
        if launch.blocks:
            buffer[at["parts"]] = address + launch.scratch
        pool.run(launch.address, start, launch.threads)


def _outputs(call: Call, o: Operands) -> tuple[Tensor, Tensor]:
    """Output tensors, rows outside every sequence filled; torch's default device may be another than the CPU."""
    p = call.problem
    dtype = getattr(torch, p.out_dtype)
    shape = (*o.q.shape[:-1], p.head_dim_v)
    lse_shape = (p.num_heads_q, o.q.shape[0]) if call.ragged_q else (o.q.shape[0], p.num_heads_q, o.q.shape[1])
    usable = o.out is not None and o.out.dtype == dtype and o.out.stride(-1) == 1
    out = o.out if usable and o.out is not None else torch.empty(shape, dtype=dtype, device="cpu")
    lse = torch.empty(lse_shape, dtype=torch_compute(p), device="cpu")
    if not call.covers_queries:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def _put_strides(params: NDArray[np.int64], names: Params, call: Call) -> None:
    """Strides of the inputs, and where pages lie."""
    p, o, at = call.problem, call.operands, names.index
    for name, t, ragged in (("q", o.q, call.ragged_q), ("k", o.k, call.ragged_kv), ("v", o.v, call.ragged_kv)):
        strides = [0, *byte_strides(t)] if ragged else byte_strides(t)
        for axis, stride in zip("bnh", strides, strict=False):
            params[at[f"{name}_{axis}"]] = stride
    if o.page_table is not None:
        for name, t in (("k", o.k), ("v", o.v)):
            params[at[f"{name}_page"]], params[at[f"{name}_b"]] = byte_strides(t)[0], 0
        params[at["pages_b"]], params[at["page_size"]] = byte_strides(o.page_table)[0], p.page_size
    params[at["kv_dtype"]] = dtype_code(o.k)
    if p.ring_first is not None:
        params[at["ring_first"]], params[at["ring"]] = p.ring_first, o.k.shape[1] - p.ring_first
    axes = ("b", "n", "h") if o.page_table is None else ("page", "n", "h")
    for name, t in (("k_scale", o.k_scale), ("v_scale", o.v_scale)):
        strides = [] if t is None else byte_strides(t)
        for axis, stride in zip(reversed(axes), reversed(strides), strict=False):
            params[at[f"{name}_{axis}"]] = stride


def _put_output_strides(buffer: Any, at: dict[str, int], ragged: bool, out: Tensor, lse: Tensor) -> None:
    strides, size = byte_strides(out), lse.element_size()
    if ragged:
        strides = [0, *strides]
    buffer[at["out_b"]], buffer[at["out_n"]], buffer[at["out_h"]] = strides[0], strides[1], strides[2]
    buffer[at["out_dtype"]] = dtype_code(out)
    buffer[at["lse_b"]] = 0 if ragged else lse.stride(0) * size
    buffer[at["lse_h"]], buffer[at["lse_n"]] = lse.stride(-2) * size, size
