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


def _archived() -> str | None:
    """Return the revision that `git archive` wrote into .git_archival.txt; None in a checkout, which has none there."""
    path = Path(__file__).resolve().parents[3] / ".git_archival.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    commit = text.removeprefix("node: ").strip()
    return commit if len(commit) == 40 else None


def revision() -> dict[str, object] | None:
    """Return the git revision of the sources and whether they differ from it; None outside a repository or archive."""
    archived = _archived()
    if archived is not None:
        return {"commit": archived, "dirty": False}
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "../")
    return {"commit": commit, "dirty": bool(changed)}


def without_folder(word: str) -> str:
    """An absolute path as its last part alone: where a machine keeps its files is nobody's business."""
    return Path(word).name if word.startswith("/") else word


def _program() -> list[str]:
    """How the running program is called: `kilat`, or a script of this repository by its path in it."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or script.parent.name not in ("examples", "scripts", "benchmarks"):
        return ["kilat"]
    return ["python", f"{script.parent.name}/{script.name}"]


def provenance() -> dict[str, object]:
    """Return command, date, versions, device and revision: everything that a result needs beside its numbers."""
    return {
        "command": " ".join([*_program(), *map(without_folder, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "device": device(),
        "git": revision(),
    }


def gpu_versions() -> dict[str, str]:
    """Return `versions` and those of what computes on a GPU, peers included."""
    found = versions()
    for name, package in (("triton", "triton"), ("flash-attn-4", "flash-attn-4")):
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["cuda"] = str(torch.version.cuda)
    found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def gpu() -> dict[str, object]:
    """Return the current GPU's model, architecture, multiprocessors, memory, driver and power limit."""
    if not torch.cuda.is_available():
        return {"kind": "gpu", "model": "none"}
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "kind": "gpu",
        "model": found.name,
        "architecture": f"sm_{found.major}{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        **_driver(),
    }


def nvidia_smi(fields: tuple[str, ...]) -> dict[str, str]:
    """Return what nvidia-smi prints for some fields of the first GPU; nothing where it cannot be asked."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    line = done.stdout.strip().splitlines()[:1] if done.returncode == 0 else []
    words = [word.strip() for word in line[0].split(",")] if line else []
    return dict(zip(fields, words, strict=True)) if len(words) == len(fields) else {}


def _driver() -> dict[str, object]:
    """Driver version, power limit and highest clock."""
    found = nvidia_smi(("driver_version", "power.limit", "clocks.max.sm"))
    if not found:
        return {}
    return {
        "driver": found["driver_version"],
        "power_limit": f"{found['power.limit']} W",
        "clock_limit": f"{found['clocks.max.sm']} MHz",
    }
