"""A configuration that is forced, as the tuner does it, is the one that is compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from cases import Case
from compiled import test_compiled_gluon_forward
from configurations import tensors
from helpers import build
from offline import compiling

from kilat.backends.gluon import heuristics, tuning
from kilat.backends.triton import BACKEND
from kilat.masks import Causal
from kilat.tune.lookup import forced

FORWARD = {
    # (dim, consumers, block_kv, staging, q_stages, stages): HGMMA instructions of all consumers, which follow from
    # consumers and block_kv
    (128, 2, 64, 1, 2, 2): 48,
    (128, 3, 64, 2, 1, 2): 72,
    (128, 2, 128, 2, 1, 3): 64,
    (64, 2, 128, 2, 1, 2): 48,
    (64, 3, 128, 1, 2, 3): 72,
    (256, 2, 64, 3, 1, 2): 80,
}


@pytest.mark.parametrize(("dim", "consumers", "block_kv", "staging", "q_stages", "stages"), FORWARD)
def test_gluon_forward(dim: int, consumers: int, block_kv: int, staging: int, q_stages: int, stages: int) -> None:
    values: dict[str, Any] = {
        "consumers": consumers,
        "block_kv": block_kv,
        "staging": staging,
        "q_stages": q_stages,
        "stages": stages,
    }
    with forced("gluon", "forward", values):
        found = test_compiled_gluon_forward.compiled(dim, mask=Causal())
    config = heuristics.ForwardConfig(heuristics.boxes(dim), heuristics.boxes(dim), **values, turns=False)
    assert 0 <= found.shared - config.shared_bytes < 1024
    assert found.shared <= test_compiled_gluon_forward.SHARED_MEMORY
    assert found.products == FORWARD[dim, consumers, block_kv, staging, q_stages, stages]
    assert found.in_loops == 0


@pytest.mark.parametrize(
    ("dims", "out_dtype", "ways"),
    [
        ((256, 256), None, (3, 1)),
        ((193, 200), None, (3, 1)),
        ((256, 256), "float32", (0, 1)),
        ((256, 252), None, (0, 1)),  # rows of no multiple of 16 bytes
        ((192, 256), None, (1, 1)),
        ((192, 128), None, (2, 1)),
        ((128, 128), None, (1, 2)),
    ],
    ids=str,
)
def test_how_the_output_leaves(dims: tuple[int, int], out_dtype: str | None, ways: tuple[int, int]) -> None:
    """Through a buffer of its own where that fits, else in pieces, else through Q's buffer, else from registers."""
    case = Case("ways", seqlen=(129, 129), head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16", out_dtype=out_dtype)
    problem, _ = build(case).core()
    config = heuristics.forward_config(problem)
    assert (config.staging, config.q_stages) == ways


def test_candidates_of_the_forward() -> None:
    """Those that have not been measured are among them; the built-in one comes first."""
    found = {}
    for dim in (64, 128, 256):
        case = Case("tuned", seqlen=(2048, 2048), head_dim=dim, dtype="bfloat16")
        problem, op = build(case).core()
        found[dim] = tuning.TUNABLES[0].candidates(problem, op)
        assert found[dim][0]["stages"] == 2
    assert [one for one in found[256] if one["staging"] == 3]
    assert not [one for one in found[128] if one["staging"] == 3]
    for dim in (64, 128):
        third = [one for one in found[dim] if one["stages"] == 3]
        assert {(one["consumers"], one["turns"]) for one in third} == {(3, True) if dim == 64 else (2, False)}


@pytest.mark.parametrize("kernel", ["forward", "keys", "queries"])
def test_triton(kernel: str) -> None:
    call = build(Case("tuned", seqlen=(256, 256), head_dim=64, dtype="bfloat16"))
    problem, op = call.core()
    problem = replace(problem, needs_grad=True, grad_of=frozenset("qkv"), memo={})
    out, lse = tensors(problem, op)
    values = {"block_q": 64, "block_kv": 128, "num_warps": 8, "num_stages": 2}

    def kernels() -> dict[str, tuple[int, int]]:
        problem.memo.clear()
        with compiling("sm_90") as found:
            BACKEND.forward(problem, op)
            BACKEND.backward(problem, op, out, lse, call.dout, None)
        return {name: (made.metadata.num_warps, made.metadata.shared) for name, made in found.items()}

    plain = kernels()
    with forced("triton", kernel, values):
        changed = kernels()
    assert [name for name in plain if plain[name] != changed[name]] == [f"{kernel}_kernel"]
    assert changed[f"{kernel}_kernel"][0] == 8
