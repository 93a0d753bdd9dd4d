"""What is measured: one cell is one shape, dtype, mask and direction; a suite is a list of cells."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

Direction = Literal["forward", "backward", "decode"]
DTYPES = ("float32", "bfloat16", "float16", "float64")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def _keys_up_to(last: int, rows: int) -> int:
    """Keys that some consecutive rows see if the last of them sees `last`, each before it one fewer, none below 0."""
    seen = min(rows, max(last, 0))  # rows that see anything
    return seen * last - seen * (seen - 1) // 2


@dataclass(frozen=True)
class Cell:
    """One measurement; decode is one query a sequence against a cache of `seqlen_kv` keys.

    - head_dim_v: None is head_dim.
    - window: a causal query sees itself and so many keys before it; None is all of them.
    - lengths: of the sequences of a ragged batch, which then has len(lengths) = batch and max(lengths) = seqlen_q.
    - device: where the tensors live, "cpu" or "cuda".
    """

    direction: Direction
    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    dtype: str
    causal: bool
    head_dim_v: int | None = None
    window: int | None = None
    lengths: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def mask(self) -> str:
        """Name of the mask as the tables print it."""
        if self.window is not None:
            return f"window={self.window}"
        return "causal" if self.causal else "full"

    @property
    def dim_v(self) -> int:
        """Size of a head of V and of the output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def dims(self) -> str:
        """Size of a head as the tables print it: `128`, or `192/128` where V's differs."""
        return f"{self.head_dim}" if self.dim_v == self.head_dim else f"{self.head_dim}/{self.dim_v}"

    @property
    def name(self) -> str:
        """Short name of the cell, unique within a suite."""
        kv = "" if self.num_heads_q == self.num_heads_kv else f"/{self.num_heads_kv}"
        seqlen = f"{min(self.lengths)}..{max(self.lengths)} ragged" if self.lengths else f"{self.seqlen_kv}"
        sizes = f"N={seqlen} D={self.dims} B={self.batch} H={self.num_heads_q}{kv}"
        return f"{self.direction} {self.dtype} {self.mask} {sizes}"

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(queries, keys) of every sequence."""
        return [(n, n) for n in self.lengths] or [(self.seqlen_q, self.seqlen_kv)] * self.batch

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head of all sequences; causal is aligned bottom-right."""
        return sum(self._pairs(seqlen_q, seqlen_kv) for seqlen_q, seqlen_kv in self.sequences)

    def _pairs(self, seqlen_q: int, seqlen_kv: int) -> int:
        if not self.causal:
            return seqlen_q * seqlen_kv
        beyond = 0 if self.window is None else _keys_up_to(seqlen_kv - self.window - 1, seqlen_q)
        return _keys_up_to(seqlen_kv, seqlen_q) - beyond

    @property
    def flops(self) -> int:
        """Floating-point operations: two products a pair forward, by convention 2.5 times that in the backward."""
        forward = 2 * self.num_heads_q * self.pairs * (self.head_dim + self.dim_v)
        return forward * 5 // 2 if self.direction == "backward" else forward

    @property
    def bytes_read(self) -> int:
        """Bytes of K and V, which a decode step reads once each."""
        return self.batch * self.num_heads_kv * self.seqlen_kv * (self.head_dim + self.dim_v) * DTYPE_BYTES[self.dtype]

    def to_json(self) -> dict[str, object]:
        """Return the fields and the name as plain values."""
        return {"name": self.name, **vars(self)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Cell:
        """Rebuild a cell from what `to_json` returned."""
        given: dict[str, Any] = {field.name: values[field.name] for field in fields(Cell) if field.name in values}
        given["lengths"] = tuple(given.get("lengths", ()))
        return Cell(**given)


def square(direction: Direction, batch: int, heads: int, seqlen: int, head_dim: int, dtype: str, causal: bool) -> Cell:
    """Return a cell of self-attention: as many keys as queries, as many kv heads as query heads."""
    return Cell(direction, batch, heads, heads, seqlen, seqlen, head_dim, dtype, causal)


def grid(
    shapes: list[tuple[int, int, int]], head_dims: list[int], dtypes: list[str], directions: list[Direction]
) -> list[Cell]:
    """Return the product of (batch, heads, seqlen), head_dim, dtype and direction, full and causal."""
    return [
        square(direction, batch, heads, seqlen, head_dim, dtype, causal)
        for direction in directions
        for dtype in dtypes
        for head_dim in head_dims
        for causal in (False, True)
        for batch, heads, seqlen in shapes
    ]


def _cpu() -> list[Cell]:
    # batch * heads * seqlen is 16k throughout, so that no cell runs for minutes and every one fills the cores
    shapes = [(4, 8, 512), (2, 8, 1024), (1, 8, 2048), (1, 4, 4096), (1, 2, 8192)]
    return grid(shapes, [64, 128], ["float32", "bfloat16"], ["forward", "backward"])


def _decode() -> list[Cell]:
    return [
        Cell("decode", 1, heads, heads_kv, 1, seqlen, head_dim, dtype, True)
        for dtype in ("float32", "bfloat16")
        for heads, heads_kv, head_dim in ((32, 8, 128), (8, 8, 64))
        for seqlen in (4096, 16384, 65536)
    ]


def _quick() -> list[Cell]:
    return grid([(1, 2, 129), (1, 4, 512)], [64], ["float32", "bfloat16"], ["forward", "backward"])


def _memory() -> list[Cell]:
    shapes = [(1, 8, 2048), (1, 8, 8192), (1, 8, 16384)]
    return [
        square(direction, batch, heads, seqlen, 64, dtype, True)
        for direction in ("forward", "backward")
        for dtype in ("float32", "bfloat16")
        for batch, heads, seqlen in shapes
    ]


def _h200() -> list[Cell]:
    from kilat.bench.h200 import grid_cells

    return grid_cells()


def _h200_quick() -> list[Cell]:
    from kilat.bench.h200 import quick_cells

    return quick_cells()


def _h200_long() -> list[Cell]:
    from kilat.bench.h200 import long_cells

    return long_cells()


SUITES = {
    "quick": _quick,
    "cpu": _cpu,
    "cpu-decode": _decode,
    "cpu-memory": _memory,
    "h200": _h200,
    "h200-quick": _h200_quick,
    "h200-long": _h200_long,
}


def suite(name: str) -> list[Cell]:
    """Return the cells of a suite; raises ValueError for an unknown name."""
    if name not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}; got {name}")
    return SUITES[name]()


def parse_shape(text: str, dtypes: list[str], directions: list[Direction]) -> list[Cell]:
    """Turn `B,H,N,D` into cells, full and causal, for every dtype and direction.

    Raises ValueError unless the text is four positive integers.
    """
    parts = text.split(",")
    if len(parts) != 4 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"shape must be four positive integers B,H,N,D (batch, heads, seqlen, head_dim); got {text}")
    batch, heads, seqlen, head_dim = (int(part) for part in parts)
    return grid([(batch, heads, seqlen)], [head_dim], dtypes, directions)
