"""Tests of Triton kernels in Triton's interpreter: TRITON_INTERPRET=1 in a process of their own (`make test`)."""

from __future__ import annotations

import os
from typing import Any

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, in a process that does not interpret; there NumPy may overflow as the kernels do."""
    for item in items:
        if "interpreted" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
            # Triton 3.6 takes Python numbers out of arrays that way
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"))
            if not INTERPRETING:
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 in a process of its own: make test"))


def _multiply_bfloat16() -> None:
    """Triton's interpreter multiplies the raw bits of bfloat16 operands of tl.dot; widen them first."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.create_fp_ext(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = widened


if INTERPRETING:
    _multiply_bfloat16()
