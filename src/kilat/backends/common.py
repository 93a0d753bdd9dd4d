"""What the GPU backends share: starting a compiled CUDA kernel with arguments that were packed beforehand.

Triton's launchers take every argument as a Python object at every launch, 113 of them in the Hopper forward. A `Launch`
writes the addresses that change into a block of packed arguments and calls the driver through ctypes.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MAP_BYTES = 128
POINTER_BYTES = 8
MAX_MAPS = 256
"""Tensor maps kept of one tensor of a call; all are dropped when there are more (each costs microseconds)."""

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_CONFIG = struct.Struct("<IIIIIIIxxxxQQIxxxx")  # CUlaunchConfig; stream, attributes and their number come last
_L2_PROMOTION_128B = 2


@lru_cache(maxsize=1)
def driver() -> Any:
    """The CUDA driver's library; ctypes releases Python's lock while it works."""
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, what: str) -> None:
    """Raise RuntimeError if the driver returned an error."""
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(text))
        name = (text.value or b"unknown error").decode()
        raise RuntimeError(f"the CUDA driver must be able to {what}; got {name} ({code})")


class Kernel(NamedTuple):
    """A kernel in the GPU's memory."""

    name: str
    function: int
    threads: int
    shared: int  # bytes
    device: int


class Changing(NamedTuple):
    """An argument that each launch brings: what stands from byte `start` on in its value number `value`."""

    value: int
    start: int = 0


class _Block(NamedTuple):
    """Packed arguments of one launch at a time: memory, where the stream stands in it, what the driver is given."""

    memory: Any
    stream: int
    config: ctypes.c_void_p
    arguments: ctypes.c_void_p


class Launch:
    """A kernel, its grid and its arguments: bytes that never change, and the places of those that do.

    `sizes` are the bytes of the changing values: tensor maps first, in multiples of 128, then addresses of 8.
    A launch may run in several threads at a time.
    """

    def __init__(self, kernel: Kernel, grid: int, arguments: Sequence[bytes | Changing], sizes: Sequence[int]) -> None:
        self._kernel, self._grid, self._arguments, self._sizes = kernel, grid, tuple(arguments), tuple(sizes)
        kinds = ["Q" if size == POINTER_BYTES else f"{size}s" for size in sizes]
        self._pack = struct.Struct("<QQQ" + "".join(kinds)).pack_into
        self._function = ctypes.c_void_p(kernel.function)
        self._start = driver().cuLaunchKernelEx
        self._free: list[_Block] = []

    def __call__(self, stream: int, *values: bytes | int) -> None:
        """Start the kernel on a stream of the current device; raises RuntimeError with the driver's error."""
        try:
            block = self._free.pop()
        except IndexError:
            block = self._block()
        self._pack(block.memory, block.stream, stream, 0, 0, *values)
        error = self._start(block.config, self._function, block.arguments, None)
        if error == _NO_CONTEXT:  # a thread that has not used the GPU yet
            _enter(self._kernel.device)
            error = self._start(block.config, self._function, block.arguments, None)
        self._free.append(block)
        if error:
            check(error, f"start {self._kernel.name}")

    def _block(self) -> _Block:
        """[configuration, values, constants, addresses of the arguments], the values at a multiple of 128 bytes."""
        constants = [x for x in self._arguments if isinstance(x, bytes)]
        fixed = sum(self._sizes)
        size = 128 + fixed + sum(_rounded(len(x)) for x in constants) + 8 * len(self._arguments)
        memory = ctypes.create_string_buffer(size + 128)
        first = ctypes.addressof(memory)
        values = 128 - first % 128 + 128
        starts = [values + sum(self._sizes[:n]) for n in range(len(self._sizes))]
        at, places = values + fixed, list[int]()
        for x in self._arguments:
            if isinstance(x, bytes):
                memory[at : at + len(x)] = x
                places.append(first + at)
                at += _rounded(len(x))
            else:
                places.append(first + starts[x.value] + x.start)
        struct.pack_into(f"<{len(places)}Q", memory, at, *places)
        config = values - _CONFIG.size
        threads, shared = self._kernel.threads, self._kernel.shared
        _CONFIG.pack_into(memory, config, self._grid, 1, 1, threads, 1, 1, shared, 0, 0, 0)
        return _Block(memory, values - 24, ctypes.c_void_p(first + config), ctypes.c_void_p(first + at))


def _rounded(size: int) -> int:
    return -(-size // 8) * 8


def _enter(device: int) -> None:
    """Make the device's primary context, in which torch works too, current in this thread."""
    library, number, context = driver(), ctypes.c_int(), ctypes.c_void_p()
    check(library.cuDeviceGet(ctypes.byref(number), device), f"find device {device}")
    check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), f"use device {device}")
    check(library.cuCtxSetCurrent(context), f"use device {device}")


class Tiled(NamedTuple):
    """What `cuTensorMapEncodeTiled` is told beside the address; shape, strides (in elements) and box row-major."""

    dtype: int
    element_size: int
    swizzle: int
    box: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TensorMaps:
    """The tensor maps through which kernels read and write one tensor of a call, one behind the other, by address.

    A map is a function of the address and of what stands in its `Tiled`, so one that was made stays right.
    """

    def __init__(self, tilings: Sequence[Tiled]) -> None:
        self._encoders = [_encoder(tiled) for tiled in tilings]
        self._known: dict[int, bytes] = {}
        self.get = self._known.get

    def make(self, address: int) -> bytes:
        """The maps of an address that `get` does not know; remembers them."""
        if len(self._known) >= MAX_MAPS:
            self._known.clear()
        made = self._known[address] = b"".join([encode(address) for encode in self._encoders])
        return made


_TwoMaps = ctypes.c_char * (2 * MAP_BYTES)


def _encoder(t: Tiled) -> Any:
    rank = len(t.shape)
    shape = (ctypes.c_uint64 * rank)(*reversed(t.shape))
    strides = (ctypes.c_uint64 * (rank - 1))(*(n * t.element_size for n in reversed(t.strides[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(t.box))
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)

    def encode(address: int) -> bytes:
        memory = _TwoMaps()
        start = -ctypes.addressof(memory) % MAP_BYTES
        code = driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(memory) + start), t.dtype, rank, ctypes.c_void_p(address),
            shape, strides, box, steps, 0, t.swizzle, _L2_PROMOTION_128B, 0,
        )  # fmt: skip
        if code:
            check(code, f"make a tensor map of {t} at address {address:#x}")
        return memory.raw[start : start + MAP_BYTES]

    return encode
