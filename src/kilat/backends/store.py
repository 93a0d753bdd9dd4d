"""Compiled kernels in kilat's cache folder: files with a length and a SHA-256, written by rename.

A reader sees a whole file or none; one that was damaged later reads as if it were not there, and is made anew. The
name of a file is the key of what is in it, so two processes that write the same file write the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kilat import config

CPU_SUFFIX = ".kilat-o"
GPU_SUFFIX = ".kilat-gpu"
"""Ends of the names of files that hold what was compiled for a CPU, and for a GPU."""

_FACTS = struct.Struct("<Q32s")  # length, SHA-256; they follow the magic


def read(path: Path, magic: bytes) -> bytes | None:
    """What `write` stored at path; None if there is nothing, or nothing that is whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(magic) + _FACTS.size
    if len(data) < start or not data.startswith(magic):
        return None
    length, checksum = _FACTS.unpack_from(data, len(magic))
    content = data[start:]
    whole = length == len(content) and checksum == hashlib.sha256(content).digest()
    return content if whole else None


def write(path: Path, magic: bytes, content: bytes) -> None:
    """Store content by rename, so that no reader sees half of it; without a writable folder it is not stored."""
    header = magic + _FACTS.pack(len(content), hashlib.sha256(content).digest())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header + content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def entries() -> Iterator[Path]:
    """The files of compiled kernels in the cache folder, in the order of their names."""
    folder = config.cache_dir()
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if path.suffix in (CPU_SUFFIX, GPU_SUFFIX))
