"""Launching the forward kernel: task lists, buffers, splits over keys, and the merge of their parts."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from kilat.backends.cpu import forward, jit, pool
from kilat.backends.cpu.forward import BLOCK_KV, FORWARD, MAX_BLOCKS, TASK
from kilat.backends.cpu.forward_tiles import geometry
from kilat.backends.cpu.gemm import Blocking, blocking
from kilat.backends.cpu.host import Call, byte_strides, compute_type, dtype_code, torch_compute
from kilat.backends.cpu.isa import Isa, host_isa

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kilat.backends.cpu.emit import Type
    from kilat.problem import Operands, Problem

# With fewer tasks than this, keys are split as well; a split is at least MIN_SPLIT keys. Both are constants, since the
# number of threads must never change a bit.
WANTED_TASKS = 32
MIN_SPLIT = 512
INVARIANT_SPLIT = 2048  # keys a split under batch_invariant: a function of the sequence alone


@lru_cache(maxsize=64)
def kernel(isa: Isa, compute: Type) -> int:
    """Address of the worker for an instruction set and compute type."""
    name = f"forward {compute}"
    return jit.compile_module(lambda: forward.build(isa, compute), name, ["worker"], isa)["worker"]


def run_forward(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of any Problem without quantised pages."""
    isa, compute = host_isa(), compute_type(problem)
    block = blocking(isa.lanes32, compute)
    call = Call(problem, operands)
    splits, chunk = _splits(call, block)
    out, lse = _outputs(call, splits)
    tasks = _tasks(call, block, splits, chunk)
    if len(tasks):
        params = np.zeros(FORWARD.size, np.int64)
        call.common(params, tasks, geometry(block), isa)
        _put_tensors(params, call, out, lse, splits)
        launch(kernel(isa, compute), params, call, forward.scratch_layout(block, problem.head_dim, problem.head_dim_v))
    if splits == 1:
        return out, lse
    return _merge(call, out, lse)


def launch(address: int, params: NDArray[np.int64], call: Call, layout: tuple[dict[str, int], int]) -> None:
    """Give every thread its scratch and run the kernel on torch's threads."""
    offsets, stride = layout
    threads = min(torch.get_num_threads(), int(params[FORWARD.index["ntasks"]]))
    scratch = torch.empty(threads * stride + 64, dtype=torch.uint8)
    counter = np.zeros(24, np.int64)
    for name, offset in offsets.items():
        params[FORWARD.index[name]] = offset
    params[FORWARD.index["scratch"]] = -(-call.pointer(scratch) // 64) * 64
    params[FORWARD.index["scratch_stride"]] = stride
    params[FORWARD.index["counter"]] = call.pointer(counter)
    pool.run(address, params.ctypes.data, threads)


def _outputs(call: Call, splits: int) -> tuple[Tensor, Tensor]:
    """Output tensors (or one partial result a split, in the compute type), rows outside every sequence filled."""
    p, o = call.problem, call.operands
    dtype, compute = getattr(torch, p.out_dtype), torch_compute(p)
    shape = (*o.q.shape[:-1], p.head_dim_v)
    lse_shape = (p.num_heads_q, o.q.shape[0]) if call.ragged_q else (o.q.shape[0], p.num_heads_q, o.q.shape[1])
    if splits > 1:
        out, lse = torch.empty((splits, *shape), dtype=compute), torch.empty((splits, *lse_shape), dtype=compute)
    else:
        given = o.out is not None and o.out.dtype == dtype
        out = o.out if given and o.out is not None else torch.empty(shape, dtype=dtype)
        lse = torch.empty(lse_shape, dtype=compute)
    covered = int(call.q_len.sum())
    if covered < (o.q.shape[0] if call.ragged_q else o.q.shape[0] * o.q.shape[1]):
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def _put_tensors(params: NDArray[np.int64], call: Call, out: Tensor, lse: Tensor, splits: int) -> None:
    p, o = call.problem, call.operands

    def put(name: str, value: int) -> None:
        params[FORWARD.index[name]] = value

    def tensor(name: str, t: Tensor, ragged: bool) -> None:
        strides = [0, *byte_strides(t)] if ragged else byte_strides(t)
        put(name, call.pointer(t))
        for axis, stride in zip("bnh", strides, strict=False):
            put(f"{name}_{axis}", stride)

    paged = o.page_table is not None
    tensor("q", o.q, call.ragged_q)
    for name, t in (("k", o.k), ("v", o.v)):
        tensor(name, t, call.ragged_kv)
        if paged:
            put(f"{name}_page", byte_strides(t)[0])
            put(f"{name}_b", 0)
    if o.page_table is not None:
        put("pages", call.pointer(o.page_table))
        put("pages_b", byte_strides(o.page_table)[0])
        put("page_size", p.page_size)
    first_out, first_lse = (out[0], lse[0]) if splits > 1 else (out, lse)
    tensor("out", first_out, call.ragged_q)
    put("out_slot", byte_strides(out)[0] if splits > 1 else 0)
    put("out_dtype", dtype_code(out))
    size = lse.element_size()
    put("lse", call.pointer(lse))
    put("lse_b", 0 if call.ragged_q else first_lse.stride(0) * size)
    put("lse_h", first_lse.stride(-2) * size)
    put("lse_n", size)
    put("lse_slot", lse.stride(0) * size if splits > 1 else 0)
    if o.sink is not None and splits == 1:
        put("sink", call.pointer(o.sink.detach().to(torch_compute(p)).contiguous()))


def _splits(call: Call, block: Blocking) -> tuple[int, int]:
    """(number of splits over keys, keys a split); (1, longest) if there is enough work without."""
    p = call.problem
    longest = int(call.kv_len.max(initial=0))
    if p.layout != "cached" and p.num_splits is None:
        return 1, max(longest, 1)
    if p.num_splits is not None:
        splits = max(1, min(p.num_splits, -(-longest // BLOCK_KV)))
    elif p.batch_invariant:
        return max(1, -(-longest // INVARIANT_SPLIT)), INVARIANT_SPLIT
    else:
        width = block.lanes * block.vectors
        tasks = int((-(-call.q_len // width)).sum()) * p.num_heads_kv
        splits = max(1, min(WANTED_TASKS // max(tasks, 1), longest // MIN_SPLIT))
    chunk = -(-longest // (splits * BLOCK_KV)) * BLOCK_KV
    return splits, max(chunk, BLOCK_KV)


def _tasks(call: Call, block: Blocking, splits: int, chunk: int) -> NDArray[np.int64]:
    """All tasks, heaviest first. Bits never depend on how queries and heads are grouped into tasks."""
    p = call.problem
    width = block.lanes * block.vectors
    total_blocks = int((-(-call.q_len // width)).sum()) * p.num_heads_q
    per_task = MAX_BLOCKS
    while per_task > 1 and total_blocks * splits // per_task < 4 * torch.get_num_threads():
        per_task //= 2
    parts: list[NDArray[np.int64]] = []
    known: dict[tuple[int, int, int], NDArray[np.int64]] = {}
    for b in range(p.batch):
        n, m = int(call.q_len[b]), int(call.kv_len[b])
        if n == 0:
            continue
        bounds = call.bounds[b] if call.bounds else None
        key = (n, m, id(bounds))
        if key not in known:
            known[key] = _sequence_tasks(p, n, m, bounds, (width, per_task, splits, chunk))
        rows = known[key].copy()
        rows[:, 0] = b
        parts.append(rows)
    if not parts:
        return np.zeros((0, TASK.size), np.int64)
    tasks = np.concatenate(parts)
    work = (tasks[:, 6] - tasks[:, 5] + tasks[:, 8] - tasks[:, 7]) * tasks[:, 2] * tasks[:, 4]
    return np.ascontiguousarray(tasks[np.argsort(-work, kind="stable")])


def _sequence_tasks(
    p: Problem, n: int, m: int, bounds: NDArray[np.int32] | None, shape: tuple[int, int, int, int]
) -> NDArray[np.int64]:
    """Tasks of one sequence of n queries and m keys; see `TASK` for the columns."""
    width, per_task, splits, chunk = shape
    blocks = -(-n // width)
    heads = 1
    while heads * 2 * min(blocks, per_task) <= per_task and p.group % (heads * 2) == 0:
        heads *= 2
    step = min(per_task // heads, blocks) * width
    first = np.arange(0, n, step, dtype=np.int64)
    count = np.minimum(n - first, step)
    ranges = _key_ranges(first, count, m, bounds)  # [4, blocks]
    head = np.arange(0, p.num_heads_q, heads, dtype=np.int64)
    out = []
    for s in range(splits):
        lo, hi = (s * chunk, (s + 1) * chunk) if splits > 1 else (0, max(m, 1))
        cut = np.clip(ranges, lo, hi)
        grid = np.zeros((len(head), len(first), TASK.size), np.int64)
        grid[:, :, 1], grid[:, :, 2] = head[:, None], heads
        grid[:, :, 3], grid[:, :, 4] = first, count
        grid[:, :, 5:9] = cut.T
        grid[:, :, 9] = s
        out.append(grid.reshape(-1, TASK.size))
    return np.concatenate(out)


def _key_ranges(
    first: NDArray[np.int64], count: NDArray[np.int64], m: int, bounds: NDArray[np.int32] | None
) -> NDArray[np.int64]:
    """[lo0, hi0, lo1, hi1] for every block of queries: the keys that any of its rows may see, tiles aligned.

    Bounds are monotone, so a block's first row has the lowest start and its last row the highest stop.
    """
    zero = np.zeros_like(first)
    if bounds is None:
        return np.stack([zero, zero + m, zero, zero])
    last = first + count - 1
    lo, hi = bounds[:, 0, :][:, first].astype(np.int64), bounds[:, 1, :][:, last].astype(np.int64)
    lo = lo // BLOCK_KV * BLOCK_KV
    hi = np.maximum(hi, lo)
    if len(bounds) == 1:
        return np.stack([lo[0], hi[0], zero, zero])
    a, b = (0, 1)
    swap = lo[0] > lo[1]
    lo0, hi0 = np.where(swap, lo[b], lo[a]), np.where(swap, hi[b], hi[a])
    lo1, hi1 = np.where(swap, lo[a], lo[b]), np.where(swap, hi[a], hi[b])
    empty0, empty1 = hi0 <= lo0, hi1 <= lo1
    # Two ranges that share a tile would visit it twice: join them.
    join = (lo1 < -(-hi0 // BLOCK_KV) * BLOCK_KV) & ~empty0 & ~empty1
    hi0 = np.where(join, np.maximum(hi0, hi1), hi0)
    lo1, hi1 = np.where(join, 0, lo1), np.where(join, 0, hi1)
    return np.stack([lo0, hi0, lo1, hi1])


def _merge(call: Call, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the splits in order, one at a time, so that an empty split changes no bit; then the sink."""
    p, o = call.problem, call.operands

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


