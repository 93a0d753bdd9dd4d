"""Masks: one file each; what follows from them is derived in `core.py` and `ranges.py`."""

from kilat.masks.causal import Causal
from kilat.masks.chunked import Chunked
from kilat.masks.core import And, IntervalMask, Mask, bounds, decompose, depends_on_batch
from kilat.masks.dense import Dense
from kilat.masks.documents import Documents
from kilat.masks.key_range import KeyRange
from kilat.masks.predicate import Predicate
from kilat.masks.prefix import Prefix
from kilat.masks.window import Window

__all__ = [
    "And",
    "Causal",
    "Chunked",
    "Dense",
    "Documents",
    "IntervalMask",
    "KeyRange",
    "Mask",
    "Predicate",
    "Prefix",
    "Window",
    "bounds",
    "decompose",
    "depends_on_batch",
]
