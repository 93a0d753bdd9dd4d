"""The environment variables that kilat reads; no other file reads one.

| variable | meaning |
| --- | --- |
| `KILAT_CACHE_DIR` | folder of compiled kernels; default `$XDG_CACHE_HOME/kilat`, else `~/.cache/kilat` |
| `KILAT_CONFIG_DIR` | folder of tuning tables; default `$XDG_CONFIG_HOME/kilat`, else `~/.config/kilat` |
| `KILAT_CPU_ISA` | instruction set of the CPU kernels, one of `CPU_ISAS`; default the best one that the machine has |
| `KILAT_CHECK_VALUES` | 1 checks lengths, offsets, page tables that live on a GPU, which stalls its stream; default 0 |
| `FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED`, `..._DIR` | flash-attn-4's own; a benchmark sets them where they are unset |
| `TRITON_INTERPRET` | Triton's own: 1 runs its kernels in an interpreter, on CPU tensors; default 0 |
| others of Triton's | where one is set that may change kernels, none is loaded without Triton (`triton_settings`) |
"""

from __future__ import annotations

import os
from pathlib import Path

CPU_ISAS = ("amx", "avx512_bf16", "avx512", "avx2", "generic")
"""Instruction sets that CPU kernels are written for, the fastest first."""

_OF_TRITON = (
    *("TRITON_", "MLIR_", "NVPTX_", "PTXAS_", "STORE_", "DISABLE_LLVM_", "DISABLE_MMA_", "DISABLE_PTXAS_", "LLVM_IR_"),
    *("LLVM_ENABLE_TIMING", "LLVM_EXTRACT_DI_", "LLVM_PASS_PLUGIN_PATH", "ALLOW_LHS_TMEM_", "USE_IR_LOC"),
)
"""Beginnings of the names that Triton 3.6 to 3.9 reads."""

_OF_NO_KERNEL = frozenset(
    f"TRITON_{name}"
    for name in (
        *("CACHE_DIR", "HOME", "DUMP_DIR", "OVERRIDE_DIR", "LIBCUDA_PATH", "CUDACRT_PATH", "CUDART_PATH"),
        *("CUPTI_LIB_PATH", "CUPTI_LIB_BLACKWELL_PATH", "CUOBJDUMP_PATH", "NVDISASM_PATH", "PTXAS_BLACKWELL_PATH"),
        *("CACHE_AUTOTUNING", "PRINT_AUTOTUNING", "PROFILE_BUFFER_SIZE"),
    )
)
"""Of these, what says where files lie, or is about other things than a Hopper kernel."""


def cache_dir() -> Path:
    """Folder of compiled kernels; it need not exist."""
    if chosen := os.environ.get("KILAT_CACHE_DIR"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "kilat"
    return Path(os.path.expanduser("~")) / ".cache" / "kilat"


def config_dir() -> Path:
    """Folder of what the user's machine was tuned to; it need not exist."""
    if chosen := os.environ.get("KILAT_CONFIG_DIR"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CONFIG_HOME"):
        return Path(shared) / "kilat"
    return Path(os.path.expanduser("~")) / ".config" / "kilat"


def keep_flash_attn_4_kernels() -> None:
    """Have flash-attn-4, which reads this while it is imported, keep compiled kernels on disk; what is set wins."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_dir() / "flash-attn-4"))


def cpu_isa() -> str | None:
    """The instruction set asked for, or None for the best; raises ValueError for a name that is not in `CPU_ISAS`."""
    name = os.environ.get("KILAT_CPU_ISA", "").strip().lower()
    if not name:
        return None
    if name not in CPU_ISAS:
        raise ValueError(f"KILAT_CPU_ISA must be one of {', '.join(CPU_ISAS)} (unset it for the best); got {name!r}")
    return name


def check_values() -> bool:
    """Whether values inside GPU tensors are checked; raises ValueError for anything but 0 and 1."""
    text = os.environ.get("KILAT_CHECK_VALUES", "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"KILAT_CHECK_VALUES must be 0 or 1; got {text!r}")
    return text == "1"


def triton_interprets() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "yes", "y")


def triton_settings() -> dict[str, str]:
    """The environment variables through which Triton may compile other kernels, or keep them elsewhere."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_OF_TRITON)}
    return {name: value for name, value in found.items() if name not in _OF_NO_KERNEL}
