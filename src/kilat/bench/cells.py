"""What is measured: one cell is one shape, dtype, mask and direction; a suite is a list of cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward", "decode"]
DTYPES = ("float32", "bfloat16", "float16", "float64")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Cell:
    """One measurement; decode is one query a sequence against a cache of `seqlen_kv` keys."""

    direction: Direction
    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    dtype: str
    causal: bool

    @property
    def mask(self) -> str:
        """Name of the mask as the tables print it."""
        return "causal" if self.causal else "full"

    @property
    def name(self) -> str:
        """Short name of the cell, unique within a suite."""
        kv = "" if self.num_heads_q == self.num_heads_kv else f"/{self.num_heads_kv}"
        sizes = f"N={self.seqlen_kv} D={self.head_dim} B={self.batch} H={self.num_heads_q}{kv}"
        return f"{self.direction} {self.dtype} {self.mask} {sizes}"

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head of one sequence; causal is aligned bottom-right."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_kv
        first = self.seqlen_kv - self.seqlen_q + 1  # keys that the first query sees
        hidden = max(0, 1 - first)  # leading rows that see nothing
        rows = self.seqlen_q - hidden
        return rows * (max(first, 1) + self.seqlen_kv) // 2

    @property
    def flops(self) -> int:
        """Floating-point operations: two products of 2 * head_dim a pair forward, five in the backward."""
        forward = 4 * self.batch * self.num_heads_q * self.pairs * self.head_dim
        return forward * 5 // 2 if self.direction == "backward" else forward

    @property
    def bytes_read(self) -> int:
        """Bytes of K and V, which a decode step reads once each."""
        return 2 * self.batch * self.num_heads_kv * self.seqlen_kv * self.head_dim * DTYPE_BYTES[self.dtype]

    def to_json(self) -> dict[str, object]:
        """Return the fields and the name as plain values."""
        return {"name": self.name, **vars(self)}


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


SUITES = {"quick": _quick, "cpu": _cpu, "cpu-decode": _decode, "cpu-memory": _memory}


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
