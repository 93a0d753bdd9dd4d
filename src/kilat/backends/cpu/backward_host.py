"""Launching the backward kernels: plans, dQ buffers, and the gradients that come out."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kilat import config
from kilat.backends.cpu import backward as kernels
from kilat.backends.cpu import backward_half, jit, pool, scratch
from kilat.backends.cpu.backward import EXPORTS, scratch_layout
from kilat.backends.cpu.backward_products import geometry
from kilat.backends.cpu.backward_scores import score_gradients, sink_gradient
from kilat.backends.cpu.backward_tasks import Tasks, chunk_tasks, chunk_tiles, row_tasks
from kilat.backends.cpu.backward_tile import BACKWARD
from kilat.backends.cpu.gemm import Blocking, blocking
from kilat.backends.cpu.host import Call, byte_strides, compute_type, dtype_code, torch_compute
from kilat.backends.cpu.isa import Isa, host_isa
from kilat.problem import Grads

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kilat.backends.cpu.emit import Type
    from kilat.problem import Operands, Problem

    Ints = NDArray[np.int64]

_AT = BACKWARD.index
# Behind the parameters: the task counter and, on another cache line, the counter of scratch slots.
_COUNTER = BACKWARD.size
_NO_COUNTERS = bytes(128)
_Slots = ctypes.c_int64 * (BACKWARD.size + len(_NO_COUNTERS) // 8)


@lru_cache(maxsize=64)
def compiled(isa: Isa, compute: Type, half: bool) -> dict[str, int]:
    """Addresses of the kernels for an instruction set and compute type; `half`: those of backward_half."""
    if half:
        return jit.compile_module(
            lambda: backward_half.build(isa), f"backward half {isa.has_amx}", backward_half.EXPORTS, isa
        )
    return jit.compile_module(lambda: kernels.build(isa, compute), f"backward {compute}", EXPORTS, isa)


def backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Gradients of what `problem.grad_of` names; see `Backend.backward`."""
    run = Backward(problem, operands, out, lse, dout, dlse)
    grads, wanted = run.grads(), problem.grad_of
    if wanted.isdisjoint("qkv"):
        run.deltas()
    else:
        run.main(grads)
    if "sink" in wanted and operands.sink is not None:
        grads.sink = sink_gradient(run, operands.sink)
    if problem.scores:
        grads.score_tensors = score_gradients(run)
    return grads


@dataclass(frozen=True)
class Plan:
    """Everything about a call that does not come from inside its tensors or from their addresses."""

    isa: Isa
    block: Blocking
    half: bool  # by products of bfloat16 pairs, see backward_half
    kernels: dict[str, int]
    template: bytes  # parameters, with addresses and strides of q, k, v, out and gradients left 0
    scratch: int  # bytes a thread
    rows: Tasks
    chunks: Tasks
    splits: int
    ragged: tuple[bool, bool]  # queries, keys
    covered: tuple[bool, bool]  # whether sequences own every token
    longest: tuple[int, int]
    keep: list[Any]  # what the template points to


def _plan(problem: Problem, o: Operands) -> Plan:
    """The plan of this call: remembered with the Problem if nothing in it comes from inside a tensor."""
    fixed = o.cu_seqlens_q is None and o.cu_seqlens_kv is None and o.seqlens_q is None and o.seqlens_kv is None
    if not fixed or o.mask_tensors or problem.dropout or any(o.score_tensors):
        return _make_plan(problem, o)
    key = f"cpu backward {config.cpu_isa()}"
    plan = problem.memo.get(key)
    if plan is None:
        plan = problem.memo[key] = _make_plan(problem, o)
    return plan


def _make_plan(problem: Problem, o: Operands) -> Plan:
    isa, compute = host_isa(), compute_type(problem)
    block, call = blocking(isa.lanes32, compute), Call(problem, o)
    params = np.zeros(BACKWARD.size, np.int64)
    call.common(params, np.zeros((0, 1), np.int64), geometry(block), isa)
    longest = (int(call.q_len.max(initial=0)), int(call.kv_len.max(initial=0)))
    half, dims = backward_half.supports(problem, isa), (problem.head_dim, problem.head_dim_v)
    if half:
        sub = backward_half.chunk_tiles(isa, max(dims), longest[1])
        layout, stride = backward_half.scratch_layout(*dims, sub)
    else:
        sub = chunk_tiles(block, max(dims), longest[1])
        layout, stride = scratch_layout(block, *dims, sub)
    chunks, splits = chunk_tasks(call, sub * block.lanes * block.vectors)
    most = int(splits.max(initial=1))
    layout |= {"sub": sub, "scratch_stride": stride, "nseqs": problem.batch, "alone": int(most == 1)}
    for name, value in layout.items():
        params[_AT[name]] = value
    used = (int(call.q_len.sum()), int(call.kv_len.sum()))
    there = (o.q.shape[0] if call.ragged_q else o.q.shape[0] * o.q.shape[1],
             o.k.shape[0] if call.ragged_kv else o.k.shape[0] * o.k.shape[1])  # fmt: skip
    return Plan(
        isa, block, half, compiled(isa, compute, half), params.tobytes(), stride, Tasks(row_tasks(call, splits)),
        Tasks(chunks), most, (call.ragged_q, call.ragged_kv), (used[0] == there[0], used[1] == there[1]),
        longest, call.keep,
    )  # fmt: skip


class Backward:
    """One call: the parameters that all its kernels read, and delta."""

    def __init__(
        self, problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> None:
        self.problem, self.operands, self.plan = problem, operands, _plan(problem, operands)
        self.params = _Slots.from_buffer_copy(self.plan.template + _NO_COUNTERS)
        ragged_q, ragged_kv = self.plan.ragged
        dout = dout if dout.dtype == out.dtype else dout.to(out.dtype)
        dout = dout if dout.stride(-1) == 1 or dout.shape[-1] == 1 else dout.contiguous()
        self.keep: list[Any] = [dout]
        self.put_tensor("q", operands.q, ragged_q)
        self.put_tensor("k", operands.k, ragged_kv)
        self.put_tensor("v", operands.v, ragged_kv)
        self.put_tensor("out", out, ragged_q)
        self.put_tensor("do", dout, ragged_q)
        self.params[_AT["out_dtype"]] = dtype_code(out)
        self._statistics(lse, dlse)

    def put(self, slots: dict[str, int]) -> None:
        """Set parameters by name."""
        for name, value in slots.items():
            self.params[_AT[name]] = value

    def pointer(self, x: NDArray[Any] | Tensor) -> int:
        """Address of an array that lives as long as this call."""
        self.keep.append(x)
        return x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data

    def put_tensor(self, name: str, t: Tensor, ragged: bool) -> None:
        """Pointer and strides of a tensor [batch, seqlen, heads, dim] or [total, heads, dim]; slots b, n, h follow."""
        slot, size, strides = _AT[name], t.element_size(), t.stride()
        b, n, h = (0, *strides[:2]) if ragged else strides[:3]
        self.params[slot : slot + 4] = (t.data_ptr(), b * size, n * size, h * size)

    def _statistics(self, lse: Tensor, dlse: Tensor | None) -> None:
        compute = torch_compute(self.problem)
        lse = lse.to(compute).contiguous()
        delta = torch.empty_like(lse)
        self.put({"lse": self.pointer(lse), "delta": self.pointer(delta)})
        if dlse is not None:
            self.put({"dlse": self.pointer(dlse.to(compute).contiguous())})
        size = lse.element_size()
        self.put({"lse_b": 0 if self.plan.ragged[0] else lse.stride(0) * size, "lse_h": lse.stride(-2) * size})

    def deltas(self) -> None:
        """Compute delta for the kernels that run without `main`."""
        self.run("deltas", self.plan.rows)

    def run(self, kernel: str, tasks: Tasks, threads: int = 0) -> None:
        """Run a kernel on these tasks, on torch's threads unless `threads` says how many."""
        if not tasks.count:
            return
        threads = min(threads or torch.get_num_threads(), tasks.count)
        start, params = ctypes.addressof(self.params), self.params
        params[_COUNTER] = params[_COUNTER + 8] = 0
        params[_AT["tasks"]], params[_AT["ntasks"]] = tasks.address, tasks.count
        params[_AT["counter"]] = start + 8 * _COUNTER
        with scratch.borrow(threads * self.plan.scratch) as address:
            params[_AT["scratch"]] = address
            pool.run(self.plan.kernels["run_" + kernel], start, threads)

    def grads(self) -> Grads:
        """Uninitialised gradients of q, k and v, zero where no sequence covers the tensor."""
        o, wanted = self.operands, self.problem.grad_of
        (covers_q, covers_kv) = self.plan.covered

        def buffer(name: str, t: Tensor, covered: bool) -> Tensor | None:
            if name not in wanted:
                return None
            return (torch.empty if covered else torch.zeros)(t.shape, dtype=t.dtype, device="cpu")

        return Grads(buffer("q", o.q, covers_q), buffer("k", o.k, covers_kv), buffer("v", o.v, covers_kv))

    def main(self, grads: Grads) -> None:
        """Fill the gradients of q, k and v."""
        ragged_q, ragged_kv = self.plan.ragged
        for name, t, ragged in (("q", grads.q, ragged_q), ("k", grads.k, ragged_kv), ("v", grads.v, ragged_kv)):
            self.params[_AT["need_" + name]] = int(t is not None)
            if t is not None:
                self.put_tensor("d" + name, t, ragged)
        if grads.q is not None:
            self._accumulator(grads.q)
        together = self.plan.splits == 1
        if not together:
            self.deltas()
        self.run("chunks", self.plan.chunks)
        if grads.q is not None and not together:
            self.run("finish", self.plan.rows)

    def _accumulator(self, dq: Tensor) -> None:
        """Where each split sums its dQ; the first in dq itself, if the rows of that are whole compute vectors."""
        p, plan = self.problem, self.plan
        batch = 0 if plan.ragged[0] else 1
        split = second = 0
        if p.dtype in ("float32", "float64") and p.head_dim % plan.block.lanes == 0:
            first, strides = dq.data_ptr(), byte_strides(dq)
            of_b, of_n, of_h = batch * strides[0], strides[-3], strides[-2]
            if plan.splits > 1:
                more = torch.empty((plan.splits - 1, *dq.shape), dtype=dq.dtype, device="cpu")
                second, split = self.pointer(more) - first, byte_strides(more)[0]
        else:
            lanes = backward_half.BLOCK if plan.half else plan.block.lanes
            pad = -(-p.head_dim // lanes) * lanes
            shape = (plan.splits, dq.shape[0] if batch else 1, p.num_heads_q, dq.shape[-3], pad)
            more = torch.empty(shape, dtype=torch_compute(p), device="cpu")
            first, (split, of_b, of_h, of_n, _) = self.pointer(more), byte_strides(more)
            second, of_b = split, batch * of_b
        self.put({"acc": first, "acc_b": of_b, "acc_n": of_n, "acc_h": of_h, "acc_second": second, "acc_split": split})
