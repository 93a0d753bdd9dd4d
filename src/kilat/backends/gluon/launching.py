"""Kernels compiled once and launched again and again with new addresses, around Triton's argument binder."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kilat.backends import common, kernel_files
from kilat.backends.common import MAP_BYTES, Changing, Launch, Source, TensorMaps, Tiled, contiguous_strides
from kilat.backends.gluon import ready
from kilat.backends.gluon.ready import UnexpectedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kilat.backends.common import Kernel
    from kilat.backends.gluon.ready import Parameter, Wanted


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Tensor:
    """Contiguous uninitialised memory on the current GPU, whose number is given; below 0: on the CPU."""
    if device < 0:
        return torch.empty(shape, dtype=dtype)
    return common.empty_on_gpu(shape, contiguous_strides(shape), dtype)


@dataclass(frozen=True)
class Box:
    """How TMA cuts a tensor up: all that a descriptor of Triton's says but for the memory.

    swizzled: the boxes lie in shared memory as wgmma reads them, rather than row after row.
    """

    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    swizzled: bool = True


def tma_strides(x: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of x as [batch, seqlen, heads, dim] (ragged: batch 1), valid strides along axes of length 1."""
    shape, strides = list(x.shape), list(x.stride())
    unit = 16 // x.element_size()
    if x.dim() == 3:
        shape, strides = [1, *shape], [unit, *strides]
    strides = [unit if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]
    strides[3] = 1
    return shape, strides


def must_copy(x: Tensor) -> bool:
    """Whether TMA cannot take the strides: multiples of 16 bytes, above 0."""
    unit = 16 // x.element_size()
    return any(stride % unit or stride <= 0 for stride in tma_strides(x)[1][:3])


def aligned_copy(x: Tensor) -> Tensor:
    """A copy whose rows start at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    wide = -(-x.shape[-1] // unit) * unit
    made = torch.empty((*x.shape[:-1], wide), dtype=x.dtype, device=x.device)[..., : x.shape[-1]]
    return made.copy_(x)


def rows_box(x: Tensor, rows: int, width: int) -> Box:
    """Boxes of `rows` tokens of one head, `width` wide."""
    return Box(*tma_strides(x), [1, rows, 1, width])


def matrix_box(rows: int, width: int, block: int) -> Box:
    """Boxes [block, width] of a contiguous float32 matrix [rows, width]."""
    return Box([rows, width], [width, 1], [block, width], swizzled=False)


class Of(NamedTuple):
    """A kernel's argument that is tensor number `n` of the call, from element `start` on: in boxes, or its address."""

    n: int
    box: Box | None = None
    start: int = 0


class Step:
    """A kernel with all that does not change from call to call; made, it is compiled.

    `kernel` is "module:function", or a jitted function, which Triton is always asked for; `arguments` are its run-time
    parameters in order: `Of` a tensor of the call, a number or None.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        arguments: Sequence[Any],
        constants: Sequence[Any],
        *,
        maxnreg: int | None = None,
        tensors: Sequence[Tensor],
    ) -> None:
        self._kernel, self._grid, self._arguments, self._constants = kernel, grid, tuple(arguments), tuple(constants)
        self._options = {"num_warps": 4, "enable_fp_fusion": True, "maxnreg": maxnreg}
        self.device = tensors[0].get_device()
        self._compiled: Any = None  # Triton's kernel, where Triton was asked for it
        self.start: Any = None
        """(stream, addresses of the tensors): launches; None where that cannot be done without Triton's launcher."""
        if self.device >= 0 and not self._is_ready(tensors):
            self._compile(tensors)

    def _is_ready(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the kernel can be had without Triton; packs what does not change."""
        found = ready.find(self._wanted(tensors)) if isinstance(self._kernel, str) else None
        if found is None:
            return False
        try:
            self._prepare(tensors, *found)
        except UnexpectedError:
            return False
        return True

    def _wanted(self, tensors: Sequence[Tensor]) -> Wanted:
        described: list[Any] = []
        for x in self._arguments:
            if not isinstance(x, Of):
                described.append(x)
                continue
            tensor = tensors[x.n]
            if x.box is not None:
                described.append(("box", str(tensor.dtype), *x.box.block_shape, x.box.swizzled))
            else:
                first = tensor.data_ptr() + x.start * tensor.element_size()
                described.append(("address", str(tensor.dtype), first % 16 == 0))
        return ready.Wanted(self._kernel, self.device, self._options, (*described, *self._constants))

    def _compile(self, tensors: Sequence[Tensor]) -> None:
        """Compile the kernel or find it in Triton's cache, anew if what lies there is damaged; pack as `_is_ready`."""
        from kilat.backends.gluon import _compat

        _compat.hashing()  # meanwhile the kernel is imported
        function, given = _compat.function(self._kernel), [*self._bound(tensors), *self._constants]
        try:
            self._compiled = _compat.compiled(function, given, self._options)
            self._take(tensors)
        except Exception as error:
            if not kernel_files.is_damage(error):
                raise
            kernel_files.warn(function.__name__, error)
            self._compiled = _compat.compiled(function, given, self._options, anew=True)
            self._take(tensors)

    def _take(self, tensors: Sequence[Tensor]) -> None:
        """Pack what does not change, if the compiled kernel is as `_compat` knows them, and keep it."""
        from kilat.backends.gluon import _compat

        try:
            kernel, parameters = _compat.kernel_of(self._compiled, self.device), _compat.parameters_of(self._compiled)
            self._prepare(tensors, kernel, parameters)
        except (UnexpectedError, AttributeError) as error:
            warnings.warn(f"kernels are launched by Triton's slower launcher: {error}", RuntimeWarning, stacklevel=2)
            return
        if isinstance(self._kernel, str):
            _compat.keep(self._wanted(tensors), self._compiled, parameters)

    def _bound(self, tensors: Sequence[Tensor]) -> list[Any]:
        """What Triton is given for the arguments."""
        from kilat.backends.gluon import _compat

        bound: list[Any] = []
        for x in self._arguments:
            if not isinstance(x, Of):
                bound.append(x)
                continue
            tensor = tensors[x.n].detach()
            tensor = tensor.view(-1)[x.start :] if x.start else tensor
            bound.append(tensor if x.box is None else _compat.descriptor(x.box, tensor))
        return bound

    def _prepare(self, tensors: Sequence[Tensor], kernel: Kernel, wants: Sequence[Parameter]) -> None:
        """Pack what does not change; raises UnexpectedError where the kernel wants other arguments."""
        parameters: list[Any] = [*self._arguments, *self._constants]
        given = [x.box or x if isinstance(x, Of) else x for x in parameters]
        maps: dict[tuple[int, int], list[Tiled]] = {}  # by tensor and first byte
        pointers: list[tuple[int, int]] = []
        found: list[bytes | tuple[tuple[int, int], int | None]] = []  # bytes, or whose map or address
        for n, x in ready.packed(wants, given):
            if isinstance(x, bytes):
                found.append(x)
                continue
            of: Of = parameters[n]
            whose = of.n, of.start * tensors[of.n].element_size()
            known: list[Any] = pointers if x is None else maps.setdefault(whose, [])
            value = whose if x is None else x
            if value not in known:
                known.append(value)
            found.append((whose, None if x is None else known.index(value)))
        order = list(maps)
        packed: list[bytes | Changing] = []
        for x in found:
            if isinstance(x, bytes):
                packed.append(x)
            elif x[1] is None:
                packed.append(Changing(len(order) + pointers.index(x[0])))
            else:
                packed.append(Changing(order.index(x[0]), x[1] * MAP_BYTES))
        sources = [Source(*whose, TensorMaps(tiled, self.device)) for whose, tiled in maps.items()]
        sources += [Source(*whose) for whose in pointers]
        self.start = Launch(kernel, self._grid, packed, sources)

    def through_triton(self, tensors: Sequence[Tensor]) -> None:
        """Launch with Triton's launcher, or run in Triton's interpreter; without a GPU that is Triton's affair."""
        from kilat.backends.gluon import _compat

        arguments = [*self._bound(tensors), *self._constants]
        if self.device < 0:
            _compat.function(self._kernel)[(self._grid,)](*arguments, **self._options)
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        _compat.launch_through_triton(self.of_triton(tensors), self._grid, stream, arguments)

    def of_triton(self, tensors: Sequence[Tensor]) -> Any:
        """Triton's kernel, compiled or read from disk if Triton has not been asked for it."""
        from kilat.backends.gluon import _compat

        if self._compiled is None:
            given = [*self._bound(tensors), *self._constants]
            self._compiled = _compat.compiled(_compat.function(self._kernel), given, self._options)
        return self._compiled


_modules = sys.modules


def has_hooks() -> bool:
    """Whether somebody (a profiler, say) wants to be called before or after launches: Triton's launcher does that.

    Nobody can where Triton was not imported.
    """
    knobs: Any = _modules.get("triton.knobs")
    if knobs is None:
        return False
    try:
        runtime = knobs.runtime
    except AttributeError:  # another thread is importing it
        return False
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Steps:
    """Kernels that work one after another on the same tensors."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = tuple(steps)
        self._starts = [step.start for step in steps]
        self.packed = None not in self._starts

    def __call__(self, tensors: Sequence[Tensor], addresses: tuple[int, ...]) -> None:
        """Launch them on the current stream; `addresses` are those of the tensors."""
        if not self.packed or has_hooks():
            for step in self._steps:
                step.through_triton(tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._steps[0].device)
        for start in self._starts:
            start(stream, addresses)
