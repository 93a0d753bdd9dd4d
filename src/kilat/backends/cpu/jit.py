"""From LLVM IR text to a function's address, through an object cache on disk.

`compile_module` is the only door. The key of an entry holds everything that shapes machine code: the kernel's name
(which must spell out its configuration), the sources of this package and of the code that it traces, the CPU and its
features, and the version of LLVM. So a home directory shared by different machines is safe, and an edited source
never meets a stale object. Entries are written by rename and carry a length and a SHA-256; a damaged one is rebuilt.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from kilat import config
from kilat._version import __version__
from kilat.backends import store
from kilat.backends.cpu.isa import Isa

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

_MAGIC = b"kilat object 1\n"
_OPT = 2
# Sources whose text shapes the kernels: this package, and what it traces into IR.
_SOURCES = ("backends/cpu/*.py", "masks/*.py", "scores/*.py", "symbolic*.py", "symbolic/*.py")


@dataclass(frozen=True)
class Stats:
    """What this process has compiled and loaded so far; times in seconds."""

    compiled: int = 0
    loaded: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0


class _State:
    """What the process has linked; the objects in `keep` own the code."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.addresses: dict[tuple[str, tuple[str, ...], Isa], dict[str, int]] = {}
        self.keep: list[Any] = []
        self.stats = Stats()

    def new_lock(self) -> None:
        """In a forked child: a lock that another thread of the parent held at the fork would never open again."""
        self.lock = threading.RLock()


_state = _State()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_state.new_lock)


def stats() -> Stats:
    """Counts and times of this process."""
    return _state.stats


def compile_module(build: Callable[[], str], name: str, exports: Sequence[str], isa: Isa) -> dict[str, int]:
    """Addresses of the functions `exports` of the module whose IR `build()` returns.

    Args:
        build: called only if neither this process nor the disk knows the module.
        name: identifies the IR completely, every option of the kernel included.
        exports: functions defined with `exported=True`.
        isa: what to compile for.

    Raises:
        RuntimeError: LLVM refuses the text, naming the kernel; the IR stands in the message.
    """
    key = (name, tuple(exports), isa)
    known = _state.addresses.get(key)
    if known is not None:
        return known
    with _state.lock:
        if key not in _state.addresses:
            _state.addresses[key] = _compile_or_load(build, name, exports, isa)
        return _state.addresses[key]


def _compile_or_load(build: Callable[[], str], name: str, exports: Sequence[str], isa: Isa) -> dict[str, int]:
    start = time.perf_counter()
    digest = _key(name, isa)
    path = config.cache_dir() / (digest + store.CPU_SUFFIX)
    code = store.read(path, _MAGIC)
    from_disk = code is not None
    if code is None:
        try:
            code = compile_object(build(), isa)
        except RuntimeError as error:
            raise RuntimeError(f"LLVM refuses the kernel {name!r} for {isa.name}: {error}") from error
        store.write(path, _MAGIC, code)
    built = time.perf_counter()
    result = _link(code, digest, exports)
    done = time.perf_counter()
    if from_disk:
        _state.stats = replace(
            _state.stats, loaded=_state.stats.loaded + 1, load_seconds=_state.stats.load_seconds + done - start
        )
    else:
        seconds = _state.stats.compile_seconds + built - start
        _state.stats = replace(_state.stats, compiled=_state.stats.compiled + 1, compile_seconds=seconds)
    return result


# ---- compiling -------------------------------------------------------------------------------------------------------
def _machine(isa: Isa, jit: bool = False) -> Any:
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=_OPT, reloc="pic", codemodel="default", jit=jit
    )


def _optimised(text: str, machine: Any) -> Any:
    """The parsed module after LLVM's passes, those left out that rearrange loops and vectors written on purpose."""
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=_OPT)
    options.loop_vectorization = options.slp_vectorization = False
    options.loop_unrolling = options.loop_interleaving = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module


def compile_object(text: str, isa: Isa) -> bytes:
    """IR text to an object file, optimised for `isa`."""
    machine = _machine(isa)
    return machine.emit_object(_optimised(text, machine))


def assembly(text: str, isa: Isa) -> str:
    """IR text to the assembly that `compile_object` encodes, to read."""
    machine = _machine(isa)
    return machine.emit_assembly(_optimised(text, machine))


@lru_cache(maxsize=1)
def _linker() -> Any:
    """One linker for the process; object files carry their own instruction set."""
    target = llvm.Target.from_default_triple()
    linker = llvm.create_lljit_compiler(target.create_target_machine(reloc="pic", codemodel="default", jit=True))
    _state.keep.append(linker)
    return linker


def _link(code: bytes, digest: str, exports: Sequence[str]) -> dict[str, int]:
    library = llvm.JITLibraryBuilder().add_current_process().add_object_img(code)
    for function in exports:
        library.export_symbol(function)
    # The linker wants distinct names; the same object may be linked twice for different exports.
    linked = library.link(_linker(), f"{digest[:24]}_{len(_state.keep)}")
    _state.keep.append(linked)
    return {function: int(linked[function]) for function in exports}


# ---- the cache on disk -----------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def _source_hash() -> bytes:
    """SHA-256 of the sources that shape kernels, so that a warm start need not even build the IR."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(p for pattern in _SOURCES for p in root.glob(pattern)):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.digest()


def _key(name: str, isa: Isa) -> str:
    digest = hashlib.sha256(_source_hash())
    versions = f"{llvm.llvm_version_info} {llvmlite.__version__} {_OPT}"
    for part in (name, isa.cpu, isa.features, llvm.get_default_triple(), versions):
        digest.update(f"{len(part)} {part}\n".encode())
    readable = re.sub(r"[^A-Za-z0-9]+", "_", name)[:40].strip("_")
    return f"{digest.hexdigest()[:40]}-{isa.name}-{readable}"
