"""Tests that compile Triton kernels for GPUs that are not there; skipped where Triton is not installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:  # no Linux wheel
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """--triton=VERSION: the tests are about this Triton."""
    parser.addoption("--triton", metavar="VERSION", help="the version of Triton that must be the one that is tested")


def pytest_report_header() -> str:
    """The Triton that compiles."""
    if importlib.util.find_spec("triton") is None:
        return "triton: not installed"
    import triton

    return f"triton: {triton.__version__} from {Path(triton.__file__).parents[1]}"


def pytest_configure(config: pytest.Config) -> None:
    """Compiled kernels stay below .pytest_cache: a kernel that did not change compiles once.

    Raises pytest.UsageError where the Triton that --triton names is not the one that would compile.
    """
    wanted = config.getoption("--triton", None)
    if wanted is not None and wanted not in (found := pytest_report_header()).split():
        raise pytest.UsageError(f"--triton must be the version of Triton that is imported; got {wanted}, {found}")
    cache = getattr(config, "cache", None)
    if cache is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(cache.mkdir("triton-kernels")).resolve()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip in a process whose kernels are interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        for item in items:
            if "compiled" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="kernels are interpreted in this process"))
