"""`kernel_files.shorten`: a made-up installation of Triton is hashed again when one of its files changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kilat.backends import kernel_files

FILES = ("runtime/cache.py", "compiler/a.py", "backends/nvidia/b.py", "language/c.py", "_C/libtriton.so")
OTHERS = ("backends/nvidia/include/cuda.h", "runtime/jit.py", "_C/other.so")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An installation."""
    for name in (*FILES, *OTHERS):
        path = tmp_path / "triton" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def process(root: Path, folder: Path | str | None = None) -> tuple[Callable[[], str], mock.Mock]:
    """`triton_key` of a new process, and what it would hash with: all files."""

    def hashed() -> str:
        return "".join((root / "triton" / name).read_text() for name in FILES)

    real = mock.Mock(side_effect=hashed, spec=[])
    knobs = SimpleNamespace(cache=SimpleNamespace(dir=str(root / "cache") if folder is None else folder))
    module: Any = SimpleNamespace(__file__=str(root / "triton" / "runtime" / "cache.py"), triton_key=real, knobs=knobs)
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


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file(root: Path, name: str) -> None:
    """Of the same size, and with the time of its last change put back."""
    process(root)[0]()
    file = root / "triton" / name
    before = file.stat()
    file.write_text(name.upper())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed, real = process(root)
    assert name.upper() in changed()
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


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"state": 1}', '{"key": "x"}', "\xff"])
def test_a_damaged_file(root: Path, text: str) -> None:
    key = process(root)[0]()
    file = root / "cache" / kernel_files.INSTALLATION
    file.write_bytes(text.encode("latin-1"))
    later, real = process(root)
    assert later() == key
    assert real.call_count == 1
    assert json.loads(file.read_text())["key"] == key


@pytest.mark.parametrize("folder", ["", "/dev/null/x"])
def test_no_folder_to_write_to(root: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    key, real = process(root, folder)
    assert key()
    assert real.call_count == 1
    assert not list(root.glob(f"{kernel_files.INSTALLATION}*"))


def test_a_triton_without_such_a_key() -> None:
    module = SimpleNamespace()
    kernel_files.shorten(module)
    assert vars(module) == {}
