"""Kernels that start without Triton: machine code in kilat's cache folder, and how its arguments are laid out.

Importing Triton takes most of a first call whose kernels lie on disk. So each kernel that was compiled is kept under a
key of everything that shapes it: kilat's sources of kernels, Triton's files, the architecture, options, constants, and
types and divisibility of the arguments, as Triton tells them apart. Which numbers it tells apart is kept beside it,
for it stands in the decorators of kernels, which nobody has imported.

A process that has imported Triton asks Triton: somebody may have changed its settings, or want to be told of
compilations and launches. Where the environment changes its settings no kernel is ready either.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kilat import config
from kilat._version import __version__
from kilat.backends import common, kernel_files, store
from kilat.backends.common import MAP_BYTES, POINTER_BYTES, Kernel, Tiled

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAGIC = b"kilat gluon kernel 1\n"
_HEAD = struct.Struct("<Q")  # bytes of the description in front of the machine code

CONSTANT, NUMBER, TOLD_APART = "c", "n", "t"
"""What a kernel's parameter is to Triton: a constant, an argument by its type, one by 1 and multiples of 16 too."""


class UnexpectedError(Exception):
    """A kernel is not what the code around it expects: only Triton's own launcher can launch it."""


class Parameter(NamedTuple):
    """What a kernel wants of its argument number n: a number in a format, a tensor map, or (neither) an address.

    tiling: data type, bytes of an element, swizzle and box of the map, as in `common.Tiled`.
    """

    n: int
    format: str | None = None
    tiling: tuple[int, int, int, tuple[int, ...]] | None = None


class Code(NamedTuple):
    """A compiled kernel: all that starting it takes."""

    name: str
    threads: int
    shared: int  # bytes
    parameters: tuple[Parameter, ...]
    cubin: bytes


class Wanted(NamedTuple):
    """A kernel ("module:function") and all that decides what it is compiled to.

    arguments are those of all parameters in order: a number, None, or a tuple that describes a tensor.
    """

    kernel: str
    device: int
    options: dict[str, Any]
    arguments: tuple[Any, ...]


_loaded: dict[tuple[str, int], tuple[Kernel, tuple[Parameter, ...]]] = {}
"""Kernels on GPUs, by key and device: plans share them."""


def are_there(kernel: str) -> bool:
    """Whether this Triton has compiled such a kernel here before, and need not be asked for it (see above)."""
    return (world := _world()) is not None and _roles(world, kernel) is not None


def find(wanted: Wanted) -> tuple[Kernel, tuple[Parameter, ...]] | None:
    """The kernel, loaded, and its parameters; None where only Triton can tell, or this GPU does not take it."""
    world = _world()
    roles = None if world is None else _roles(world, wanted.kernel)
    if world is None or roles is None or len(roles) != len(wanted.arguments):
        return None
    key = _key(world, wanted, roles)
    known = _loaded.get((key, wanted.device))
    if known is None:
        content = store.read(_path(key, wanted.kernel), _MAGIC)
        if content is None:
            return None
        code = _decoded(content)
        try:
            kernel = common.load(code.cubin, code.name, code.threads, code.shared, wanted.device)
        except RuntimeError:
            return None
        known = _loaded[key, wanted.device] = kernel, code.parameters
    return known


def keep(wanted: Wanted, roles: str, code: Code) -> None:
    """Let other processes `find` a kernel; `roles` has a letter for each parameter."""
    world = _world_of(kernel_files.imported())
    if world is None or _digest_of_sources() != _SOURCES:  # edited meanwhile: what was compiled is not known
        return
    if _roles(world, wanted.kernel) != roles:
        store.write(_path(_of_kernel(world, wanted.kernel), wanted.kernel), _MAGIC, roles.encode())
    path = _path(_key(world, wanted, roles), wanted.kernel)
    if store.read(path, _MAGIC) is None:
        store.write(path, _MAGIC, _encoded(code))


def sizes_of(parameters: Sequence[Parameter]) -> list[int]:
    """Bytes of the arguments that `packed` makes."""
    sizes: list[int] = []
    for x in parameters:
        rank = len(x.tiling[3]) if x.tiling is not None else 0
        sizes += [MAP_BYTES, *[4] * rank, *[8] * rank] if rank else [struct.calcsize(x.format or "<Q")]
    return [*sizes, POINTER_BYTES, POINTER_BYTES]


def packed(parameters: Sequence[Parameter], given: Sequence[Any]) -> list[tuple[int, bytes | Tiled | None]]:
    """The C arguments of a kernel: bytes, a tensor map to be made, or None for an address; each with its parameter.

    `given` are all arguments in order, a Box where the kernel wants a tensor map. Raises UnexpectedError where a row of
    one is not contiguous.
    """
    found: list[tuple[int, bytes | Tiled | None]] = []
    for n, kind, tiling in parameters:
        if tiling is not None:
            box = given[n]
            if box.strides[-1] != 1:
                raise UnexpectedError(f"a tensor map must be of contiguous rows; got {box}")
            found.append((n, Tiled(*tiling, tuple(box.shape), tuple(box.strides))))
            found += [(n, struct.pack("<i", x)) for x in box.shape]
            found += [(n, struct.pack("<q", x)) for x in box.strides]
        else:
            found.append((n, None if kind is None else struct.pack(kind, given[n])))
    return [*found, *[(-1, bytes(POINTER_BYTES))] * 2]  # scratch memory, of which there is none


# ---- keys ------------------------------------------------------------------------------------------------------------
def _digest_of_sources() -> str:
    """Of this package: of all kernels, and of what this module is told about them."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


_SOURCES = _digest_of_sources()
"""When this module was imported: before the kernels, and with the host code."""


@lru_cache(maxsize=1)
def _on_disk() -> kernel_files.Installation:
    """The Triton that an import would find; raises LookupError where it must be imported to know it.

    What is not there may be there later in the process, so only what was found is remembered.
    """
    spec = importlib.util.find_spec("triton")
    found = None if spec is None or spec.origin is None else kernel_files.installation(Path(spec.origin).parent)
    if found is None:
        raise LookupError
    return found


def _world() -> str | None:
    """What all keys of kernels begin with that need no Triton; None where none does."""
    if "triton" in sys.modules:
        return None
    try:
        return _world_of(_on_disk())
    except LookupError:
        return None


def _world_of(triton: kernel_files.Installation | None) -> str | None:
    settings = config.triton_settings()
    assembler = settings.pop("TRITON_PTXAS_PATH", None)
    if settings or triton is None:
        return None
    try:
        facts = () if assembler is None else (assembler, *kernel_files.facts_of(Path(assembler)))
    except OSError:
        return None
    return f"{__version__} {sys.version_info[:2]} {_SOURCES} {triton.digest} {facts}"


def _of_kernel(world: str, kernel: str) -> str:
    return hashlib.sha256(f"{world}\n{kernel}".encode()).hexdigest()


def _key(world: str, wanted: Wanted, roles: str) -> str:
    """The name of a file: a digest of everything that shapes machine code."""
    digest = hashlib.sha256(f"{world}\n{wanted.kernel}\n{roles}\n".encode())
    digest.update(f"{_architecture(wanted.device)} {sorted(wanted.options.items())}\n".encode())
    for role, x in zip(roles, wanted.arguments, strict=True):
        digest.update(_text(role, x).encode() + b"\n")
    return digest.hexdigest()


def _text(role: str, x: Any) -> str:
    """What of an argument shapes machine code."""
    if role != CONSTANT and type(x) is float:
        return "float"
    if role == CONSTANT or type(x) is not int:  # None, or a tuple that describes a tensor
        return f"{type(x).__name__} {x!r}"
    width = "i32" if -(1 << 31) <= x < 1 << 31 else "i64" if -(1 << 63) <= x < 1 << 63 else "u64"
    return f"{width} {x == 1} {x % 16 == 0}" if role == TOLD_APART else width


@lru_cache(maxsize=16)
def _architecture(device: int) -> str:
    """Compute capability, as the driver says."""
    return f"{common.attribute(device, common.MAJOR)}.{common.attribute(device, common.MINOR)}"


# ---- files -----------------------------------------------------------------------------------------------------------
def _path(key: str, kernel: str) -> Path:
    return config.cache_dir() / f"{key[:40]}-{kernel.rpartition(':')[2]}{store.GPU_SUFFIX}"


@lru_cache(maxsize=64)
def _known_roles(path: Path) -> str:
    content = store.read(path, _MAGIC)
    if content is None:
        raise LookupError
    return content.decode()


def _roles(world: str, kernel: str) -> str | None:
    """A letter for each parameter of a kernel that was compiled in such a world."""
    try:
        return _known_roles(_path(_of_kernel(world, kernel), kernel))
    except LookupError:
        return None


def _encoded(code: Code) -> bytes:
    head = json.dumps(code._replace(cubin="")).encode()
    return _HEAD.pack(len(head)) + head + code.cubin


def _decoded(content: bytes) -> Code:
    (size,) = _HEAD.unpack_from(content)
    name, threads, shared, parameters, _ = json.loads(content[_HEAD.size : _HEAD.size + size])
    made: list[Parameter] = []
    for n, kind, tiling in parameters:
        made.append(Parameter(n, kind, None if tiling is None else (*tiling[:3], tuple(tiling[3]))))
    return Code(name, threads, shared, tuple(made), content[_HEAD.size + size :])
