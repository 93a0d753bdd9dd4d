"""Exact attention for PyTorch and NumPy: any mask, any score, any cache, compiled at first use."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from kilat._version import __version__

if TYPE_CHECKING:
    from kilat.api import attention, ragged_attention
    from kilat.cached import CachePlan, cached_attention, plan
    from kilat.checks import check
    from kilat.dispatch import Report, UnsupportedError
    from kilat.dropout import Dropout
    from kilat.explaining import explain
    from kilat.kv import ContiguousCache, PagedCache, RingCache, Rotary
    from kilat.masks import Causal, Chunked, Dense, Documents, KeyRange, Predicate, Prefix, Window
    from kilat.merging import merge
    from kilat.scores import Alibi, Bias, Score, Softcap

__all__ = [
    "Alibi",
    "Bias",
    "CachePlan",
    "Causal",
    "Chunked",
    "ContiguousCache",
    "Dense",
    "Documents",
    "Dropout",
    "KeyRange",
    "PagedCache",
    "Predicate",
    "Prefix",
    "Report",
    "RingCache",
    "Rotary",
    "Score",
    "Softcap",
    "UnsupportedError",
    "Window",
    "__version__",
    "attention",
    "cached_attention",
    "check",
    "explain",
    "merge",
    "plan",
    "ragged_attention",
]

# Names are imported when they are asked for: `kilat --help` answers without waiting seconds for torch.
_MODULES = {
    "kilat.api": ("attention", "ragged_attention"),
    "kilat.cached": ("CachePlan", "cached_attention", "plan"),
    "kilat.checks": ("check",),
    "kilat.dispatch": ("Report", "UnsupportedError"),
    "kilat.dropout": ("Dropout",),
    "kilat.explaining": ("explain",),
    "kilat.kv": ("ContiguousCache", "PagedCache", "RingCache", "Rotary"),
    "kilat.masks": ("Causal", "Chunked", "Dense", "Documents", "KeyRange", "Predicate", "Prefix", "Window"),
    "kilat.merging": ("merge",),
    "kilat.scores": ("Alibi", "Bias", "Score", "Softcap"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

if os.path.basename((sys.argv or [""])[0]) != "kilat":
    # Registers the operators, which a tracer must not do. Only the command line, which traces nothing, goes without.
    importlib.import_module("kilat.compiled")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value  # found without this function from now on
        return value
    raise AttributeError(f"module 'kilat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
