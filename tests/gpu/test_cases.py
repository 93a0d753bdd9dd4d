"""Backends on a GPU: every case of the list within its budgets, against the float64 oracle on the CPU."""

from __future__ import annotations

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import CASES, Case
from gpu_calls import on_gpu, reasons
from helpers import Call, build, expected, same_bits

from kilat import planning, shortcut

pytestmark = pytest.mark.gpu


BACKENDS = ("triton", "gluon")
HALF = [
    dataclasses.replace(case, name=f"{case.name}-as-{dtype}", dtype=dtype)
    for case in CASES
    if case.dtype == "float32"
    for dtype in ("float16", "bfloat16")
]
"""The cases of float32 once more, for what a backend takes in half precision only."""


@pytest.mark.parametrize("case", [*CASES, *HALF], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_case(case: Case, backend: str) -> None:
    """out, lse and, but for caches, all gradients."""
    call = on_gpu(build(case))
    if found := reasons(call, backend):
        pytest.skip("; ".join(found))
    if case.cached:
        out, lse = call.run(backend)
        expected(case).check({"out": out, "lse": lse})
        return
    out, lse, grads = call.gradients(backend)
    expected(case, backward=True).check({"out": out, "lse": lse} | grads)


REPEATED = [
    case for case in CASES if case.name.endswith(("-rich", "ragged-causal", "padded-bfloat16", "d128-128-float32"))
]


@pytest.mark.parametrize("case", [case for case in REPEATED if case.dtype != "float64"], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic(case: Case, backend: str) -> None:
    """The same bits again, gradients included."""
    call = on_gpu(build(case))
    if found := reasons(call, backend):
        pytest.skip("; ".join(found))
    first = call.gradients(backend, deterministic=True)
    for _ in range(3):
        again = call.gradients(backend, deterministic=True)
        assert same_bits(first[0].cpu(), again[0].cpu())
        assert same_bits(first[1].cpu(), again[1].cpu())
        assert all(same_bits(first[2][name].cpu(), again[2][name].cpu()) for name in first[2])


LAYOUTS = {
    "dense": {},
    "ragged": {"layout": "ragged", "lengths_q": (65, 1, 129), "lengths_kv": (65, 7, 129), "batch": 3},
}


def small(name: str, **more: Any) -> Case:
    """A case that every backend takes, with a tail in each block."""
    return Case(name, **({"seqlen": (129, 193), "mask": "causal", "dtype": "bfloat16", "heads": (4, 2)} | more))


def all_of(call: Call, backend: str, deterministic: bool = True) -> list[torch.Tensor]:
    """out, lse and the gradients of q, k and v."""
    out, lse, grads = call.gradients(backend, deterministic=deterministic)
    return [out, lse, *grads.values()]


def check_same(found: list[torch.Tensor], wanted: list[torch.Tensor], deterministic: bool = True) -> None:
    """The same bits; but for dQ, whose parts are summed in any order, if not deterministic."""
    for n, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if n == 2 and not deterministic:
            assert torch.allclose(got.cpu().float(), want.cpu().float(), rtol=0.02, atol=0.02)
        else:
            assert same_bits(got.cpu(), want.cpu()), f"result number {n}"


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_stream_and_graph(backend: str, layout: str, deterministic: bool) -> None:
    """A captured graph of forward and backward replays on new values, from a stream that is not the default one."""
    call = on_gpu(build(small("graph", **LAYOUTS[layout])))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiled, and known by its guard, before the capture
            before = all_of(call, backend, deterministic)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = all_of(call, backend, deterministic)
    for x in (call.q, call.k, call.v, call.dout):
        x.mul_(0.5)
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    found = [x.clone() for x in captured]
    assert not same_bits(before[0].cpu(), found[0].cpu())
    check_same(found, all_of(call, backend, deterministic), deterministic)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_outlives_what_was_remembered(backend: str) -> None:
    """Its kernels read nothing that goes when kilat forgets the call."""
    call = on_gpu(build(small("capture")))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        all_of(call, backend)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = all_of(call, backend)
    planning.clear()
    shortcut.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.full((1 << 26,), torch.nan, device="cuda")
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    check_same([x.clone() for x in captured], all_of(call, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_do_not_wait_for_one_another(backend: str) -> None:
    """Work is put on the current stream: what another one has still to do does not change a result."""
    call = on_gpu(build(small("streams")))
    wanted = all_of(call, backend)
    busy, stream = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    fresh = dataclasses.replace(call, q=torch.full_like(call.q, torch.nan))
    with torch.cuda.stream(stream):
        for _ in range(50):
            busy = busy @ busy * 1e-3
        fresh.q.copy_(call.q)  # long after the host has gone on: a launch on the default stream would read NaN
        found = all_of(fresh, backend)
    torch.cuda.synchronize()
    check_same(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_thread(backend: str) -> None:
    """A thread that has not used the GPU yet, with tensors that no earlier call had."""
    call = on_gpu(build(small("thread")))
    wanted = all_of(call, backend)
    for given in (call, on_gpu(build(small("thread")))):
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(all_of, given, backend).result()
        check_same(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_devices(backend: str) -> None:
    """Named, whichever tensor it is."""
    call = on_gpu(build(small("mixed")))
    for name in ("k", "v"):
        with pytest.raises(ValueError, match=f"{name} must be on q's device cuda:0; got device=cpu"):
            dataclasses.replace(call, **{name: getattr(call, name).cpu()}).run(backend)
    ragged = on_gpu(build(small("mixed-ragged", **LAYOUTS["ragged"])))
    lengths = {name: x.cpu() for name, x in ragged.lengths.items()}
    with pytest.raises(ValueError, match="cu_seqlens_q must be on q's device cuda:0; got device=cpu"):
        dataclasses.replace(ragged, lengths=lengths).run(backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_second_gpu(backend: str, layout: str) -> None:
    """Work goes to the tensors' GPU whichever is current, forward and backward, again and again."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = small("second", **LAYOUTS[layout])
    first = all_of(on_gpu(build(case)), backend)
    call = on_gpu(build(case), "cuda:1")
    assert torch.cuda.current_device() == 0
    for _ in range(4):
        found = all_of(call, backend)
        assert all(x.device == torch.device("cuda:1") for x in found)
        assert torch.cuda.current_device() == 0
    check_same(found, first)
    with pytest.raises(ValueError, match="k must be on q's device cuda:1; got device=cuda:0"):
        dataclasses.replace(call, k=call.k.to("cuda:0")).run(backend)
