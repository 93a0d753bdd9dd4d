"""Every configuration compiles for every architecture, within the registers, spills and shared memory on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configurations import FORWARD, results
from offline import ARCHITECTURES, SHARED_MEMORY

BUDGETS: dict[str, Any] = json.loads(Path(__file__).with_name("budgets.json").read_text())

# Register allocation moves a little from one assembler to the next; a kernel that begins to spill, or spills much more
# than it did, has lost its speed.
MORE_REGISTERS = 16
MORE_SPILLED = 64


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", FORWARD)
def test_within_budget(name: str, architecture: str) -> None:
    for kernel, found in results(name, architecture).items():
        budget = BUDGETS[architecture][name][kernel]
        assert found["registers"] <= budget["registers"] + MORE_REGISTERS
        assert found["spilled"] <= budget["spilled"] + MORE_SPILLED
        assert found["shared"] <= budget["shared"]
        assert found["shared"] <= SHARED_MEMORY[architecture] * 1024
        if "float32" not in name:
            assert found["matrix"] > 0, "the products do not run on the matrix units"
