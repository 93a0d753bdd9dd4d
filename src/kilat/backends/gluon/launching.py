"""Launching a compiled kernel again without Triton's argument binder, which costs tens of microseconds a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor


class Box:
    """What a launch reads of a `TensorDescriptor`, without its checks."""

    __slots__ = ("base", "block_shape", "layout", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        self.base, self.shape, self.strides, self.block_shape, self.layout = base, shape, strides, block_shape, layout
        self.padding, self.round_f32_to_tf32 = "zero", False

    def descriptor(self) -> TensorDescriptor:
        """The descriptor itself, for Triton's binder."""
        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape, self.layout)


class Launcher:
    """Launches kernels, and remembers what each was compiled to for arguments of the same kind."""

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        kernel: Any,
        programs: int,
        tensors: tuple[Any, ...],
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
        maxnreg: int | None = None,
    ) -> None:
        """Launch `programs` programs; the kernel's parameters are tensors (Box, Tensor, None), numbers, constants."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        kinds = [None if x is None else type(x) is Box or x.data_ptr() % 16 for x in tensors]
        key = (kernel, device, numbers, *kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            bound = [x.descriptor() if isinstance(x, Box) else x for x in tensors]
            self._compiled[key] = kernel[(programs,)](
                *bound, *numbers, *constants, num_warps=4, enable_fp_fusion=True, maxnreg=maxnreg
            )
            return
        compiled.run(
            programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), compiled.function, compiled.packed_metadata,
            None, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *tensors, *numbers, *constants,
        )  # fmt: skip
