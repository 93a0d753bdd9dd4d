"""What GPUs lack is said before anything is compiled: on machines whose GPUs are made up."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kilat.backends import gluon
from kilat.backends.gluon import BACKEND as GLUON
from kilat.backends.triton import BACKEND as TRITON
from kilat.problem import Problem

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@contextmanager
def gpus(*capabilities: tuple[int, int], shared: int = 232_448) -> Iterator[None]:
    """GPUs with these compute capabilities, and so many bytes of shared memory a block."""
    properties = SimpleNamespace(shared_memory_per_block_optin=shared)
    found = {
        "is_available": lambda: True,
        "device_count": lambda: len(capabilities),
        "get_device_capability": lambda n=0: capabilities[n],
        "get_device_properties": lambda n: properties,
    }
    gluon._capabilities.cache_clear()
    with ExitStack() as stack:
        for name, value in found.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.version, "hip", None))
        yield
    gluon._capabilities.cache_clear()


def problem(dtype: str = "bfloat16", head_dim: int = 64, grad_of: frozenset[str] = frozenset()) -> Problem:
    """A plain Problem on a GPU."""
    return Problem(
        layout="dense", dtype=dtype, out_dtype=dtype, device="cuda", head_dim=head_dim, head_dim_v=head_dim,
        num_heads_q=1, num_heads_kv=1, needs_grad=bool(grad_of), grad_of=grad_of, batch=1, seqlen_q=63, seqlen_kv=63,
    )  # fmt: skip


@needs_triton
def test_a_gpu_without_bfloat16() -> None:
    """Also if it is the second one: a Problem does not say on which GPU it is."""
    with gpus((7, 5)):
        assert TRITON.unsupported(problem()) == ["compute capability 7.5: at least 8.0"]
    with gpus((9, 0), (7, 5)):
        assert TRITON.unsupported(problem()) == ["compute capability 7.5: at least 8.0"]
    with gpus((8, 0), (9, 0)):
        assert TRITON.unsupported(problem()) == []


@needs_triton
@pytest.mark.parametrize("backend", [TRITON, GLUON])
def test_float64(backend: object) -> None:
    with gpus((9, 0)):
        (reason,) = backend.unsupported(problem("float64"))  # type: ignore[attr-defined]
        assert "float64" in reason


@needs_triton
def test_too_little_shared_memory() -> None:
    """The float32 backward of wide heads is refused where it cannot fit, and nothing else."""
    wide = problem("float32", 512, frozenset("qkv"))
    with gpus((8, 6), shared=101_376):
        (reason,) = TRITON.unsupported(wide)
        assert "needs 133120 bytes of shared memory; this GPU has 101376" in reason
        assert TRITON.unsupported(problem("float32", 512)) == []
        assert TRITON.unsupported(problem("bfloat16", 512, frozenset("qkv"))) == []
    with gpus((9, 0)):
        assert TRITON.unsupported(wide) == []


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_gluon_is_for_hopper(capability: tuple[int, int]) -> None:
    with gpus(capability):
        major, minor = capability
        (reason,) = GLUON.unsupported(problem())
        assert reason == f"the gluon backend needs compute capability 9.0; cuda has {major}.{minor}"


@needs_triton
def test_gluon_on_one_of_several_gpus() -> None:
    """A Problem does not say on which GPU it is, so all must be able; where it does, that one."""
    with gpus((9, 0), (8, 6)):
        (reason,) = GLUON.unsupported(problem())
        assert reason == "the gluon backend needs compute capability 9.0; cuda has 8.6"
        assert GLUON.unsupported(replace(problem(), device="cuda:0")) == []
        assert len(GLUON.unsupported(replace(problem(), device="cuda:1"))) == 1
    with gpus((9, 0), (9, 0)):
        assert GLUON.unsupported(problem()) == []
