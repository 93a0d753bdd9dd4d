"""What compiles under every Triton that is supported, beside the Gluon kernels: `make test` runs this for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import triton
from configurations import PAIRS, SAMPLE, results
from test_triton_budgets import check

from kilat.backends import triton as backend


@pytest.mark.parametrize(("name", "architecture"), SAMPLE)
def test_sample(name: str, architecture: str) -> None:
    check(name, architecture)


def test_the_sample_holds_every_kernel_and_every_architecture() -> None:
    sources = Path(str(backend.__file__)).parent.glob("*.py")
    kernels = {name for file in sources for name in re.findall(r"@triton\.jit.*\ndef (\w+_kernel)\(", file.read_text())}
    assert len(kernels) >= 6
    assert {kernel for name, where in SAMPLE if where == "sm_90" for kernel in results(name, where)} == kernels
    assert {where for _, where in SAMPLE} == {where for _, where in PAIRS}


def test_version(pytestconfig: pytest.Config) -> None:
    """The Triton that compiled is the one that `make test` names, and no other that is installed."""
    wanted = pytestconfig.getoption("--triton", None)
    if wanted is None:
        pytest.skip("no --triton=VERSION: any will do")
    assert triton.__version__ == wanted
