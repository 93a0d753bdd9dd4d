"""Each instruction set of this machine, in a process of its own: a seeded sample of everything, within the budget."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import MASKS, SCORES, Case
from helpers import build, expectation

from kilat.backends.cpu import jit
from kilat.backends.cpu.isa import host_isa, supported_isas

LENGTHS = (1, 2, 7, 31, 33, 63, 64, 65, 100, 129)
HEAD_DIMS = (1, 3, 17, 40, 64, 65, 128, 200)
SAMPLE = 15
# User functions compile kernels of their own; a few names of each list cover what else they do.
MASK_NAMES = [name for name in MASKS if name not in ("predicate", "everything")]
SCORE_NAMES = ["none", "none", *(name for name in SCORES if not name.startswith("score") and name != "all")]


def sample(seed: int) -> list[Case]:
    """Cases that draw every option at random, every layout and dtype in turn."""
    rng, cases = random.Random(seed), []
    for n in range(SAMPLE):
        layout = ("dense", "padded", "ragged", "cached", "paged")[n % 5]
        dtype = ("bfloat16", "float32", "float16", "float64")[n % 4]
        seqlen = (rng.choice(LENGTHS), rng.choice(LENGTHS))
        lengths_q, lengths_kv = None, None
        if layout in ("padded", "ragged"):
            lengths_q = tuple(rng.randint(0, seqlen[0]) for _ in range(2))
        if layout in ("cached", "paged"):
            seqlen = (rng.choice((1, 2, 5, 40)), 140)
        if layout != "dense":
            lengths_kv = tuple(rng.randint(0, seqlen[1]) for _ in range(2))
        case = Case(
            f"isa-{seed}-{n}", layout, 2, rng.choice([(2, 2), (4, 2), (8, 1), (36, 1)]), seqlen, lengths_q, lengths_kv,
            head_dim=rng.choice(HEAD_DIMS), head_dim_v=rng.choice((None, None, 1, 24, 129)), dtype=dtype,
            mask=rng.choice(MASK_NAMES), scores=rng.choice(SCORE_NAMES), sink=rng.random() < 0.3,
            dropout="" if layout in ("cached", "paged") else rng.choice(("", "", "philox", "keep")),
            scale=rng.choice((None, None, -0.2, 0.0)), page_size=rng.choice((1, 5, 16)),
            strides=rng.choice(("contiguous", "heads_first", "sliced")),
        )  # fmt: skip
        cases.append(case)
    return cases


def _check(case: Case) -> None:
    call = build(case)
    wanted = expectation(call, backward=not case.cached)
    if case.cached:
        out, lse = call.run("cpu")
        wanted.check({"out": out, "lse": lse})
    else:
        out, lse, grads = call.gradients("cpu")
        wanted.check({"out": out, "lse": lse} | grads)


def _child(name: str) -> None:
    torch.set_num_threads(2)
    assert host_isa().name == name
    for case in sample(1):
        print(repr(case), flush=True)
        _check(case)
    used = {isa.name for _, _, isa in jit._state.addresses}
    assert used == {name}, f"kernels of {used} ran"
    print("done", flush=True)


@pytest.mark.parametrize("name", [isa.name for isa in supported_isas()])
def test_instruction_set(name: str) -> None:
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent / "src"), *sys.path]
    found = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", f"import test_isa; test_isa._child({name!r})"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "KILAT_CPU_ISA": name},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.stdout.split()[-1:] == ["done"], found.stdout[-600:] + found.stderr[-3000:]
