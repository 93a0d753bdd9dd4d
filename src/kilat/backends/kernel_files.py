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
from typing import Any

DIGEST = "kilat.sha256"
READ = (".json", ".ptx", ".cubin", ".hsaco")
"""Ends of the names of files that a launch depends on."""

INSTALLATION = "kilat-installation.json"
"""What `shorten` keeps in Triton's cache folder."""

_HASHED = ("compiler", "backends", "language", "_C")
"""Folders of Triton whose files stand in its keys."""

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


def shorten(cache: Any) -> None:
    """Let `triton_key` of Triton's module `cache` find its value in a file, instead of hashing its installation.

    That takes 0.3 s in each process, for libtriton.so alone has hundreds of megabytes. The value is the same: it is
    taken from the file while inode, size, mtime and ctime of everything that Triton hashes are what they were; a file
    that is written to gets another ctime.
    """
    real = getattr(cache, "triton_key", None)
    if real is None or hasattr(real, "shortened"):
        return

    @functools.lru_cache(maxsize=1)
    def triton_key() -> str:
        if not cache.knobs.cache.dir:
            return real()
        state, file = _state(Path(cache.__file__).parents[1]), Path(cache.knobs.cache.dir) / INSTALLATION
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(file.read_text(encoding="utf-8"))
            if known["state"] == state:
                return str(known["key"])
        key = real()
        with contextlib.suppress(OSError):  # a folder that cannot be written to: hashed again in the next process
            file.parent.mkdir(parents=True, exist_ok=True)
            own = file.with_name(f"{INSTALLATION}.{os.getpid()}")
            own.write_text(json.dumps({"state": state, "key": key}), encoding="utf-8")
            own.replace(file)
        return key

    setattr(triton_key, "shortened", True)  # noqa: B010 (pyright: functions have no such attribute)
    cache.triton_key = triton_key


def _state(root: Path) -> str:
    """A digest of what the file system says about Triton's files."""
    files = [root / "runtime" / "cache.py"]
    for folder in _HASHED:
        files += [x for x in sorted((root / folder).rglob("*")) if x.suffix == ".py" or x.name.startswith("libtriton")]
    facts = [(str(file), *_facts(file.stat())) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _facts(x: os.stat_result) -> tuple[int, ...]:
    return x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns
