"""Documents packed one behind the other in a sequence: each sees only itself."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from kilat.masks.core import Int32, IntervalMask, batch_entry
from kilat.masks.ops import lookup, maximum
from kilat.structure import as_numpy, int32_tensor, shape_of


@dataclass(frozen=True, eq=False)
class Documents(IntervalMask):
    """ids[q_pos] == ids[j] >= 0; ids int32 [seqlen_kv] or [batch, seqlen_kv].

    Equal ids must be contiguous within the length in use, else a call raises ValueError. A negative id neither sees
    nor is seen; nor does a query before the first key (q_pos < 0) see anything.
    """

    ids: Any
    tensor_fields: ClassVar[tuple[str, ...]] = ("ids",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", int32_tensor(self.ids, "ids", 1, 2))

    def check(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool = True) -> None:
        shape = shape_of(self.ids)
        length = shape[-1]
        if shape[:-1] not in ((), (1,), (batch,)) or length < seqlen_kv or (exact and length != seqlen_kv):
            raise ValueError(
                f"ids must be [seqlen_kv] or [batch, seqlen_kv]; got ids.shape={shape}, batch={batch}, "
                f"seqlen_kv={seqlen_kv}"
            )

    def depends_on_batch(self) -> bool:
        return not hasattr(self.ids, "shape") or (len(self.ids.shape) == 2 and self.ids.shape[0] != 1)

    @staticmethod
    def kv_start(q_pos: Any, i: Any, p: Any) -> Any:
        return lookup(p.start, maximum(q_pos, -1) + 1)

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return lookup(p.stop, maximum(q_pos, -1) + 1)

    def parameters(self, b: int, q_len: int, kv_len: int) -> Any:
        ids = as_numpy(self.ids)
        ids = batch_entry(ids, b) if ids.ndim == 2 else ids
        if len(ids) < kv_len:
            raise ValueError(f"ids must have an entry for every key; got {len(ids)} ids, kv_len={kv_len}")
        start, stop = document_tables(ids[:kv_len], b)
        return SimpleNamespace(start=start, stop=stop)


def document_tables(ids: Any, b: int = 0) -> tuple[Int32, Int32]:
    """First key and end of the document of each position, int32 [kv_len + 1]; entry n is position n - 1.

    Entry 0, for queries before the first key, and positions with a negative id hold an empty range. Raises ValueError
    if equal ids are not contiguous.
    """
    n = len(ids)
    first = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1)) if n else np.zeros(0, np.int64)
    runs = np.asarray(ids)[first]
    used = np.sort(runs[runs >= 0])
    again = used[1:][used[1:] == used[:-1]]
    if len(again):
        raise ValueError(f"ids must be contiguous: equal ids side by side; got id {again[0]} in several places, b={b}")
    length = np.diff(first, append=n)
    start = np.repeat(first, length)
    stop = np.where(np.repeat(runs, length) >= 0, np.repeat(first + length, length), start)
    tables = np.zeros((2, n + 1), np.int32)
    tables[0, 1:], tables[1, 1:] = start, stop
    return tables[0], tables[1]
