"""What the GPU backends share: memory, and starting a compiled CUDA kernel with arguments that were packed beforehand.

Triton's launchers take every argument as a Python object at every launch, 113 of them in the Hopper forward. A `Launch`
writes the addresses that change into a block of packed arguments and calls the driver through ctypes.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAP_BYTES = 128
POINTER_BYTES = 8
MAX_MAPS = 256
"""Tensor maps kept of one tensor of a call; all are dropped when there are more (each costs microseconds)."""

MAX_BLOCKS = 128
"""Packed arguments kept of one kernel, two KiB each; further addresses are written over those used last, so that a
round through too many addresses still finds most of them."""

MAJOR, MINOR = 75, 76
"""Attributes of a device: its compute capability."""

_MAX_SHARED = 97  # attribute of a device: bytes of shared memory that a CTA may ask for
_MAX_THREADS, _STATIC_SHARED, _DYNAMIC_SHARED = 0, 1, 8  # attributes of a function
_PREFER_SHARED = 1
_ORDINARY_SHARED = 48 << 10  # bytes that a CTA gets without asking
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_STREAM = 32  # where the stream stands in a CUlaunchConfig
_CONFIG = struct.Struct("<IIIIIIIxxxxQQIxxxx")  # CUlaunchConfig; stream, attributes and their number come last
_VALUES = 128  # where values start in a block; a multiple of what tensor maps must be aligned to
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


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    strides, step = list[int](), 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _allocator() -> Any:
    """What torch's own compiled code allocates with, past the dispatcher; else `torch.empty_strided`, at 2 us more."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, "_empty_strided_cuda", _empty_strided)


empty_on_gpu: Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor] = _allocator()
"""(shape, strides, dtype): uninitialised memory on the current GPU."""


class Kernel(NamedTuple):
    """A kernel in the GPU's memory."""

    name: str
    function: int
    threads: int
    shared: int  # bytes
    device: int


def attribute(device: int, number: int) -> int:
    """An attribute of a device; raises RuntimeError with the driver's error."""
    found = ctypes.c_int()
    check(driver().cuDeviceGetAttribute(ctypes.byref(found), number, _device(device)), "tell about a device")
    return found.value


def load(cubin: bytes, name: str, threads: int, shared: int, device: int) -> Kernel:
    """Machine code made ready to start on a device, for good; raises RuntimeError where the device does not take it."""
    library, context, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(library.cuCtxGetCurrent(ctypes.byref(context)), "tell the context")
    if not context.value:
        _enter(device)
    check(library.cuModuleLoadData(ctypes.byref(module), cubin), f"load {name}")
    check(library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"find {name}")
    available, static, most = attribute(device, _MAX_SHARED), ctypes.c_int(), ctypes.c_int()
    check(library.cuFuncGetAttribute(ctypes.byref(most), _MAX_THREADS, function), f"tell about {name}")
    if shared > available or threads > most.value or not function.value:
        needs, has = f"{threads} threads and {shared} bytes of shared memory", f"{most.value} and {available}"
        raise RuntimeError(f"{name} needs {needs}; got {has}")
    if shared > _ORDINARY_SHARED:
        check(library.cuFuncSetCacheConfig(function, _PREFER_SHARED), f"prepare {name}")
        check(library.cuFuncGetAttribute(ctypes.byref(static), _STATIC_SHARED, function), f"tell about {name}")
        check(library.cuFuncSetAttribute(function, _DYNAMIC_SHARED, available - static.value), f"prepare {name}")
    return Kernel(name, function.value, threads, shared, device)


class Changing(NamedTuple):
    """An argument that each launch brings: what stands from byte `start` on in its value number `value`."""

    value: int
    start: int = 0


class Source(NamedTuple):
    """A changing value: the address of a call's tensor number `n` plus `start` bytes, or the tensor maps made there."""

    n: int
    start: int = 0
    maps: TensorMaps | None = None


class _Block(NamedTuple):
    """Packed arguments of one launch at a time: memory, where values stand in it, what the driver is given."""

    memory: Any
    values: int
    stream: Any
    config: Any
    arguments: Any


class Launch:
    """A kernel, its grid and its arguments: bytes that never change, and the places of those that follow addresses.

    `sources` are the changing values, those with tensor maps first. Arguments stay packed by the addresses of a call,
    since most calls meet tensors where earlier ones lay. A launch may run in several threads at a time.
    """

    def __init__(self, kernel: Kernel, grid: int, arguments: Sequence[bytes | Changing], sources: Sequence[Source]):
        self._kernel, self._grid, self._arguments = kernel, grid, tuple(arguments)
        self._maps = [(x.n, x.start, x.maps.of) for x in sources if x.maps is not None]
        self._pointers = [(x.n, x.start) for x in sources if x.maps is None]
        self._sizes = [POINTER_BYTES if x.maps is None else x.maps.size for x in sources]
        kinds = ["Q" if x.maps is None else f"{x.maps.size}s" for x in sources]
        self._pack = struct.Struct("<" + "".join(kinds)).pack_into
        self._function: Any = ctypes.c_void_p.from_param(kernel.function)  # arguments made beforehand cost less
        self._start = driver().cuLaunchKernelEx
        self._template, self._places = self._layout()
        self._blocks: dict[tuple[int, ...], _Block] = {}

    def __call__(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Start the kernel on a stream of the current device; raises RuntimeError with the driver's error."""
        block = self._blocks.pop(addresses, None) or self._filled(addresses)
        block.stream.value = stream
        error = self._start(block.config, self._function, block.arguments, None)
        if error == _NO_CONTEXT:  # a thread that has not used the GPU yet
            _enter(self._kernel.device)
            error = self._start(block.config, self._function, block.arguments, None)
        self._blocks[addresses] = block
        if error:
            check(error, f"start {self._kernel.name}")

    def _filled(self, addresses: tuple[int, ...]) -> _Block:
        """A block with the values of addresses that have none."""
        try:
            block = self._blocks.popitem()[1] if len(self._blocks) >= MAX_BLOCKS else self._block()
        except KeyError:  # other threads took them all
            block = self._block()
        maps = [of(addresses[n] + start) for n, start, of in self._maps]
        self._pack(block.memory, block.values, *maps, *[addresses[n] + start for n, start in self._pointers])
        return block

    def _layout(self) -> tuple[bytes, list[int]]:
        """A block but for what lies where it lies: [configuration, values, constants], and where arguments stand."""
        threads, shared = self._kernel.threads, self._kernel.shared
        config = _CONFIG.pack(self._grid, 1, 1, threads, 1, 1, shared, 0, 0, 0)
        starts = [_VALUES + sum(self._sizes[:n]) for n in range(len(self._sizes))]
        made, places = config.rjust(_VALUES, b"\0") + bytes(sum(self._sizes)), list[int]()
        for x in self._arguments:
            if isinstance(x, bytes):
                places.append(len(made))
                made += x.ljust(_rounded(len(x)), b"\0")
            else:
                places.append(starts[x.value] + x.start)
        return made, places

    def _block(self) -> _Block:
        """[configuration, values, constants, addresses of the arguments], the values at a multiple of 128 bytes."""
        size, count = len(self._template), len(self._places)
        memory = ctypes.create_string_buffer(_VALUES + size + POINTER_BYTES * count)
        first = ctypes.addressof(memory)
        start = -first % _VALUES
        ctypes.memmove(first + start, self._template, size)
        struct.pack_into(f"<{count}Q", memory, start + size, *[first + start + place for place in self._places])
        config = start + _VALUES - _CONFIG.size
        stream = ctypes.c_uint64.from_buffer(memory, config + _STREAM)
        arguments = ctypes.byref(memory, start + size)
        return _Block(memory, start + _VALUES, stream, ctypes.byref(memory, config), arguments)


def _rounded(size: int) -> int:
    return -(-size // 8) * 8


def _enter(device: int) -> None:
    """Make the device's primary context, in which torch works too, current in this thread."""
    library, context = driver(), ctypes.c_void_p()
    check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), _device(device)), f"use device {device}")
    check(library.cuCtxSetCurrent(context), f"use device {device}")


def _device(number: int) -> ctypes.c_int:
    """The driver's name of a device."""
    found = ctypes.c_int()
    check(driver().cuDeviceGet(ctypes.byref(found), number), f"find device {number}")
    return found


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

    def __init__(self, tilings: Sequence[Tiled], device: int) -> None:
        self._encoders = [_encoder(tiled, device) for tiled in tilings]
        self._known: dict[int, bytes] = {}
        self.size = MAP_BYTES * len(tilings)

    def of(self, address: int) -> bytes:
        """The maps of an address; remembers them."""
        made = self._known.get(address)
        if made is None:
            if len(self._known) >= MAX_MAPS:
                self._known.clear()
            made = self._known[address] = b"".join([encode(address) for encode in self._encoders])
        return made


_TwoMaps = ctypes.c_char * (2 * MAP_BYTES)


def _encoder(t: Tiled, device: int) -> Any:
    rank = len(t.shape)
    shape = (ctypes.c_uint64 * rank)(*reversed(t.shape))
    strides = (ctypes.c_uint64 * (rank - 1))(*(n * t.element_size for n in reversed(t.strides[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(t.box))
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)

    def encode(address: int) -> bytes:
        memory = _TwoMaps()
        start = -ctypes.addressof(memory) % MAP_BYTES
        given = (
            ctypes.c_void_p(ctypes.addressof(memory) + start), t.dtype, rank, ctypes.c_void_p(address),
            shape, strides, box, steps, 0, t.swizzle, _L2_PROMOTION_128B, 0,
        )  # fmt: skip
        code = driver().cuTensorMapEncodeTiled(*given)
        if code == _NO_CONTEXT:  # making a map needs a context as launching does
            _enter(device)
            code = driver().cuTensorMapEncodeTiled(*given)
        if code:
            check(code, f"make a tensor map of {t} at address {address:#x}")
        return memory.raw[start : start + MAP_BYTES]

    return encode
