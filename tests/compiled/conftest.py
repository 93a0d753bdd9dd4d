"""Tests that compile Triton kernels for GPUs that are not there; skipped where Triton is not installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:  # no Linux wheel
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Compiled kernels stay below .pytest_cache: a kernel that did not change compiles once."""
    cache = getattr(config, "cache", None)
    if cache is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(cache.mkdir("triton-kernels")).resolve()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip in a process whose kernels are interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        for item in items:
            if "compiled" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="kernels are interpreted in this process"))
