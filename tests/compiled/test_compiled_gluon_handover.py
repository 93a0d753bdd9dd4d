"""How warp_specialize hands its arguments over, in the PTX of every Gluon kernel: each access behind a CTA's barrier.

Triton keeps the states of the worker warps, and arguments that are no kernel parameters, in shared memory. The default
warps store them; workers read them; the default warps store the last state at the end. racecheck reports these
accesses; docs/lab/gluon-forward.md says why they are ordered.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton.experimental.gluon")

from compiled import gluon_offline, test_compiled_gluon_backward, test_compiled_gluon_forward

from kilat.masks import Causal

EVENTS = {
    "S": r"st\.shared(?:\.v\d)?\.b32 \t\[global_smem\+\d+\]",  # a state, or an argument
    "s": r"ld\.shared\.b8",  # a worker's state
    "l": r"ld\.shared(?:\.v\d)?\.b\d+ \t.*\[global_smem\+\d+\]",  # an argument
    "c": r"barrier\.sync \t1;",  # of all threads of the CTA
    "e": r"\bret;",
}
PATTERN = re.compile("|".join(f"(?P<{name}>{text})" for name, text in EVENTS.items()))
ORDER = re.compile(r"S+cc(?:c|cs|l+c|cS+ce)*")
"""Default warps: stores, two barriers, and at the end a barrier, the last state, a barrier. Workers: a barrier before
the state, and one after arguments. Blocks after the first may stand in any order."""


def events(ptx: str) -> str:
    """The letters of `EVENTS`, in the order of the text."""
    found = (PATTERN.search(line) for line in ptx.splitlines() if not line.strip().startswith("//"))
    return "".join(str(match.lastgroup) for match in found if match)


def kernels(module: Any, **arguments: Any) -> dict[str, str]:
    """PTX by kernel of one call."""
    texts: dict[str, str] = {}
    read = gluon_offline.read

    def kept(kernel: Any, *more: Any) -> Any:
        texts[kernel.metadata.name] = kernel.asm["ptx"]
        return read(kernel, *more)

    with mock.patch.object(gluon_offline, "read", kept):
        module.compiled(**arguments)
    return {name: text for name, text in texts.items() if "setmaxnreg" in text}


FORWARD, BACKWARD = test_compiled_gluon_forward, test_compiled_gluon_backward
CALLS = {
    # name: (module, arguments, kernels and the partitions of each beside the default one)
    # The forward's producer is one warp; the three beside it, which do nothing, are a partition of two and one of one.
    "forward": (FORWARD, {"dim": 64, "mask": Causal()}, {"forward_kernel": 3 + 2}),
    "forward ragged": (FORWARD, {"dim": 128, "ragged": True}, {"forward_kernel": 2 + 2}),
    "backward narrow": (BACKWARD, {"dim": 64, "mask": Causal()}, {"backward_kernel": 2}),
    "backward wide": (BACKWARD, {"dim": 128, "mask": Causal(), "ragged": True}, {"backward_kernel": 2}),
    "deterministic": (BACKWARD, {"dim": 64, "deterministic": True}, {"backward_dq_kernel": 2, "backward_kernel": 2}),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_access_is_behind_a_barrier_of_the_cta(name: str) -> None:
    module, arguments, partitions = CALLS[name]
    found = kernels(module, **arguments)
    assert set(found) == set(partitions)
    for kernel, text in found.items():
        check(events(text), partitions[kernel])


def check(order: str, partitions: int) -> None:
    """Four barriers of the default warps, two of every partition and of idle workers, one before the state."""
    assert ORDER.fullmatch(order), order
    assert (order.count("s"), order.count("Sce")) == (1, 1), order
    assert order.count("c") == 4 + 2 * partitions + 2 + 1, order


def test_a_missing_barrier_is_noticed() -> None:
    order = "SSScc" + "c" + "cs" + "cc" + "llc" + "c" + "lc" + "c" + "Sce"
    check(order, 2)
    for place, event in enumerate(order):
        if event == "c":
            with pytest.raises(AssertionError):
                check(order[:place] + order[place + 1 :], 2)
