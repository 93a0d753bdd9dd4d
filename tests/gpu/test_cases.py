"""Backends on a GPU: every case of the list within its budgets, against the float64 oracle on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import CASES, Case
from gpu_calls import on_gpu, reasons
from helpers import build, expected, same_bits

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


def test_other_stream_and_graph() -> None:
    """A captured graph replays on new values, from a stream that is not the default one."""
    case = Case("graph", seqlen=(65, 129), mask="causal", dtype="bfloat16", heads=(4, 2))
    call = on_gpu(build(case))
    call.run("triton")  # compiled before the capture
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        out, lse = call.run("triton")
    call.q.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    wanted = call.run("triton")
    assert same_bits(out.cpu(), wanted[0].cpu())
    assert same_bits(lse.cpu(), wanted[1].cpu())


def test_second_gpu() -> None:
    """Work goes to the tensors' GPU whichever is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = Case("second", seqlen=(65, 65), mask="causal", dtype="float16")
    out, lse = on_gpu(build(case), "cuda:1").run("triton")
    expected(case).check({"out": out, "lse": lse})
