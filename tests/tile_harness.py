"""Runs one emitted tile function of the CPU backend through ctypes, against NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np

from kilat.backends.cpu import jit
from kilat.backends.cpu.emit import F32, F64, VOID, Function, Module
from kilat.backends.cpu.isa import Isa, supported_isas
from kilat.backends.cpu.layout import COMMON, SEQ, Geometry
from kilat.backends.cpu.params import Params, float_bits
from kilat.backends.cpu.tiles import COMMON_PARAMS

Builder = Callable[[Module, Geometry], Function]


@lru_cache(maxsize=1)
def geometries() -> list[tuple[Isa, Geometry]]:
    """Every tile shape in use on the instruction sets that this machine has, in both orientations."""
    out: list[tuple[Isa, Geometry]] = []
    vectors = {"avx512": (4, 1), "avx2": (3, 8), "generic": (4,)}
    for isa in supported_isas():
        for v in vectors.get(isa.name, ()):
            for query_lanes in (True, False):
                out.append((isa, Geometry(F32, isa.lanes32, v, 64, query_lanes)))
                out.append((isa, Geometry(F64, isa.lanes64, v, 64, query_lanes)))
    return out


def geometry_id(value: tuple[Isa, Geometry]) -> str:
    isa, geo = value
    return f"{isa.name}-{geo.compute}-{geo.lanes}x{geo.vectors}-{'queries' if geo.query_lanes else 'keys'}"


@cache
def compiled(builder: Builder, geo: Geometry, isa: Isa) -> int:
    """Address of an exported function that calls the internal one that `builder` emits."""

    def text() -> str:
        m = Module()
        inner = builder(m, geo)
        with m.function("entry", inner.types, inner.ret, exported=True) as f:
            result = f.call(inner, *f.args)
            if inner.ret != VOID:
                f.ret_value(result)
        return m.text()

    return jit.compile_module(text, f"test {builder.__name__} {geo}", ["entry"], isa)["entry"]


def invoke(address: int, arguments: list[int]) -> int:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(arguments))
    return prototype(address)(*arguments)


@dataclass
class Place:
    """One tile of one sequence and head, and the parameters that describe the rest."""

    geo: Geometry
    q_len: int
    kv_len: int
    i0: int
    nr: int
    j0: int
    nb: int
    b: int = 0
    h: int = 0
    bounds: np.ndarray | None = None  # int32 [n][2][q_len]
    values: dict[str, int] = field(default_factory=dict)
    keep: list[np.ndarray] = field(default_factory=list)

    def own(self, x: np.ndarray) -> int:
        """The address of an array that lives as long as this object."""
        self.keep.append(x)
        return x.ctypes.data

    def set(self, **values: int | float | np.ndarray) -> Place:
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                self.values[name] = self.own(value)
            else:
                self.values[name] = float_bits(value) if isinstance(value, float) else int(value)
        return self

    def run(self, builder: Builder, isa: Isa, *more: int) -> int:
        return invoke(compiled(builder, self.geo, isa), [*self.leading(), *more])

    def leading(self) -> list[int]:
        params = np.zeros(COMMON_PARAMS.size, np.int64)
        seq = np.zeros(len(SEQ), np.int64)
        record = Params(*SEQ)
        seq[record.index["q_len"]], seq[record.index["kv_len"]] = self.q_len, self.kv_len
        if self.bounds is not None:
            seq[record.index["bounds"]] = self.own(guarded(self.bounds))
            self.values["n_intervals"] = len(self.bounds)
        for name, value in self.values.items():
            params[COMMON.index(name)] = value
        tile = [self.b, self.h, self.i0, self.nr, self.j0, self.nb]
        return [self.own(params), self.own(seq), *tile]

    # ---- tiles ---------------------------------------------------------------------------------------------------
    def queries(self) -> np.ndarray:
        return np.arange(self.i0, self.i0 + self.nr)

    def keys(self) -> np.ndarray:
        return np.arange(self.j0, self.j0 + self.nb)

    def score_tile(self, x: np.ndarray) -> np.ndarray:
        """x [nr][nb] as the tile that a kernel holds, NaN outside."""
        t = np.full((self.geo.outer, self.geo.width), np.nan, numpy_type(self.geo))
        x = x.T if self.geo.query_lanes else x
        t[: x.shape[0], : x.shape[1]] = x
        return t

    def from_tile(self, t: np.ndarray) -> np.ndarray:
        """The [nr][nb] part of a tile."""
        return t[: self.nb, : self.nr].T if self.geo.query_lanes else t[: self.nr, : self.nb]

    def bits_tile(self) -> np.ndarray:
        return np.full((self.geo.outer, self.geo.vectors), -21846, np.int16)  # 1010...: neither clear nor full

    def unpack(self, bits: np.ndarray) -> np.ndarray:
        """bits tile -> bool [outer][width]."""
        lanes = np.arange(self.geo.lanes)
        return ((bits[:, :, None].astype(np.int64) >> lanes) & 1).astype(bool).reshape(self.geo.outer, self.geo.width)


def numpy_type(geo: Geometry) -> type:
    return np.float32 if geo.compute == F32 else np.float64


def guarded(x: np.ndarray) -> np.ndarray:
    """A contiguous copy that ends exactly before an unreadable page, so that a read behind it stops the test."""
    x = np.ascontiguousarray(x)
    return _guard_copy(x) if x.nbytes else x


def _guard_copy(x: np.ndarray) -> np.ndarray:
    import mmap

    page = mmap.PAGESIZE
    size = (x.nbytes + page - 1) // page * page
    memory = mmap.mmap(-1, size + page)
    base = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(base.ctypes.data + size, page, 0):
        raise OSError(ctypes.get_errno(), "mprotect refused")
    out = base[size - x.nbytes : size].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def places(geo: Geometry) -> list[tuple[int, int, int, int]]:
    """(i0, nr, j0, nb): whole, odd and one-element tiles; at least one starts off a multiple of 4 keys."""
    width, outer = geo.width, geo.outer
    most_q, most_k = (width, outer) if geo.query_lanes else (outer, width)
    return [
        (0, most_q, 0, most_k),
        (5, max(most_q - 3, 1), 7, max(most_k - 1, 1)),
        (3, 1, 2, 1),
        (1, min(most_q, 3), 64, most_k),
    ]
