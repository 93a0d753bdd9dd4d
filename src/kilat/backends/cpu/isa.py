"""Which instructions a kernel may use: the host's own, or a weaker set chosen with `KILAT_CPU_ISA`.

An `Isa` carries what a kernel builder asks (how many lanes, which dot products) and what LLVM is told (a CPU name for
the schedule, and every feature switched on or off by name, so that a weaker set really does without the rest).
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import lru_cache

import llvmlite.binding as llvm

from kilat import config

# What each x86-64 set needs; a set may use everything the host has apart from its row in _X86_MASKED.
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512cd"}
_X86_NEEDS = {
    "amx": _AVX512 | {"avx512bf16", "amx-tile", "amx-bf16"},
    "avx512_bf16": _AVX512 | {"avx512bf16"},
    "avx512": _AVX512,
    "avx2": _AVX2,
}
# Native half arithmetic is off everywhere: kernels compute in float, and one code path is enough to test.
_X86_MASKED = {
    "amx": ("avx512fp16", "avx10"),
    "avx512_bf16": ("avx512fp16", "avx10", "amx"),
    "avx512": ("avx512fp16", "avx10", "amx", "avx512bf16"),
    "avx2": ("avx512", "avx10", "amx", "evex512", "egpr", "ndd", "nf", "ppx", "push2pop2", "ccmp", "zu", "cf"),
}
_FLOAT_LANES = {"amx": 16, "avx512_bf16": 16, "avx512": 16, "avx2": 8, "generic": 4}

# Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), without which the first tile instruction is a SIGILL.
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Isa:
    """An instruction set: `cpu` and `features` are LLVM's, `lanes32` is the number of 4-byte lanes of a register."""

    name: str
    cpu: str
    features: str
    lanes32: int
    has_dot_bf16: bool
    has_amx: bool

    @property
    def lanes64(self) -> int:
        """Number of 8-byte lanes of a register."""
        return self.lanes32 // 2

    @property
    def has_f16(self) -> bool:
        """Whether float16 converts in one instruction; else LLVM would call a runtime library that is not there."""
        return self.name != "generic" or not _is_x86()

    @property
    def has_fma(self) -> bool:
        """Whether `Function.fma` is one instruction, with one rounding."""
        return self.name != "generic" or not _is_x86()


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


@lru_cache(maxsize=1)
def _tiles_allowed() -> bool:
    """Ask Linux, once in a process, for the right to use AMX tiles; threads started before inherit it as well."""
    if sys.platform != "linux" or not _is_x86():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return libc.syscall(*(ctypes.c_long(a) for a in arguments)) == 0


def _host_features() -> dict[str, bool]:
    return {str(name): bool(on) for name, on in llvm.get_host_cpu_features().items()}


def _feature_string(features: dict[str, bool], masked: tuple[str, ...]) -> str:
    """Every feature of the host by name, those that start with a masked word switched off."""
    on = {name: value and not name.startswith(masked) for name, value in features.items()}
    # LLVM reads left to right and each "-" takes along what depends on it, each "+" what it needs: "-" comes last.
    return ",".join([f"+{n}" for n in sorted(on) if on[n]] + [f"-{n}" for n in sorted(on) if not on[n]])


@lru_cache(maxsize=1)
def supported_isas() -> tuple[Isa, ...]:
    """The instruction sets that this machine can run, the fastest first; `generic` is always among them."""
    found: list[Isa] = []
    features = _host_features()
    if _is_x86():
        present = {name for name, on in features.items() if on}
        for name, needs in _X86_NEEDS.items():
            if needs <= present and (name != "amx" or _tiles_allowed()):
                text = _feature_string(features, _X86_MASKED[name])
                lanes, dot = _FLOAT_LANES[name], name in ("amx", "avx512_bf16")
                found.append(Isa(name, llvm.get_host_cpu_name(), text, lanes, dot, name == "amx"))
        found.append(Isa("generic", "x86-64", "", _FLOAT_LANES["generic"], False, False))
    else:  # NEON and its like: 16-byte registers are the baseline
        text = _feature_string(features, ())
        found.append(Isa("generic", llvm.get_host_cpu_name(), text, _FLOAT_LANES["generic"], False, False))
    return tuple(found)


def host_isa() -> Isa:
    """The instruction set to compile for: `KILAT_CPU_ISA`, else the best; raises ValueError if the host lacks it."""
    wanted, supported = config.cpu_isa(), supported_isas()
    if wanted is None:
        return supported[0]
    for isa in supported:
        if isa.name == wanted:
            return isa
    names = ", ".join(isa.name for isa in supported)
    raise ValueError(f"KILAT_CPU_ISA must be one that this machine supports ({names}); got {wanted!r}")
