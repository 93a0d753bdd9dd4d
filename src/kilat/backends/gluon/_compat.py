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

import importlib
import re
from contextlib import nullcontext
from functools import lru_cache
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.runtime.cache
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.errors import OutOfResources

from kilat.backends import kernel_files
from kilat.backends.common import Kernel
from kilat.backends.gluon import ready
from kilat.backends.gluon.ready import Parameter, UnexpectedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kilat.backends.gluon.launching import Box

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


_DTYPES: dict[torch.dtype, Any] = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


def function(kernel: Any) -> Any:
    """The jitted function of a kernel that is called "module:function", or is one."""
    if not isinstance(kernel, str):
        return kernel
    module, name = kernel.split(":")
    return getattr(importlib.import_module(module), name)


def descriptor(box: Box, x: torch.Tensor) -> TensorDescriptor:
    """What Triton is given for a tensor that a kernel sees in boxes."""
    if box.swizzled:
        layout: Any = gl.NVMMASharedLayout.get_default_for(box.block_shape, _DTYPES[x.dtype])
    else:
        bits = 8 * x.element_size()
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=len(box.block_shape))
    return TensorDescriptor(x, box.shape, box.strides, box.block_shape, layout)


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


_FORMATS = {"i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d"}
_PLAIN = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0}
_PLAIN |= {"launch_cooperative_grid": False, "launch_pdl": False}
"""Metadata of kernels that need nothing but arguments, and what it must be."""


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


_handles: dict[tuple[int, int], tuple[Any, Any]] = {}
"""Kernels of Triton's that were loaded, and the driver's handles, by id and device: plans share them."""


def _loaded(compiled: Any, device: int) -> Any:
    """The driver's handle of a kernel, without the launcher that Triton makes: 3.6 needs a C compiler for each.

    Raises OutOfResources if this GPU lacks shared memory or registers for it.
    """
    if (id(compiled), device) in _handles:
        return _handles[id(compiled), device][1]
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
    _handles[id(compiled), device] = compiled, function
    return function


def parameters_of(compiled: Any) -> tuple[Parameter, ...]:
    """What a kernel wants of its arguments; raises UnexpectedError if that is not what its PTX says."""
    signature, descriptors = compiled.src.signature.items(), iter(compiled.metadata.tensordesc_meta or ())
    found: list[Parameter] = []
    for n, (name, kind) in enumerate(signature):
        if kind.startswith("tensordesc"):
            found.append(Parameter(n, tiling=_tiling(next(descriptors, None))))
        elif kind in _FORMATS:
            found.append(Parameter(n, _FORMATS[kind]))
        elif kind.startswith("*"):
            found.append(Parameter(n))
        elif kind != "constexpr":
            raise UnexpectedError(f"arguments must be descriptors, pointers or numbers; got {name}: {kind}")
    sizes = ready.sizes_of(found)
    if sizes != (declared := parameter_sizes(compiled)):
        raise UnexpectedError(f"sizes of arguments must be those of the PTX, {declared}; got {sizes}")
    return tuple(found)


def _tiling(meta: Any) -> tuple[int, int, int, tuple[int, ...]]:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if meta is None or meta["fp4_padded"]:
        raise UnexpectedError(f"a descriptor must be that of a plain tensor map; got {meta}")
    kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return kind, meta["elem_size"], meta["swizzle"], tuple(meta["block_size"])


def parameter_sizes(compiled: Any) -> list[int]:
    """Bytes of each parameter of the kernel, as its PTX declares them."""
    entry = re.search(rf"\.entry {compiled.metadata.name}\(([^)]*)\)", compiled.asm.get("ptx", ""))
    if entry is None:
        raise UnexpectedError(f"PTX must have an entry {compiled.metadata.name}; got none")
    kinds = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?", entry[1])
    return [int(bits) // 8 * int(count or 1) for bits, count in kinds]


def keep(wanted: ready.Wanted, compiled: Any, parameters: tuple[Parameter, ...]) -> None:
    """Let other processes start a kernel without Triton, if this one did not change what Triton compiles."""
    changed = [name for group in _SETTINGS for name, value in vars(group).items() if value and name not in _HARMLESS]
    if changed:
        return
    metadata = compiled.metadata
    code = ready.Code(metadata.name, 32 * metadata.num_warps, metadata.shared, parameters, compiled.kernel)
    ready.keep(wanted, "".join(map(_role, function(wanted.kernel).params)), code)


_SETTINGS = (knobs.compilation, knobs.runtime, knobs.language, knobs.nvidia)
_HARMLESS = frozenset(
    (
        *("listener", "launch_enter_hook", "launch_exit_hook", "kernel_load_start_hook", "kernel_load_end_hook"),
        *("jit_cache_hook", "jit_post_compile_hook", "libcuda_path", "cuobjdump", "nvdisasm", "default_fp_fusion"),
    )
)
"""What a program may set in Triton, and kernels do not change."""


def _role(parameter: Any) -> str:
    if parameter.is_constexpr:
        return ready.CONSTANT
    return ready.NUMBER if parameter.do_not_specialize else ready.TOLD_APART
