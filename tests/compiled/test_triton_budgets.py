"""Every configuration compiles for every architecture, within the registers, spills and shared memory on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configurations import PAIRS, results
from offline import SHARED_MEMORY

BUDGETS: dict[str, Any] = json.loads(Path(__file__).with_name("budgets.json").read_text())

# Register allocation moves a little from one assembler to the next; a kernel that begins to spill, or spills much more
# than it did, has lost its speed.
MORE_REGISTERS = 16
MORE_SPILLED = 64


@pytest.mark.parametrize(("name", "architecture"), PAIRS)
def test_within_budget(name: str, architecture: str) -> None:
    check(name, architecture)


def check(name: str, architecture: str) -> None:
    """A configuration against its budget."""
    for kernel, found in results(name, architecture).items():
        budget = BUDGETS[architecture][name][kernel]
        assert found["registers"] <= budget["registers"] + MORE_REGISTERS
        assert found["spilled"] <= budget["spilled"] + MORE_SPILLED
        assert found["shared"] <= budget["shared"]
        assert found["shared"] <= SHARED_MEMORY[architecture] * 1024
        if "float32" not in name and kernel not in ("delta_kernel", "merge_kernel"):  # sums by rows
            assert found["matrix"] > 0, "the products do not run on the matrix units"
