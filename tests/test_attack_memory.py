"""Nothing outside a tensor is read or written: operands end right before, or begin right behind, memory without access.

A stray access ends the process, so the calls run in a child, which names the case before it runs it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from helpers import BACKENDS, Call, build, expectation
from torch import Tensor

import kilat
from kilat.backends.cpu import scratch

PAGE = mmap.PAGESIZE
NO_ACCESS = 0

_BASE = Case("guard", heads=(4, 2), seqlen=(33, 65), mask="causal")
CASES = [
    replace(_BASE, name="guard-1", head_dim=1),
    replace(_BASE, name="guard-17-bfloat16", head_dim=17, dtype="bfloat16", strides="heads_first"),
    replace(_BASE, name="guard-65-float16", head_dim=65, dtype="float16", seqlen=(129, 63)),
    replace(_BASE, name="guard-40-float64", head_dim=40, head_dim_v=3, dtype="float64", scores="bias", sink=True),
    replace(_BASE, name="guard-64-bfloat16", head_dim=64, dtype="bfloat16", seqlen=(150, 129), mask="none"),
    replace(_BASE, name="guard-dense", head_dim=3, mask="dense", scores="bias_rows", dropout="keep"),
    replace(_BASE, name="guard-tensors", mask="predicate_tensor", scores="score_tensor", seqlen=(1, 7)),
    replace(_BASE, name="guard-padded", layout="padded", lengths_q=(33, 1), lengths_kv=(5, 65), scores="bias_keys"),
    replace(_BASE, name="guard-ragged", layout="ragged", lengths_q=(5, 0), lengths_kv=(7, 31), dtype="bfloat16"),
    replace(_BASE, name="guard-decode", layout="cached", seqlen=(1, 130), lengths_kv=(130, 77), head_dim=63),
    replace(_BASE, name="guard-decode-half", layout="cached", seqlen=(2, 30), lengths_kv=(30, 7), dtype="bfloat16"),
    replace(_BASE, name="guard-paged", layout="paged", seqlen=(3, 39), lengths_kv=(39, 30), page_size=13, head_dim=5),
    replace(_BASE, name="guard-paged-many", layout="paged", seqlen=(40, 130), lengths_kv=(130, 99), page_size=5),
]


class Fence:
    """Copies of tensors beside pages that cannot be touched."""

    def __init__(self, behind: bool) -> None:
        self.behind = behind  # whether the forbidden page follows the numbers, else it precedes them
        self.held: list[mmap.mmap] = []

    def address(self, size: int) -> int:
        """`size` bytes next to a forbidden page."""
        pages = max(1, -(-size // PAGE))
        area = mmap.mmap(-1, (pages + 2) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        libc = ctypes.CDLL(None)
        for page in (start, start + (pages + 1) * PAGE):
            assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), NO_ACCESS) == 0
        self.held.append(area)
        return start + (pages + 1) * PAGE - size if self.behind else start + PAGE

    def __call__(self, x: Tensor) -> Tensor:
        """The same numbers in the same order of axes."""
        size = x.numel() * x.element_size()
        if not size:
            return x
        memory = (ctypes.c_char * size).from_address(self.address(size))
        order = sorted(range(x.dim()), key=lambda axis: -x.stride(axis))
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(x.dtype)
        fenced = flat.view([x.shape[axis] for axis in order]).permute([order.index(axis) for axis in range(x.dim())])
        return fenced.copy_(x)


def _fenced(call: Call, fence: Fence) -> Call:
    for name in ("q", "k", "v", "dout", "dlse", "sink"):
        value = getattr(call, name)
        if value is not None:
            setattr(call, name, fence(value))
    call.lengths = {name: fence(x) for name, x in call.lengths.items()}
    call.scores = tuple(kilat.Bias(fence(s.tensors()[0])) if isinstance(s, kilat.Bias) else s for s in call.scores)
    if isinstance(call.mask, kilat.Dense):
        call.mask = kilat.Dense(fence(call.mask.tensors()[0]))
    if call.case.dropout == "keep":
        call.dropout = kilat.Dropout(call.case.dropout_p, keep=fence(call.dropout.keep))
    return call


@contextmanager
def _fenced_allocations(fence: Fence) -> Iterator[None]:
    """Results and scratch stand beside forbidden pages as well."""
    originals: dict[str, Any] = {name: getattr(torch, name) for name in ("empty", "zeros", "empty_like")}

    @contextmanager
    def borrow(size: int) -> Iterator[int]:
        yield fence.address(-(-size // 64) * 64)

    def wrapped(original: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            made = original(*args, **kwargs)
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            return fence(made) if caller.startswith("kilat.backends.cpu") else made

        return make

    plain, scratch.borrow = scratch.borrow, borrow
    for name, original in originals.items():
        setattr(torch, name, wrapped(original))
    try:
        yield
    finally:
        scratch.borrow = plain
        for name, original in originals.items():
            setattr(torch, name, original)


def _run_case(case: Case, behind: bool) -> None:
    fence = Fence(behind)
    call = _fenced(build(case), fence)
    wanted = expectation(call, backward=not case.cached)
    with _fenced_allocations(fence):
        if case.cached:
            out, lse = call.run("cpu")
            found = {"out": out, "lse": lse}
        else:
            out, lse, grads = call.gradients("cpu")
            found = {"out": out, "lse": lse} | grads
    wanted.check(found)


def _child(behind: bool) -> None:
    torch.set_num_threads(2)
    for case in CASES:
        print(case.name, flush=True)
        _run_case(case, behind)
    print("done", flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect by way of the C library")
@pytest.mark.parametrize("behind", [True, False], ids=["end", "start"])
def test_nothing_outside_a_tensor_is_touched(behind: bool) -> None:
    here = Path(__file__).resolve().parent
    code = f"import test_attack_memory as t; t._child({behind})"
    found = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "src"), *sys.path])},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.stdout.split()[-1:] == ["done"], found.stdout[-200:] + found.stderr[-3000:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_device_is_not_where_results_go(backend: str) -> None:
    """torch.set_default_device must not decide where CPU kernels write."""
    call = build(replace(_BASE, name="device", mask="predicate", scores="all", sink=True, dropout="philox"))
    wanted = expectation(call, backward=True)
    cached = build(replace(_BASE, name="device-cached", layout="cached", seqlen=(1, 130), lengths_kv=(130, 7)))
    with torch.device("meta"):
        out, lse, grads = call.gradients(backend)
        cached_out, _ = cached.run(backend)
    assert cached_out.device.type == "cpu"
    wanted.check({"out": out, "lse": lse} | grads)


def test_strides_past_int32() -> None:
    """Elements more than 2^31 apart, in memory that is never touched in between."""
    far = 2**31 + 64
    storage = torch.empty(2 * far, dtype=torch.float32)
    for strides in ((far, 32, 16, 1), (32 * 40, 32, far, 1), (64, far // 40, 16, 1)):
        k = storage.as_strided((2, 40, 2, 16), strides).copy_(torch.randn(2, 40, 2, 16))
        q, results = torch.randn(2, 40, 2, 16), []
        for keys in (k, k.contiguous()):
            x = keys.detach().requires_grad_()
            out = kilat.attention(q, x, x, mask=kilat.Causal())
            lengths = torch.tensor([40, 33], dtype=torch.int32)
            decoded = kilat.cached_attention(q[:, :1], kilat.ContiguousCache(keys, keys, lengths))
            results.append((out.detach(), decoded, *torch.autograd.grad(out.sum(), x)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
