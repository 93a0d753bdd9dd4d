"""What a result was measured on and with: versions, processor, threads, time and source revision."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import kilat

# Features that decide which kernels run, here and in torch.
NOTED_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"),
    *("asimd", "bf16"),
)


def versions() -> dict[str, str]:
    """Return the versions of Python, kilat and what it computes with; "not installed" where a package is missing."""
    found = {"python": platform.python_version(), "kilat": kilat.__version__}
    for package in ("torch", "numpy", "llvmlite"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _cpuinfo(field: str) -> str | None:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return None


def device() -> dict[str, object]:
    """Return the processor's model, its features that matter, cores, torch's threads, memory and load."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "kind": "cpu",
        "model": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "features": [name for name in NOTED_FEATURES if name in flags],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": None if load is None else round(load[0], 2),
    }


def _git(*arguments: str) -> str | None:
    """Return what git prints in the folder of the package, or None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def revision() -> dict[str, object] | None:
    """Return the git revision of the sources and whether they differ from it; None outside a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "../")
    return {"commit": commit, "dirty": bool(changed)}


def _program() -> list[str]:
    """How the running program is called: `kilat`, or a script of this repository by its path in it."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or script.parent.name not in ("examples", "scripts", "benchmarks"):
        return ["kilat"]
    return ["python", f"{script.parent.name}/{script.name}"]


def provenance() -> dict[str, object]:
    """Return command, date, versions, device and revision: everything that a result needs beside its numbers."""
    return {
        "command": " ".join([*_program(), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "device": device(),
        "git": revision(),
    }
