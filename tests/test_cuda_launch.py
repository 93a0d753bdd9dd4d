"""Packed launches, on a driver of Python functions."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest

from kilat.backends import common
from kilat.backends.common import Changing, Kernel, Launch, Source, TensorMaps, Tiled

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
KERNEL = Kernel("f", 48, 384, 1000, 3)
ARGUMENTS = (Changing(0), b"\1\0\0\0", Changing(0, 128), bytes(range(8)), Changing(1), bytes(8))
LENGTHS = (128, 4, 128, 8, 8, 8)


class Library:
    """A CUDA driver that notes launches, and answers each with the next of `codes`, or 0."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.launched: list[tuple[Any, ...]] = []
        self.maps: list[Any] = []
        self.entered: list[Any] = []
        self.set: list[Any] = []
        self.cuLaunchKernelEx = LAUNCH(self._launch)

    def _launch(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        fields = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))
        places = struct.unpack(f"<{len(LENGTHS)}Q", ctypes.string_at(arguments, 8 * len(LENGTHS)))
        values = [ctypes.string_at(place, n) for place, n in zip(places, LENGTHS, strict=True)]
        self.launched.append((fields, function, values, extra, [place % 64 for place in places]))
        return self.codes.pop(0) if self.codes else 0

    def cuTensorMapEncodeTiled(self, out: Any, dtype: int, rank: int, address: Any, *rest: Any) -> int:
        arrays = [list(x) if isinstance(x, ctypes.Array) else x for x in rest]
        self.maps.append((out.value % 64, dtype, rank, address.value, *arrays))
        ctypes.memmove(out.value, bytes([len(self.maps) % 256]) * 128, 128)
        return self.codes.pop(0) if self.codes else 0

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_OF_A_TEST"
        return 0

    def cuDeviceGet(self, number: Any, device: int) -> int:
        number._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 100 + device.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.entered.append(context.value)
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.entered[-1] if self.entered else None
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = {75: 9, 76: 0, 97: 232_448}[attribute] + 100 * (device.value - 3)
        return 0

    def cuModuleLoadData(self, module: Any, data: bytes) -> int:
        module._obj.value = len(data)
        return self.codes.pop(0) if self.codes else 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = {b"f": 48, b"static": 64}[name] if module.value == 5 else None
        return 0

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:
        value._obj.value = {0: 384, 1: 1000 if function.value == 64 else 0}[attribute]
        return 0

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:
        self.set.append((function.value, config))
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.set.append((function.value, attribute, value))
        return 0


@pytest.fixture
def library() -> Iterator[Library]:
    """The driver for one test."""
    made = Library()
    with mock.patch.object(common, "driver", return_value=made):
        yield made


def launch_of(library: Library) -> Launch:
    """A launch whose maps and pointers follow from the addresses of two tensors."""
    maps = TensorMaps([TILED, TILED], KERNEL.device)
    return Launch(KERNEL, 5, ARGUMENTS, [Source(1, 32, maps), Source(0, 8)])


def expected(n: int, address: int) -> list[bytes]:
    """The arguments of a launch before which n tensor maps had been made."""
    first, second = bytes([n % 256 + 1]) * 128, bytes([n % 256 + 2]) * 128
    return [first, b"\1\0\0\0", second, bytes(range(8)), struct.pack("<Q", address), bytes(8)]


def test_bytes(library: Library) -> None:
    """Configuration, constants and changing values where they belong, and the values of this call only."""
    launch = launch_of(library)
    for n in (1, 2, 1):
        launch(7 * n, (2**63 + n, 4096 * n))
        fields, function, values, extra, places = library.launched[-1]
        assert fields == (5, 1, 1, 384, 1, 1, 1000, 7 * n, 0, 0)
        assert function == 48
        assert extra is None
        assert values == expected(2 * n - 2, 2**63 + n + 8)
        assert places[0] == places[2] == 0
    assert [x[3] for x in library.maps] == [4096 + 32] * 2 + [8192 + 32] * 2
    launch(9, (2**63 + 2, 4096))  # addresses that are known, but not together
    assert library.launched[-1][2] == expected(0, 2**63 + 2 + 8)
    assert len(library.maps) == 4
    assert len(launch._blocks) == 3


def test_bounded(library: Library) -> None:
    """What is written over another call's arguments is complete; a round through too many addresses finds most."""
    launch, count = launch_of(library), common.MAX_BLOCKS + 9
    for n in range(2 * count):
        launch(n, (n % count, 4096))
        assert library.launched[-1][0][7] == n
        assert library.launched[-1][2] == expected(0, n % count + 8)
        assert len(launch._blocks) <= common.MAX_BLOCKS
    with mock.patch.object(launch, "_filled", side_effect=launch._filled) as filled:
        for n in range(count):
            launch(n, (n, 4096))
            assert library.launched[-1][2] == expected(0, n + 8)
    assert filled.call_count < 20


def test_threads(library: Library) -> None:
    """Launches at the same time have blocks of their own, also where they meet the same addresses."""
    launch = launch_of(library)

    def call(n: int) -> None:
        launch(n, (n % 300, 4096))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(1, 2001)))
    assert len(library.launched) == 2000
    for fields, _, values, _, _ in library.launched:
        assert values[4] == struct.pack("<Q", fields[7] % 300 + 8)
    assert sorted(x[0][7] for x in library.launched) == list(range(1, 2001))


def test_thread_without_a_context(library: Library) -> None:
    """Such a thread enters the context of the kernel's device, and map and launch are made after all."""
    launch = launch_of(library)
    library.codes = [201, 0, 0, 201]
    launch(1, (2, 4096))
    assert library.entered == [103, 103]
    assert len(library.maps) == 3
    assert library.maps[0][3] == library.maps[1][3] == 4096 + 32
    assert len(library.launched) == 2
    assert library.launched[0] == library.launched[1]
    assert library.launched[0][2] == expected(1, 10)


def test_errors(library: Library) -> None:
    launch = launch_of(library)
    library.codes = [0, 0, 201, 719]
    with pytest.raises(RuntimeError, match=r"start f; got CUDA_ERROR_OF_A_TEST \(719\)"):
        launch(1, (2, 4096))
    launch(1, (2, 4096))
    assert len(launch._blocks) == 1
    library.codes = [1]
    with pytest.raises(RuntimeError, match=r"tensor map of Tiled.*at address 0x40"):
        TensorMaps([TILED], 0).of(64)
    library.codes = [201, 201]
    with pytest.raises(RuntimeError, match=r"tensor map of Tiled.*got CUDA_ERROR_OF_A_TEST \(201\)"):
        TensorMaps([TILED], 0).of(64)


TILED = Tiled(9, 2, 3, (1, 64, 1, 32), (3, 65, 5, 63), (40_000, 600, 64, 1))


def test_tensor_maps(library: Library) -> None:
    """One behind the other, row-major turned round, strides in bytes; made once an address, and not kept for ever."""
    maps = TensorMaps([TILED, TILED._replace(box=(1, 64, 1, 16))], 0)
    assert maps.size == 256
    for _ in range(2):
        assert maps.of(4096) == bytes([1]) * 128 + bytes([2]) * 128
    shared = ([63, 5, 65, 3], [128, 1200, 80_000])
    assert library.maps[0] == (0, 9, 4, 4096, *shared, [32, 1, 64, 1], [1] * 4, 0, 3, 2, 0)
    assert library.maps[1] == (0, 9, 4, 4096, *shared, [16, 1, 64, 1], [1] * 4, 0, 3, 2, 0)
    for n in range(3 * common.MAX_MAPS):
        maps.of(16 * n)
    assert len(maps._known) <= common.MAX_MAPS


def test_loading(library: Library) -> None:
    """In the device's context, and with all of its shared memory where more is wanted than it gives unasked."""
    assert common.load(b"12345", "f", 384, 49_152, 3) == Kernel("f", 48, 384, 49_152, 3)
    assert library.entered == [103]
    assert library.set == []
    for name, function, static in (("f", 48, 0), ("static", 64, 1000)):
        assert common.load(b"12345", name, 384, 49_153, 3).function == function
        assert library.set == [(function, 1), (function, 8, 232_448 - static)]
        library.set.clear()
    assert library.entered == [103]
    assert (common.attribute(3, common.MAJOR), common.attribute(3, common.MINOR)) == (9, 0)


def test_what_is_not_loaded(library: Library) -> None:
    with pytest.raises(RuntimeError, match=r"f needs 384 threads and 232449 bytes.*; got 384 and 232448"):
        common.load(b"12345", "f", 384, 232_449, 3)
    with pytest.raises(RuntimeError, match=r"f needs 385 threads"):
        common.load(b"12345", "f", 385, 0, 3)
    library.codes = [200]
    with pytest.raises(RuntimeError, match=r"load f; got CUDA_ERROR_OF_A_TEST \(200\)"):
        common.load(b"12345", "f", 384, 0, 3)
