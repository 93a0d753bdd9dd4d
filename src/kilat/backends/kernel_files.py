"""Kernels that Triton keeps on disk: whether its files are still what they were, and what to do if not.

Triton writes each file under another name and renames it, so a process that dies or two that compile at once leave
whole files or none. What is damaged later (a full disk, a crash of the machine) it reads as it is. A digest that lies
beside a kernel's files, written when they are first used, tells. And what it costs to find them (`shorten`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kilat import config
from kilat.backends import store

if TYPE_CHECKING:
    from collections.abc import Callable

DIGEST = "kilat.sha256"
READ = (".json", ".ptx", ".cubin", ".hsaco")
"""Ends of the names of files that a launch depends on."""

_MAGIC = b"kilat triton 1\n"
_REFUSED = re.compile(r"image is invalid|symbol not found|invalid PTX|PTX.*invalid|invalid source|INVALID_IMAGE")


class DamagedError(RuntimeError):
    """A kernel's files are not what they were."""


def check(compiled: Any) -> None:
    """Raise DamagedError if a `CompiledKernel` was read from files that have changed since they were first used."""
    files = [Path(path) for name, path in compiled.metadata_group.items() if name.endswith(READ)]
    digest, folder = hashlib.sha256(), files[0].parent
    for file in sorted(files):
        digest.update(file.name.encode() + file.read_bytes())
    with contextlib.suppress(FileNotFoundError):
        if (folder / DIGEST).read_text(encoding="utf-8") != digest.hexdigest():
            raise DamagedError(
                f"the files of a kernel must be as they were first used; those of {compiled.name} changed"
            )
        return
    own = folder / f"{DIGEST}.{os.getpid()}"
    own.write_text(digest.hexdigest(), encoding="utf-8")
    own.replace(folder / DIGEST)


def forget(compiled: Any, *, compile_again: bool = False) -> None:
    """Remove the digest of a kernel's files, and the one without which Triton compiles it again."""
    for name, path in compiled.metadata_group.items():
        if name.endswith(".json"):
            Path(path).with_name(DIGEST).unlink(missing_ok=True)
            if compile_again:
                Path(path).unlink(missing_ok=True)


def is_damage(error: Exception) -> bool:
    """Whether an error that came out of Triton is one that damaged files cause.

    Text that is no JSON or no UTF-8 (ValueError), a file that is missing (OSError, KeyError, StopIteration), or code
    that the driver refuses.
    """
    if "cannot be accessed from Triton" in str(error):  # a ValueError too: a tensor on the wrong device
        return False
    if isinstance(error, (DamagedError, ValueError, KeyError, OSError, StopIteration)):
        return True
    return isinstance(error, RuntimeError) and _REFUSED.search(str(error)) is not None


def warn(name: str, error: Exception) -> None:
    """Say that a kernel is compiled anew."""
    text = f"the cached files of {name} are damaged ({type(error).__name__}: {error}); it is compiled anew"
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class Installation(NamedTuple):
    """What Triton is made of.

    key is its own digest of itself, which stands in the key of each kernel that it keeps; digest covers all of its
    Python, Gluon included, and its assembler.
    """

    key: str
    digest: str


def shorten(cache: Any) -> None:
    """Let `triton_key` of Triton's module `cache` find its value in a file, instead of hashing its installation.

    That takes 0.3 s in each process, for libtriton.so alone has hundreds of megabytes. The value is the same: it is
    taken from the file while inode, size, mtime and ctime of everything that was hashed are what they were; a file
    that is written to gets another ctime.
    """
    real = getattr(cache, "triton_key", None)
    if real is None or hasattr(real, "shortened"):
        return

    @functools.lru_cache(maxsize=1)
    def triton_key() -> str:
        root = Path(cache.__file__).parents[1]
        known = _imported["triton"] = installation(root) or _remembered(root, real)
        return known.key

    setattr(triton_key, "shortened", True)  # noqa: B010 (pyright: functions have no such attribute)
    cache.triton_key = triton_key


_imported: dict[str, Installation] = {}


def imported() -> Installation | None:
    """The Triton of this process, as far as it has been asked for its key."""
    return _imported.get("triton")


def installation(root: Path) -> Installation | None:
    """What was remembered of the Triton in a folder; None if it was never hashed here, or is not what it was then."""
    content = store.read(_place(root), _MAGIC)
    if content is None:
        return None
    known = json.loads(content)
    return Installation(known["key"], known["digest"]) if known["state"] == _state(root) else None


def _remembered(root: Path, real: Callable[[], str]) -> Installation:
    """What Triton is made of, hashed, and kept for other processes."""
    state, key = _state(root), real()
    digest = hashlib.sha256(key.encode())
    for file in _files(root):
        if not file.name.startswith("libtriton"):  # its hash stands in the key
            digest.update(f"{file.relative_to(root).as_posix()} {file.stat().st_size}\n".encode() + file.read_bytes())
    found = Installation(key, digest.hexdigest())
    store.write(_place(root), _MAGIC, json.dumps({"state": state, **found._asdict()}).encode())
    return found


def _place(root: Path) -> Path:
    name = hashlib.sha256(str(root).encode()).hexdigest()[:20]
    return config.cache_dir() / f"triton-{name}{store.GPU_SUFFIX}"


def _files(root: Path) -> list[Path]:
    """The files of a Triton that shape Hopper kernels."""
    nvidia, found = root / "backends" / "nvidia", list[Path]()
    for folder, _, names in os.walk(root):
        found += [Path(folder, name) for name in names if name.endswith(".py") or name.startswith("libtriton")]
    return sorted([*found, *(nvidia / "bin").glob("ptxas"), *(nvidia / "lib").glob("*.bc")])


def _state(root: Path) -> str:
    """A digest of what the file system says about Triton's files."""
    facts = [(str(file), *facts_of(file)) for file in _files(root)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def facts_of(file: Path) -> tuple[int, ...]:
    """Inode, size, mtime and ctime; raises OSError where there is no such file."""
    x = file.stat()
    return x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns
