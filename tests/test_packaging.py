"""What `pip install` gives is the whole library, and the pins fit the floors."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[0-9][A-Za-z0-9.]*)")
OTHER_TRITONS = {age: ROOT / "requirements" / f"triton-{age}.txt" for age in ("oldest", "newest")}
FLOOR = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[a-z,]+\])?>=(?P<version>[0-9.]+)")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout stays clean, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return built


def _pins(name: str) -> dict[str, str]:
    """The pins of one requirements file, `-r` followed; a line of any other form fails."""
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            pins |= _pins(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            match = PIN.fullmatch(line)
            assert match, f"requirements/{name}: not a full pin: {line!r}"
            pins[match["name"].lower().replace("_", "-")] = match["version"]
    return pins


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_the_wheel_is_pure_python_and_complete(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = (path for path in (ROOT / "src" / "kilat").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert packed == {path.relative_to(ROOT / "src").as_posix() for path in sources}
    assert "kilat/py.typed" in packed


def test_the_wheel_carries_licence_version_and_command(wheel: Path) -> None:
    from kilat._version import __version__

    with zipfile.ZipFile(wheel) as archive:
        info = f"kilat-{__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
        assert "kilat = kilat.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata


def test_every_package_folder_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "src" / "kilat").rglob("*.py")}
    assert [folder.relative_to(ROOT).as_posix() for folder in folders if not (folder / "__init__.py").exists()] == []


def test_dependencies_state_floors_and_the_pins_reach_them(project: dict[str, Any]) -> None:
    pins = _pins("base.txt")
    for dependency in project["project"]["dependencies"]:
        match = FLOOR.fullmatch(dependency)
        assert match, f"only a floor may be stated, got {dependency!r}"
        assert _numbers(pins[match["name"]]) >= _numbers(match["version"])


def test_requirement_files_agree_on_every_pin() -> None:
    versions: dict[str, set[str]] = {}
    for path in sorted(set((ROOT / "requirements").glob("*.txt")) - set(OTHER_TRITONS.values())):
        for name, version in _pins(path.name).items():
            versions.setdefault(name, set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_the_other_tritons_are_the_floor_and_one_past_the_pin(project: dict[str, Any]) -> None:
    """They hold nothing else, since each goes into a folder in front of what is installed."""
    others = {age: _pins(path.name) for age, path in OTHER_TRITONS.items()}
    assert [list(pins) for pins in others.values()] == [["triton"], ["triton"]]
    floors = [x for x in project["project"]["optional-dependencies"]["test"] if x.startswith("triton>=")]
    floor = FLOOR.match(floors[0])
    assert floor
    oldest, newest = (_numbers(others[age]["triton"]) for age in ("oldest", "newest"))
    assert oldest[:2] == _numbers(floor["version"])
    assert oldest < _numbers(_pins("test.txt")["triton"]) < newest
