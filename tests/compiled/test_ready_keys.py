"""What a kernel that is kept on disk is found by: nothing else than what was compiled is ever found."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from kilat import config
from kilat.backends import common, kernel_files, store
from kilat.backends.common import Kernel
from kilat.backends.gluon import _compat, ready
from kilat.backends.gluon.ready import Code, Parameter, Wanted

TRITON = kernel_files.Installation("key", "digest")
ROLES = "tttnntcc"
ARGUMENTS = (
    ("box", "torch.float16", 1, 64, 1, 64, True),
    ("address", "torch.float32", True),
    48,
    7,
    0.5,
    None,
    64,
    False,
)
WANTED = Wanted("kilat.backends.gluon.forward:forward_kernel", 0, {"num_warps": 4, "maxnreg": 168}, ARGUMENTS)
PARAMETERS = (Parameter(0, tiling=(10, 2, 3, (1, 64, 1, 64))), Parameter(1), Parameter(2, "<i"), Parameter(4, "<f"))
CODE = Code("forward_kernel", 384, 1000, PARAMETERS, b"\177ELF\0machine code")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, in a process that has not imported Triton and finds the same one as always."""
    for name in config.triton_settings():
        monkeypatch.delenv(name)
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr(kernel_files, "imported", lambda: TRITON)
    monkeypatch.setattr(ready, "_on_disk", lambda: TRITON)
    monkeypatch.setattr(ready, "_architecture", lambda device: "9.0")
    monkeypatch.setattr(common, "load", lambda cubin, *rest: Kernel(rest[0], len(cubin), *rest[1:]))
    new_process()
    yield tmp_path
    new_process()


def new_process() -> None:
    """Forget what was read."""
    ready._loaded.clear()
    ready._known_roles.cache_clear()


def found(wanted: Wanted = WANTED) -> Any:
    """What a new process finds."""
    new_process()
    return ready.find(wanted)


def test_kept_and_found() -> None:
    assert found() is None
    assert not ready.are_there(WANTED.kernel)
    ready.keep(WANTED, ROLES, CODE)
    assert found() == (Kernel("forward_kernel", len(CODE.cubin), 384, 1000, 0), PARAMETERS)
    assert ready.are_there(WANTED.kernel)
    assert ready.find(WANTED) is ready.find(WANTED)


def with_argument(n: int, value: Any) -> Wanted:
    """WANTED with another argument."""
    return WANTED._replace(arguments=(*ARGUMENTS[:n], value, *ARGUMENTS[n + 1 :]))


SAME = {
    "another multiple of 16": with_argument(2, 32),
    "a number by its type": with_argument(3, 1),
    "the largest of its type": with_argument(3, 2**31 - 1),
    "a float": with_argument(4, 1.0),
    "options in another order": WANTED._replace(options={"maxnreg": 168, "num_warps": 4}),
}
OTHERS = {
    "kernel": WANTED._replace(kernel="kilat.backends.gluon.forward:other_kernel"),
    "option": WANTED._replace(options={"num_warps": 8, "maxnreg": 168}),
    "one option more": WANTED._replace(options={**WANTED.options, "num_ctas": 1}),
    "no option": WANTED._replace(options={**WANTED.options, "maxnreg": None}),
    "box type": with_argument(0, ("box", "torch.bfloat16", 1, 64, 1, 64, True)),
    "box shape": with_argument(0, ("box", "torch.float16", 1, 128, 1, 64, True)),
    "box layout": with_argument(0, ("box", "torch.float16", 1, 64, 1, 64, False)),
    "no box": with_argument(0, None),
    "pointer type": with_argument(1, ("address", "torch.float16", True)),
    "pointer alignment": with_argument(1, ("address", "torch.float32", False)),
    "no multiple of 16": with_argument(2, 47),
    "one": with_argument(2, 1),
    "wider number": with_argument(3, 2**31),
    "widest number": with_argument(3, 2**63),
    "number for a float": with_argument(4, 1),
    "number for none": with_argument(5, 0),
    "constant": with_argument(6, 128),
    "truth": with_argument(7, True),
    "number for truth": with_argument(7, 0),
    "one argument less": WANTED._replace(arguments=ARGUMENTS[:-1]),
}


@pytest.mark.parametrize("name", SAME)
def test_same_kernel(name: str) -> None:
    ready.keep(WANTED, ROLES, CODE)
    assert found(SAME[name]) is not None


@pytest.mark.parametrize("name", OTHERS)
def test_other_kernel(name: str) -> None:
    ready.keep(WANTED, ROLES, CODE)
    assert found(OTHERS[name]) is None


PAIRS = {
    "one and two": (with_argument(2, 2), with_argument(2, 1)),
    "wide and wider": (with_argument(3, 2**31), with_argument(3, 2**63)),
    "constant floats": (with_argument(6, 0.5), with_argument(6, 0.25)),
    "modules": (WANTED, WANTED._replace(kernel="kilat.backends.gluon.other:forward_kernel")),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_kernels(name: str) -> None:
    """Each finds its own."""
    for number, wanted in enumerate(PAIRS[name]):
        ready.keep(wanted, ROLES, CODE._replace(shared=number))
    assert [found(wanted)[0].shared for wanted in PAIRS[name]] == [0, 1]


@pytest.mark.parametrize("what", ["architecture", "triton", "sources", "version", "python", "assembler"])
def test_other_world(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready.keep(WANTED, ROLES, CODE)
    assert found() is not None
    assembler = tmp_path / "ptxas"
    assembler.write_text("1")
    changes: dict[str, tuple[Any, str, Any]] = {
        "architecture": (ready, "_architecture", lambda device: "10.0"),
        "triton": (ready, "_on_disk", lambda: TRITON._replace(digest="other")),
        "sources": (ready, "_SOURCES", "other"),
        "version": (ready, "__version__", "other"),
        "python": (ready.sys, "version_info", (3, 99)),
    }
    if what == "assembler":
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler))
        assert found() is None
        ready.keep(WANTED, ROLES, CODE)
        assert found() is not None
        assembler.write_text("22")
        assert found() is None
        assembler.unlink()
    else:
        monkeypatch.setattr(*changes[what])
    assert found() is None


SETTINGS = ("TRITON_ALWAYS_COMPILE", "TRITON_DEBUG", "TRITON_CACHE_MANAGER", "DISABLE_PTXAS_OPT", "MLIR_ENABLE_DUMP")


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_triton(setting: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is in the environment nothing is found, and nothing is kept."""
    ready.keep(WANTED, ROLES, CODE)
    monkeypatch.setenv(setting, "1")
    assert found() is None
    for path in store.entries():
        path.unlink()
    ready.keep(WANTED, ROLES, CODE)
    assert list(store.entries()) == []


def test_settings_that_change_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ready.keep(WANTED, ROLES, CODE)
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_LIBCUDA_PATH"):
        monkeypatch.setenv(name, "x")
    assert found() is not None


def test_a_process_with_triton_asks_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    ready.keep(WANTED, ROLES, CODE)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())  # type: ignore[arg-type]
    assert found() is None


def test_sources_edited_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled is then neither what this process read first nor what lies there now: it is not kept."""
    copy = tmp_path / "gluon"
    shutil.copytree(Path(ready.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(ready, "__file__", str(copy / "ready.py"))
    assert ready._digest_of_sources() == ready._SOURCES
    for path in sorted(copy.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("Triton", "triton", 1) if "Triton" in text else text + "#", encoding="utf-8")
        assert ready._digest_of_sources() != ready._SOURCES
        ready.keep(WANTED, ROLES, CODE)
        assert found() is None
        path.write_text(text, encoding="utf-8")
    ready.keep(WANTED, ROLES, CODE)
    assert found() is not None


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "gone"])
def test_damaged_files(damage: str, which: int) -> None:
    """Code, or what its parameters are: not found, and made anew."""
    ready.keep(WANTED, ROLES, CODE)
    paths = sorted(store.entries(), key=lambda path: path.stat().st_size)
    assert len(paths) == 2
    data = paths[which].read_bytes()
    changed = {"flipped": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "truncated": data[:-1], "empty": b""}
    if damage == "gone":
        paths[which].unlink()
    else:
        paths[which].write_bytes(changed[damage])
    assert found() is None
    ready.keep(WANTED, ROLES, CODE)
    assert paths[which].read_bytes() == data
    assert found() is not None


def test_a_gpu_that_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("the CUDA driver must be able to load forward_kernel; got FAKE (200)")

    ready.keep(WANTED, ROLES, CODE)
    monkeypatch.setattr(common, "load", refuse)
    assert found() is None


def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILAT_CACHE_DIR", "/proc/nowhere")
    ready.keep(WANTED, ROLES, CODE)
    assert found() is None


@pytest.mark.parametrize("group", ["compilation", "runtime", "language", "nvidia"])
def test_settings_made_in_the_program(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process compiles that has changed Triton's settings is not kept."""
    kept: list[Any] = []
    monkeypatch.setattr(ready, "keep", lambda *given: kept.append(given))
    compiled = SimpleNamespace(metadata=SimpleNamespace(name="f", num_warps=4, shared=0), kernel=b"")
    _compat.keep(WANTED, compiled, ())
    assert len(kept) == 1
    knobs = getattr(_compat.knobs, group)
    with knobs.scope():
        vars(knobs)["anything"] = "x"
        _compat.keep(WANTED, compiled, ())
    assert len(kept) == 1
    _compat.keep(WANTED, compiled, ())
    assert len(kept) == 2
    assert set(kept[0][1]) == {ready.CONSTANT, ready.NUMBER, ready.TOLD_APART}


# ---- what the digest of sources covers -------------------------------------------------------------------------------
def modules_of_kernels() -> dict[Path, ast.Module]:
    """The modules of this package that import Triton."""
    parsed = {path: ast.parse(path.read_text(encoding="utf-8")) for path in Path(ready.__file__).parent.glob("*.py")}
    return {
        path: tree
        for path, tree in parsed.items()
        if any((x.module or "").startswith("triton") for x in tree.body if isinstance(x, ast.ImportFrom))
        or any(x.names[0].name.startswith("triton") for x in tree.body if isinstance(x, ast.Import))
    }


def test_kernels_are_made_of_this_package() -> None:
    """The digest covers its sources alone: kernels take nothing else of kilat's, and numbers as they are written."""
    heuristics = ast.parse((Path(ready.__file__).parent / "heuristics.py").read_text(encoding="utf-8"))
    written = {
        target.id
        for x in heuristics.body
        if isinstance(x, ast.Assign) and isinstance(x.value, ast.Constant)
        for target in x.targets
        if isinstance(target, ast.Name)
    }
    modules = modules_of_kernels()
    assert len(modules) > 10
    for path, tree in modules.items():
        if path.name == "_compat.py":  # gives kernels functions of Triton's
            continue
        for x in ast.walk(tree):
            if isinstance(x, ast.ImportFrom) and (x.module or "").startswith("kilat"):
                assert x.module is not None
                assert x.module.startswith("kilat.backends.gluon"), (path.name, x.module)
            if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == "heuristics":
                assert x.attr in written, (path.name, x.attr)
