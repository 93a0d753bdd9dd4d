"""scripts/peers.py: what it packs unpacks to the same files, and an archive that is there is not made again."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with a download that makes a wheel of two files."""
    if shutil.which("xz") is None:
        pytest.skip("needs xz")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("peers")
    monkeypatch.setattr(module, "XZ", ("xz", "-0", "--stdout"))

    def download(requirements: tuple[str, ...], folder: Path) -> None:
        for n, name in enumerate(requirements):
            with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
                wheel.writestr(f"package{n}/module.py", f"NAME = {name!r}\n")

    monkeypatch.setattr(module, "download", download)
    return module


def test_the_printed_lines_unpack_what_was_packed(peers: Any, tmp_path: Path) -> None:
    folder = tmp_path / "peers"
    peers.prepare(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {path.name for path in before} == set(peers.ARCHIVES)
    peers.prepare(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    script = peers.lines(str(folder)).replace("/tmp/peers-site", str(tmp_path / "site"))
    env = "; echo $FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED $FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    done = subprocess.run(["bash", "-c", script + env], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "/tmp/peers-kernels"]
    text = (tmp_path / "site" / "package0" / "module.py").read_text()
    assert "nvidia-cutlass-dsl-libs-cu13" in text


def test_a_wheel_that_wants_more_than_unpacking_is_refused(peers: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        written.writestr("a-1.data/scripts/run", "")
    with pytest.raises(ValueError, match=r"must be installed by unpacking alone; it has a \.data folder"):
        peers.pack([wheel], tmp_path / "a.tar.xz")
    assert list(tmp_path.iterdir()) == [wheel]
