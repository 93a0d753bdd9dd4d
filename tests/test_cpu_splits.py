"""Few queries against many keys on the CPU: split over keys, all threads at work, bits that companions never change."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case
from helpers import build, expectation, same_bits, threads

import kilat
from kilat.backends.cpu import forward_host, pool
from kilat.backends.cpu.decode import DECODE, TASK
from kilat.backends.cpu.isa import host_isa

# One key/value head and a long cache: queries that fill a block of the forward badly, well, and several blocks.
LONE = [
    Case("group", "cached", 1, heads=(8, 1), seqlen=(5, 1600), lengths_kv=(1537,), mask="causal"),
    Case("group-bfloat16", "paged", 1, heads=(8, 1), seqlen=(8, 1600), lengths_kv=(1537,), dtype="bfloat16", sink=True),
    Case("block", "paged", 1, heads=(1, 1), seqlen=(64, 1600), lengths_kv=(1600,), mask="window_first", page_size=3),
    Case("block-bfloat16", "cached", 1, heads=(1, 1), seqlen=(63, 1600), lengths_kv=(1600,), dtype="bfloat16"),
    Case("blocks", "cached", 1, heads=(1, 1), seqlen=(129, 1100), lengths_kv=(1100,), scores="alibi"),
    Case("one", "cached", 1, heads=(1, 1), seqlen=(1, 4100), lengths_kv=(4097,), kv="int8-token"),
]


@pytest.mark.parametrize("case", LONE, ids=str)
@pytest.mark.parametrize("num_splits", [None, 1, 5])
def test_lone_sequences_are_exact(case: Case, num_splits: int | None) -> None:
    call = build(case)
    out, lse = call.run("cpu", num_splits=num_splits)
    expectation(call).check({"out": out, "lse": lse})


@pytest.mark.parametrize("case", LONE, ids=str)
def test_every_thread_has_work(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads enter the kernel, and the tasks can be dealt so that none has much more than a fourth."""
    seen: list[tuple[int, Any]] = []

    def watched(address: int, start: int, count: int) -> None:
        def slot(name: str) -> int:
            return ctypes.c_int64.from_address(start + 8 * DECODE.index[name]).value

        pool_run(address, start, count)
        entered = ctypes.c_int64.from_address(slot("counter") + 64).value
        size = slot("ntasks") * TASK.size
        tasks = np.frombuffer((ctypes.c_int64 * size).from_address(slot("tasks")), np.int64).reshape(-1, TASK.size)
        seen.append((entered, tasks.copy()))

    pool_run = pool.run
    monkeypatch.setattr(pool, "run", watched)
    call = build(replace(case, mask="none"))
    if forward_host.variant(call.core()[0], host_isa()) == "amx":
        pytest.skip("AMX tiles are faster than more threads")
    with threads(4):
        call.run("cpu")
    ((entered, tasks),) = seen
    assert entered == 4
    named = dict(zip(TASK.names, tasks.T, strict=True))
    work = np.sort((named["hi"] - named["lo"]) * named["count"])[::-1]
    shares = np.zeros(4)
    for x in work:
        shares[shares.argmin()] += x
    assert shares.max() < 0.36 * work.sum()


def test_the_threads_never_decide() -> None:
    for case in LONE:
        call, found = build(case), []
        for count in (1, 2, 5):
            with threads(count):
                found.append(call.run("cpu"))
        assert all(same_bits(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", ["", "int8-token", "float8_e4m3fn-head"])
@pytest.mark.parametrize("layout", ["cached", "paged"])
def test_companions_change_nothing(layout: str, kv: str, dtype: str) -> None:
    """Decode, a piece of a prompt, a draft and a whole prompt together: the bits that each has alone, or with one more.

    By themselves some would go to another kernel, or be cut elsewhere, if companions counted.
    """
    lengths_q, lengths_kv = (1, 64, 5, 70, 0), (1600, 1500, 1029, 70, 9)
    case = Case("mix", layout, 5, heads=(4, 1), seqlen=(0, 1600), lengths_q=lengths_q, lengths_kv=lengths_kv, tail=2)
    call = build(replace(case, dtype=dtype, kv=kv, mask="causal", sink=True))
    out, lse = call.run("cpu", batch_invariant=True)
    cache, starts = call.cache(), np.cumsum((0, *lengths_q))
    for chosen in ([0], [1], [2], [3], [1, 3], [2, 0]):
        per_head = cache.k_scale is None or cache.k_scale.dim() == 1
        rows = [cache.lengths[chosen]]
        scales = [x if per_head or layout == "paged" else x[chosen] for x in (cache.k_scale, cache.v_scale)]
        if layout == "paged":
            some: Any = kilat.PagedCache(cache.k, cache.v, cache.page_table[chosen], *rows, *scales)
        else:
            some = kilat.ContiguousCache(cache.k[chosen], cache.v[chosen], *rows, *scales)
        index = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in chosen])
        cu = torch.tensor([0, *(lengths_q[b] for b in chosen)]).cumsum(0).int()
        options: dict[str, Any] = {"mask": call.mask, "sink": call.sink, "batch_invariant": True, "return_lse": True}
        got = kilat.cached_attention(call.q[index], some, cu_seqlens_q=cu, **options)
        assert same_bits(got[0], out[index])
        assert same_bits(got[1], lse[:, index])


def test_many_sequences_go_to_the_forward() -> None:
    """Blocks that are full, and enough of them, are no work for the kernel for few queries, if keys are many or few."""
    for heads, queries, few in ((1, 64, True), (8, 64, False), (8, 5, True), (8, 48, False)):
        case = Case("routed", "cached", 1, heads=(heads, 1), seqlen=(queries, 1100), lengths_kv=(1100,))
        problem, operands = build(case).core()
        plan = forward_host._make_plan(problem, operands)
        assert [launch.params is DECODE for launch in plan.launches] == [few]
