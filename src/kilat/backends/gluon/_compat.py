"""What differs between Triton 3.6 and 3.9, in one place; kernels import these names from here.

| name | 3.6, 3.7 | 3.8 | 3.9 |
| --- | --- | --- | --- |
| `async_load`, `async_store` | `tma.async_copy_*` | both spellings | new spelling only |
| `async_reduce_add` | no public function | `tma.async_atomic_add` | the same |
| `cta_barrier` | `gl.thread_barrier` (3.6) | `gl.barrier` | `gl.barrier` |
| `aggregate` | `triton.language.core._aggregate` | `triton.aggregate` | the same |

What a launch needs of a compiled kernel (`kernel_of`, `arguments_of`) has been the same from 3.6 to 3.7; it is checked
against the kernel's own PTX, and where it does not fit Triton's launcher does the work.
"""

# pyright: basic, reportRedeclaration=false, reportAssignmentType=false
from __future__ import annotations

import re
import struct
from contextlib import nullcontext
from functools import lru_cache
from threading import Thread
from typing import TYPE_CHECKING, Any

import triton
import triton.runtime.cache
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime.errors import OutOfResources

from kilat.backends import kernel_files
from kilat.backends.common import MAP_BYTES, POINTER_BYTES, Kernel, Tiled

if TYPE_CHECKING:
    from collections.abc import Sequence

kernel_files.shorten(triton.runtime.cache)

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


def has_hooks() -> bool:
    """Whether somebody (a profiler, say) wants to be called before or after launches: Triton's launcher does that."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch_through_triton(compiled: Any, grid: int, stream: int, arguments: Sequence[Any]) -> None:
    """Launch a compiled kernel by Triton's launcher, with all of the kernel's arguments."""
    metadata = compiled.launch_metadata((grid, 1, 1), stream, *arguments)
    compiled.run(
        grid, 1, 1, stream, compiled.function, compiled.packed_metadata, metadata,
        knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *arguments,
    )  # fmt: skip


@lru_cache(maxsize=1)
def hashing() -> Thread:
    """A thread in which Triton hashes its own files, if it must (0.3 s): part of the key of each cached kernel."""
    thread = Thread(target=getattr(triton.runtime.cache, "triton_key", int), daemon=True)
    thread.start()
    return thread


def compiled(kernel: Any, arguments: Sequence[Any], options: dict[str, Any], *, anew: bool = False) -> Any:
    """The `CompiledKernel` for such arguments, compiled or read from disk; with `anew`, compiled in any case.

    Raises what Triton raises, and DamagedError if its files have changed.
    """
    hashing().join()
    with knobs.compilation.scope() if anew else nullcontext():
        if anew:
            knobs.compilation.always_compile = True
            kernel.device_caches.clear()
        made = kernel.run(*arguments, grid=(1,), warmup=True, **options)
        made = made.result() if hasattr(made, "result") else made
    if anew:
        kernel_files.forget(made)
    kernel_files.check(made)
    return made


_SCALARS = {"i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d"}
_PLAIN = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0}
_PLAIN |= {"launch_cooperative_grid": False, "launch_pdl": False}
"""Metadata of kernels that need nothing but arguments, and what it must be."""


class UnexpectedError(Exception):
    """A compiled kernel is not what this module expects: only Triton's own launcher can launch it."""


def kernel_of(compiled: Any, device: int) -> Kernel:
    """The kernel of a `CompiledKernel`, loaded; raises UnexpectedError if a launch needs more than arguments."""
    metadata = compiled.metadata
    for name, value in _PLAIN.items():
        if getattr(metadata, name, None) != value:
            raise UnexpectedError(f"{name} must be {value}; got {getattr(metadata, name, None)}")
    function = _loaded(compiled, device)
    if not isinstance(function, int):
        raise UnexpectedError(f"function must be the driver's handle; got {function!r}")
    return Kernel(metadata.name, function, 32 * metadata.num_warps, metadata.shared, device)


def _loaded(compiled: Any, device: int) -> Any:
    """The driver's handle of a kernel, without the launcher that Triton makes: 3.6 needs a C compiler for each.

    Raises OutOfResources if this GPU lacks shared memory or registers for it.
    """
    hooks = (knobs.runtime.kernel_load_start_hook, knobs.runtime.kernel_load_end_hook)
    if any(getattr(hook, "calls", hook) for hook in hooks):
        compiled._init_handles()
        return compiled.function
    active: Any = triton.runtime.driver.active
    utils, needed = active.utils, compiled.metadata.shared
    available = utils.get_device_properties(device)["max_shared_mem"]
    if needed > available:
        raise OutOfResources(needed, available, "shared memory")
    _, function, _, _, threads = utils.load_binary(compiled.name, compiled.kernel, needed, device)
    if 32 * compiled.metadata.num_warps > threads:
        raise OutOfResources(32 * compiled.metadata.num_warps, threads, "threads")
    return function


def arguments_of(compiled: Any, given: Sequence[Any]) -> list[tuple[int, bytes | Tiled | None]]:
    """The C arguments of a kernel: bytes, a tensor map to be made, or None for an address; each with its parameter.

    `given` are all parameters in order, a Box where the kernel wants a descriptor. Raises UnexpectedError if the
    result is not what the kernel's PTX says.
    """
    signature, descriptors = compiled.src.signature.items(), iter(compiled.metadata.tensordesc_meta or ())
    found: list[tuple[int, bytes | Tiled | None]] = []
    for n, ((name, kind), value) in enumerate(zip(signature, given, strict=True)):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            tiled = _tiled(next(descriptors, None), value)
            found += [(n, tiled), *((n, struct.pack("<i", x)) for x in tiled.shape)]
            found += [(n, struct.pack("<q", x)) for x in tiled.strides]
        elif kind.startswith("*"):
            found.append((n, None))
        elif kind in _SCALARS:
            found.append((n, struct.pack(_SCALARS[kind], value)))
        else:
            raise UnexpectedError(f"arguments must be descriptors, pointers or numbers; got {name}: {kind}")
    found += [(-1, bytes(POINTER_BYTES))] * 2  # scratch memory, of which there is none
    sizes = [len(x) if isinstance(x, bytes) else POINTER_BYTES if x is None else MAP_BYTES for _, x in found]
    if sizes != (declared := _parameter_sizes(compiled)):
        raise UnexpectedError(f"sizes of arguments must be those of the PTX, {declared}; got {sizes}")
    return found


def _tiled(meta: Any, box: Any) -> Tiled:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if meta is None or meta["fp4_padded"] or box.strides[-1] != 1:
        raise UnexpectedError(f"a descriptor must be that of a plain tensor map; got {meta} for {box}")
    kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    block, shape, strides = map(tuple, (meta["block_size"], box.shape, box.strides))
    return Tiled(kind, meta["elem_size"], meta["swizzle"], block, shape, strides)


def _parameter_sizes(compiled: Any) -> list[int]:
    """Bytes of each parameter of the kernel, as its PTX declares them."""
    entry = re.search(rf"\.entry {compiled.metadata.name}\(([^)]*)\)", compiled.asm.get("ptx", ""))
    if entry is None:
        raise UnexpectedError(f"PTX must have an entry {compiled.metadata.name}; got none")
    kinds = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?", entry[1])
    return [int(bits) // 8 * int(count or 1) for bits, count in kinds]
