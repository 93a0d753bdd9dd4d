"""Launching the backward: task lists, dQ buffers, and the gradients that come out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from kilat.backends.cpu import backward as kernels
from kilat.backends.cpu import jit, pool
from kilat.backends.cpu.backward import CHUNKS, EXPORTS, ROWS, scratch_layout
from kilat.backends.cpu.backward_products import BLOCK_Q, geometry
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

# Work is split by the Problem alone, so that the number of threads never changes a bit. A kv head's keys are split
# until there are about WANTED_TASKS tasks of equal work, but each split costs one more dQ buffer.
WANTED_TASKS = 16
MAX_SPLITS = 8
MIN_SPLIT = 1024
CHUNK_KEYS = 256
"""Keys whose K, V, dK and dV a task holds at a time, for head sizes up to 128; fewer beyond, to stay in the L2 cache."""


@lru_cache(maxsize=64)
def compiled(isa: Isa, compute: Type) -> dict[str, int]:
    """Addresses of the kernels for an instruction set and compute type."""
    return jit.compile_module(lambda: kernels.build(isa, compute), f"backward {compute}", EXPORTS, isa)


def backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Gradients of what `problem.grad_of` names; see `Backend.backward`."""
    from kilat.backends.cpu.backward_scores import score_gradients, sink_gradient

    run = Backward(problem, operands, out, lse, dout, dlse)
    grads = run.grads()
    if grads.q is not None or grads.k is not None or grads.v is not None:
        run.main(grads)
    if "sink" in problem.grad_of and operands.sink is not None:
        grads.sink = sink_gradient(run, operands.sink)
    grads.score_tensors = score_gradients(run)
    return grads


class Backward:
    """One call: the parameter array that all its kernels read, and delta."""

    def __init__(
        self, problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> None:
        self.problem, self.isa, self.compute = problem, host_isa(), compute_type(problem)
        self.block = blocking(self.isa.lanes32, self.compute)
        self.call = Call(problem, operands)
        self.kernels = compiled(self.isa, self.compute)
        self.params: Ints = np.zeros(BACKWARD.size, np.int64)
        self.call.common(self.params, np.zeros((0, 1), np.int64), geometry(self.block), self.isa)
        self.sub = chunk_tiles(
            self.block, max(problem.head_dim, problem.head_dim_v), int(self.call.kv_len.max(initial=0))
        )
        layout, self.scratch_stride = scratch_layout(self.block, problem.head_dim, problem.head_dim_v, self.sub)
        self.put(sub=self.sub, scratch_stride=self.scratch_stride, nseqs=problem.batch, **layout)
        dout = dout.to(out.dtype)
        dout = dout if dout.stride(-1) == 1 or dout.shape[-1] == 1 else dout.contiguous()
        for name, t in (("q", operands.q), ("out", out), ("do", dout)):
            self.put_tensor(name, t, self.call.ragged_q)
        for name, t in (("k", operands.k), ("v", operands.v)):
            self.put_tensor(name, t, self.call.ragged_kv)
        self.put(out_dtype=dtype_code(out))
        self._statistics(lse, dlse)
        self.head_rows = head_rows(self.call)
        self.run("deltas", self.head_rows)

    def put(self, **slots: int) -> None:
        for name, value in slots.items():
            self.params[BACKWARD.index[name]] = value

    def put_tensor(self, name: str, t: Tensor, ragged: bool) -> None:
        """Pointer and strides of a tensor [batch, seqlen, heads, dim] or [total, heads, dim]."""
        strides = [0, *byte_strides(t)] if ragged else byte_strides(t)
        self.put(
            **{name: self.call.pointer(t), **{f"{name}_{axis}": s for axis, s in zip("bnh", strides, strict=False)}}
        )

    def _statistics(self, lse: Tensor, dlse: Tensor | None) -> None:
        compute = torch_compute(self.problem)
        lse = lse.to(compute).contiguous()
        delta = torch.empty_like(lse)
        self.put(lse=self.call.pointer(lse), delta=self.call.pointer(delta))
        if dlse is not None:
            self.put(dlse=self.call.pointer(dlse.to(compute).contiguous()))
        size = lse.element_size()
        self.put(lse_b=0 if self.call.ragged_q else lse.stride(0) * size, lse_h=lse.stride(-2) * size)

    def run(self, kernel: str, tasks: Ints, threads: int = 0) -> None:
        """Run a kernel on these tasks, on torch's threads unless `threads` says how many."""
        if not len(tasks):
            return
        threads = min(threads or torch.get_num_threads(), len(tasks))
        scratch = torch.empty(threads * self.scratch_stride + 64, dtype=torch.uint8)
        counter = np.zeros(24, np.int64)
        self.put(tasks=tasks.ctypes.data, ntasks=len(tasks), counter=-(-counter.ctypes.data // 64) * 64)
        self.put(scratch=-(-scratch.data_ptr() // 64) * 64)
        pool.run(self.kernels[f"run_{kernel}"], self.params.ctypes.data, threads)

    def grads(self) -> Grads:
        """Uninitialised gradients of q, k and v, zero where no sequence covers the tensor."""
        o, wanted, call = self.call.operands, self.problem.grad_of, self.call

        def buffer(name: str, t: Tensor, used: int, ragged: bool) -> Tensor | None:
            if name not in wanted:
                return None
            covered = used == (t.shape[0] if ragged else t.shape[0] * t.shape[1])
            return torch.empty(t.shape, dtype=t.dtype) if covered else torch.zeros(t.shape, dtype=t.dtype)

        n, m = int(call.q_len.sum()), int(call.kv_len.sum())
        return Grads(
            buffer("q", o.q, n, call.ragged_q), buffer("k", o.k, m, call.ragged_kv), buffer("v", o.v, m, call.ragged_kv)
        )

    def main(self, grads: Grads) -> None:
        """Fill the gradients of q, k and v."""
        tasks, splits = chunk_tasks(self.call, self.sub * self.block.lanes * self.block.vectors)
        for name, t, ragged in (
            ("q", grads.q, self.call.ragged_q), ("k", grads.k, self.call.ragged_kv), ("v", grads.v, self.call.ragged_kv)
        ):  # fmt: skip
            self.put(**{f"need_{name}": int(t is not None)})
            if t is not None:
                self.put_tensor(f"d{name}", t, ragged)
        if grads.q is not None:
            self._accumulator(grads.q, int(splits.max(initial=1)))
        self.run("chunks", tasks)
        if grads.q is not None:
            rows = self.head_rows.copy()
            rows[:, 4] = splits[rows[:, 0]]
            self.run("finish", rows)

    def _accumulator(self, dq: Tensor, splits: int) -> None:
        """Where dQ is summed: in dq itself if it can hold whole vectors of the compute type, else in a buffer a split."""
        p = self.problem
        if splits == 1 and p.dtype in ("float32", "float64") and p.head_dim % self.block.lanes == 0:
            strides = byte_strides(dq)
            self.put(acc=dq.data_ptr(), acc_b=0 if self.call.ragged_q else strides[0])
            self.put(acc_n=strides[-3], acc_h=strides[-2], acc_split=0)
            return
        pad = -(-p.head_dim // self.block.lanes) * self.block.lanes
        tokens = dq.shape[-3]
        batch = 1 if self.call.ragged_q else dq.shape[0]
        acc = torch.empty((splits, batch, p.num_heads_q, tokens, pad), dtype=torch_compute(p))
        strides = byte_strides(acc)
        self.put(acc=self.call.pointer(acc), acc_split=strides[0], acc_b=0 if self.call.ragged_q else strides[1])
        self.put(acc_h=strides[2], acc_n=strides[3])


def chunk_tiles(block: Blocking, head_dim: int, longest: int) -> int:
    """Key tiles a chunk."""
    width = block.lanes * block.vectors
    keys = CHUNK_KEYS if head_dim <= 128 else CHUNK_KEYS // 2 if head_dim <= 256 else CHUNK_KEYS // 4
    return max(1, min(keys // width, -(-longest // width)))


def head_rows(call: Call) -> Ints:
    """`ROWS` tasks: 64 queries of one head each, over all sequences."""
    heads = np.arange(call.problem.num_heads_q, dtype=np.int64)
    parts = [np.zeros((0, ROWS.size), np.int64)]
    for b, n in enumerate(call.q_len.tolist()):
        first = np.arange(0, n, BLOCK_Q, dtype=np.int64)
        grid = np.empty((len(heads), len(first), ROWS.size), np.int64)
        grid[:, :, 0], grid[:, :, 1], grid[:, :, 2] = b, heads[:, None], first
        grid[:, :, 3], grid[:, :, 4] = np.minimum(n - first, BLOCK_Q), 1
        parts.append(grid.reshape(-1, ROWS.size))
    return np.concatenate(parts)


@dataclass(frozen=True)
class _Keys:
    """Work of a sequence's chunks of keys: visible (query, key) pairs, an upper bound by intervals."""

    work: NDArray[np.float64]

    def cut(self, splits: int) -> Ints:
        """Chunk numbers where `splits` ranges of equal work begin and end."""
        total = np.concatenate([[0.0], np.cumsum(self.work)])
        goals = np.arange(1, splits) * (total[-1] / splits)
        inner = np.searchsorted(total, goals).astype(np.int64)
        return np.concatenate([[0], np.minimum(inner, len(self.work)), [len(self.work)]]).astype(np.int64)


def chunk_work(n: int, m: int, bounds: NDArray[np.int32] | None, keys: int) -> NDArray[np.float64]:
    """Work of each chunk of `keys` keys for n queries and m keys; bounds as in `Call.bounds`."""
    first = np.arange(0, m, keys)
    stop = np.minimum(first + keys, m)
    if bounds is None:
        return ((stop - first) * n).astype(np.float64)
    rows = np.zeros(len(first))
    for starts, stops in bounds:
        lo, hi = np.searchsorted(stops, first, side="right"), np.searchsorted(starts, stop - 1, side="right")
        rows += np.maximum(hi - lo, 0)
    return (stop - first) * np.minimum(rows, n)


def chunk_tasks(call: Call, keys: int) -> tuple[Ints, Ints]:
    """(`CHUNKS` tasks, heaviest first; number of dQ buffers that each sequence uses)."""
    p, known, chunks = call.problem, {}, []
    for b, (n, m) in enumerate(zip(call.q_len.tolist(), call.kv_len.tolist(), strict=True)):
        bounds = call.bounds[b] if call.bounds else None
        key = (n, m, id(bounds))
        if key not in known:
            known[key] = _Keys(chunk_work(n, m, bounds, keys))
        chunks.append(known[key])
    work = np.array([c.work.sum() for c in chunks])
    goal = max(p.num_heads_kv * work.sum() / WANTED_TASKS, 1.0)
    most = np.clip(call.kv_len // MIN_SPLIT, 1, MAX_SPLITS)
    splits = np.clip(np.ceil(work / goal - 1e-9).astype(np.int64), 1, most)
    heads = np.arange(p.num_heads_kv, dtype=np.int64)
    parts, weights = [np.zeros((0, CHUNKS.size), np.int64)], [np.zeros(0)]
    for b, c in enumerate(chunks):
        ends = c.cut(int(splits[b]))
        grid = np.empty((len(heads), len(ends) - 1, CHUNKS.size), np.int64)
        grid[:, :, 0], grid[:, :, 1] = b, heads[:, None]
        grid[:, :, 2], grid[:, :, 3], grid[:, :, 4] = ends[:-1], ends[1:], np.arange(len(ends) - 1)
        parts.append(grid.reshape(-1, CHUNKS.size))
        total = np.concatenate([[0.0], np.cumsum(c.work)])
        weights.append(np.tile(total[ends[1:]] - total[ends[:-1]], len(heads)))
    tasks = np.concatenate(parts)
    return np.ascontiguousarray(tasks[np.argsort(-np.concatenate(weights), kind="stable")]), splits
