"""Exact attention for PyTorch and NumPy: any mask, any score, any cache, compiled at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kilat._version import __version__
from kilat.api import attention, cached_attention, ragged_attention
from kilat.dispatch import Report, UnsupportedError
from kilat.dropout import Dropout
from kilat.explaining import explain
from kilat.kv import ContiguousCache, PagedCache, Rotary
from kilat.masks import Causal, Chunked, Dense, Documents, KeyRange, Predicate, Prefix, Window
from kilat.merging import merge
from kilat.scores import Alibi, Bias, Score, Softcap

if TYPE_CHECKING:
    from kilat.checks import check

__all__ = [
    "Alibi",
    "Bias",
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
    "ragged_attention",
]


def __getattr__(name: str) -> Any:
    # The checks bring many cases and an oracle: they are imported when they are asked for.
    if name == "check":
        from kilat.checks import check

        return check
    raise AttributeError(f"module 'kilat' has no attribute {name!r}")
