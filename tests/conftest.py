"""What every test shares: one kernel cache, hypothesis profiles, and the skip of GPU tests where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A first call may compile a kernel, so no example has a deadline. `short` repeats the same examples on every run: a
# failure seen in CI is then seen at a desk. `long` (make test-all) draws new ones.
settings.register_profile(
    "short", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("short")


def pytest_configure(config: pytest.Config) -> None:
    """Point the kernel cache below .pytest_cache, so that a kernel compiles once for all tests and all runs."""
    cache = getattr(config, "cache", None)  # absent under `-p no:cacheprovider`; then the user's own cache serves
    if cache is not None and "KILAT_CACHE_DIR" not in os.environ:
        os.environ["KILAT_CACHE_DIR"] = str(Path(cache.mkdir("kilat-kernels")).resolve())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests, visibly and with the reason, on a machine without a CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
