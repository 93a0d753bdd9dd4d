"""What differs between Triton 3.6 and 3.9, in one place; kernels import these names from here.

| name | 3.6, 3.7 | 3.8 | 3.9 |
| --- | --- | --- | --- |
| `async_load`, `async_store` | `tma.async_copy_*` | both spellings | new spelling only |
| `async_reduce_add` | no public function | `tma.async_atomic_add` | the same |
| `cta_barrier` | `gl.thread_barrier` (3.6) | `gl.barrier` | `gl.barrier` |
| `aggregate` | `triton.language.core._aggregate` | `triton.aggregate` | the same |
"""

# pyright: basic, reportRedeclaration=false, reportAssignmentType=false
from __future__ import annotations

from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, buffer): TMA from global to shared memory."""

async_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""(descriptor, coordinates, buffer): TMA from shared to global memory, in a group of its own."""

cta_barrier: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier")  # noqa: B009 (3.6 alone has it)
"""(): wait for all warps of this partition."""

aggregate: Any = getattr(triton, "aggregate", None)
if aggregate is None:
    from triton.language.core import _aggregate as aggregate

async_reduce_add: Any = getattr(tma, "async_atomic_add", None)
"""(descriptor, coordinates, buffer): TMA that adds shared to global memory, in a group of its own."""
if async_reduce_add is None:
    from triton._C.libtriton import ir

    @builtin
    def async_reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """The builder's operation, which 3.6 and 3.7 have no function for."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)
