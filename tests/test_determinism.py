"""Bit for bit: again, with other numbers of threads, after fork, from Python threads, and after pickling."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from cases import BY_NAME, MASKS, SCORES, Case
from helpers import BACKENDS, Call, build, same_bits, threads

FAST = [name for name in BACKENDS if name != "reference"]

# Long enough for several tasks, short enough for seconds; grouped heads and masks cut the work unevenly.
LONG = [
    Case("long-causal", seqlen=(300, 517), heads=(4, 2), head_dim=64, mask="causal", sink=True),
    Case("long-bfloat16", seqlen=(400, 400), heads=(6, 2), head_dim=64, mask="window_first", dtype="bfloat16"),
    Case("long-float64", seqlen=(200, 300), heads=(2, 1), head_dim=32, dtype="float64", dropout="philox"),
    Case("long-bias", seqlen=(200, 300), heads=(4, 2), mask="dense", scores="bias_keys", batch=3),
    Case(
        "long-ragged",
        "ragged",
        4,
        lengths_q=(1, 300, 20, 129),
        lengths_kv=(400, 300, 20, 64),
        heads=(4, 1),
        scores="all",
    ),
    replace(BY_NAME["paged-long"], name="long-decode", heads=(8, 2), head_dim=64),
]


def everything(case: Case, backend: str, deterministic: bool = True) -> list[torch.Tensor]:
    """out, lse and, but for caches, all gradients."""
    return of_call(build(case), backend, deterministic)


def of_call(call: Call, backend: str, deterministic: bool = True) -> list[torch.Tensor]:
    """The same for tensors that are there already."""
    if call.case.cached:
        return list(call.run(backend))
    out, lse, grads = call.gradients(backend, deterministic=deterministic)
    return [out, lse, *grads.values()]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert [same_bits(x, y) for x, y in zip(a, b, strict=True)] == [True] * len(a)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_repeats(case: Case, backend: str) -> None:
    first = everything(case, backend)
    for _ in range(3):
        assert_same(first, everything(case, backend))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_number_of_threads(case: Case, backend: str, deterministic: bool) -> None:
    """On CPUs work is split by the Problem alone, gradients included, deterministic or not."""
    results = []
    for count in (1, 2, 3, 7):
        with threads(count):
            results.append(everything(case, backend, deterministic))
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.parametrize("backend", FAST)
def test_python_threads(backend: str) -> None:
    """Calls from several Python threads at once give what they give alone."""
    alone = {case.name: everything(case, backend) for case in LONG}
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            together = list(pool.map(lambda case: everything(case, backend), LONG))
            for case, found in zip(LONG, together, strict=True):
                assert_same(alone[case.name], found)


def _in_child(call: Call, backend: str, pipe: multiprocessing.connection.Connection) -> None:
    pipe.send([x.tolist() for x in of_call(call, backend)])
    pipe.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("case", [LONG[0], LONG[-1]], ids=str)
def test_fork(case: Case, backend: str) -> None:
    """A child forked after kernels have run computes the same bits, and so does its parent afterwards.

    The tensors are made before: torch's own loops hang in a forked child (libgomp), which is not ours to mend.
    """
    call = build(case)
    before = of_call(call, backend)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(call, backend, send), daemon=True)
    child.start()
    send.close()
    try:
        assert receive.poll(20), "the forked child hangs"
        found = receive.recv()
        child.join(20)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert found == [x.tolist() for x in before]
    assert_same(before, of_call(call, backend))


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_masks_pickle(name: str) -> None:
    case = Case(f"pickle-{name}", mask=name, seqlen=(33, 40))
    call = build(case)
    problem, op = call.core()
    again = pickle.loads(pickle.dumps(problem))
    assert again == problem
    assert hash(again) == hash(problem)
    assert again.compile_key() == problem.compile_key()
    expected = call.run("reference")
    call.mask = pickle.loads(pickle.dumps(call.mask))
    assert call.mask.structure() == problem.mask
    assert_same(list(expected), list(call.run("reference")))
    assert len(op.mask_tensors) == len(call.mask.tensors())


@pytest.mark.parametrize("name", [name for name in SCORES if name != "none"])
def test_scores_pickle(name: str) -> None:
    call = build(Case(f"pickle-{name}", scores=name, seqlen=(33, 40)))
    problem, _ = call.core()
    assert pickle.loads(pickle.dumps(problem)) == problem
    expected = call.run("reference")
    call.scores = pickle.loads(pickle.dumps(call.scores))
    assert_same(list(expected), list(call.run("reference")))


def test_problems_are_values() -> None:
    """Equal calls make equal Problems, whatever tensors they hold."""
    case = Case("value", mask="everything", scores="all", sink=True)
    (first, _), (second, _) = build(case).core(), build(case).core()
    assert first == second
    assert hash(first) == hash(second)
    assert first.short_id() == second.short_id()
    other, _ = build(replace(case, head_dim=17)).core()
    assert other != first
