"""`kernel_files.shorten`: a made-up installation of Triton is hashed again when one of its files changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kilat.backends import kernel_files, store

FILES = ("runtime/cache.py", "compiler/a.py", "backends/nvidia/b.py", "language/c.py", "_C/libtriton.so")
NOT_IN_THE_KEY = ("runtime/jit.py", "experimental/gluon/_runtime.py", "knobs.py", "backends/nvidia/bin/ptxas")
OTHERS = ("backends/nvidia/include/cuda.h", "_C/other.so", "backends/nvidia/bin/nvdisasm")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation."""
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_files, "_imported", {})
    for name in (*FILES, *NOT_IN_THE_KEY, *OTHERS):
        path = tmp_path / "triton" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def process(root: Path) -> tuple[Callable[[], str], mock.Mock]:
    """`triton_key` of a new process, and what it would hash with: the files that Triton hashes."""

    def hashed() -> str:
        return "".join((root / "triton" / name).read_text() for name in FILES)

    real = mock.Mock(side_effect=hashed, spec=[])
    module: Any = SimpleNamespace(__file__=str(root / "triton" / "runtime" / "cache.py"), triton_key=real)
    kernel_files.shorten(module)
    once = module.triton_key
    kernel_files.shorten(module)  # both backends do
    assert module.triton_key is once
    return module.triton_key, real


def test_found_in_the_file(root: Path) -> None:
    first, real = process(root)
    key = first()
    assert first() == key
    assert real.call_count == 1
    for _ in range(2):
        later, real = process(root)
        assert later() == key
        assert real.call_count == 0


@pytest.mark.parametrize("name", [*FILES, *NOT_IN_THE_KEY])
def test_a_changed_file(root: Path, name: str) -> None:
    """Of the same size, and with the time of its last change put back."""
    process(root)[0]()
    file = root / "triton" / name
    before = file.stat()
    file.write_text(name.upper())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed, real = process(root)
    assert (name.upper() in changed()) == (name in FILES)
    assert real.call_count == 1
    assert process(root)[0]() == changed()


def test_a_new_file(root: Path) -> None:
    process(root)[0]()
    (root / "triton" / "compiler" / "new.py").touch()
    changed, real = process(root)
    changed()
    assert real.call_count == 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_do_not_matter(root: Path, name: str) -> None:
    process(root)[0]()
    (root / "triton" / name).write_text("changed")
    changed, real = process(root)
    changed()
    assert real.call_count == 0


def entry() -> Path:
    """What was kept."""
    (path,) = store.entries()
    return path


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "flipped"])
def test_a_damaged_file(root: Path, damage: str) -> None:
    key = process(root)[0]()
    good = entry().read_bytes()
    flipped = good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]
    entry().write_bytes({"empty": b"", "text": b'{"key": "x"}', "truncated": good[:-1], "flipped": flipped}[damage])
    later, real = process(root)
    assert later() == key
    assert real.call_count == 1
    assert entry().read_bytes() == good


def test_no_folder_to_write_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILAT_CACHE_DIR", "/dev/null/x")
    key, real = process(root)
    assert key()
    assert real.call_count == 1


def test_each_triton_has_its_file(root: Path, tmp_path: Path) -> None:
    """Two environments that are used by turns are not hashed by turns."""
    (tmp_path / "other").mkdir()
    shutil.copytree(root / "triton", tmp_path / "other" / "triton")
    for place, calls in ((root, 1), (tmp_path / "other", 1), (root, 0), (tmp_path / "other", 0)):
        key, real = process(place)
        key()
        assert real.call_count == calls


def test_digest(root: Path) -> None:
    """Kernels that are loaded without Triton depend on all of its Python and on its assembler, by their contents."""
    triton = root / "triton"
    assert kernel_files.installation(triton) is None
    process(root)[0]()
    first = kernel_files.imported()
    assert first is not None
    assert kernel_files.installation(triton) == first
    for name in (*FILES, *NOT_IN_THE_KEY):
        (triton / name).write_text("changed")
        assert kernel_files.installation(triton) is None
        process(root)[0]()
        changed = kernel_files.imported()
        assert changed is not None
        assert changed.digest != first.digest
        (triton / name).write_text(name)
        process(root)[0]()
        assert kernel_files.imported() == first


def test_a_triton_without_such_a_key() -> None:
    module = SimpleNamespace()
    kernel_files.shorten(module)
    assert vars(module) == {}
