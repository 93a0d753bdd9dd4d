"""What kernels are handed: named tuples of pointers and numbers, and the `Spec` that they are compiled for.

Kernels read the fields by name. A field that is None costs nothing: the code that asks for it is not compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

Jitted = Callable[..., Any]
"""A function made by `triton.jit`."""


OPAQUE = 1 << 40
"""What `adapt.opaque` adds to a number before it shifts it."""


class Rows(NamedTuple):
    """A tensor of rows: x[b, n, h, :] starts at ptr + b * batch + n * row + h * head; ragged ones have batch = 0."""

    ptr: Any
    batch: Any
    row: Any
    head: Any


class Pairs(NamedTuple):
    """A tensor [batch, heads, seqlen_q, seqlen_kv]: its strides, 0 along axes of length 1, and limits of i and j."""

    ptr: Any
    batch: Any
    head: Any
    i: Any
    j: Any
    limit_i: Any
    limit_j: Any


class Table(NamedTuple):
    """A tensor that a user's function indexes; bools are bytes."""

    ptr: Any
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]


class Sequences(NamedTuple):
    """Where sequences lie; numbers are `opaque`, but for the group: a kernel without a loop over it spills less."""

    cu_q: Any  # int32 [batch + 1] or None
    cu_kv: Any
    len_q: Any  # int32 [batch] or None
    len_kv: Any
    page_table: Any  # int32 [batch, pages] or None
    page_table_batch: Any
    page_size: Any
    num_pages: Any
    batch: Any
    heads_q: Any
    group: Any  # query heads per kv head
    seqlen_q: Any  # rows of the tensor: dense of a batch entry, ragged of all sequences
    seqlen_kv: Any


class Numbers(NamedTuple):
    """Run-time numbers; integers are `opaque`."""

    scale: Any
    softcap: Any
    left: Any  # see `kilat.masks.affine.Affine`
    right: Any
    right_top_left: Any
    threshold: Any  # dropout: a random word is kept from here on; the bits of an uint32
    keep_scale: Any  # 1 / (1 - p)
    seed_low: Any  # words of seed and offset where they are no tensors; the bits of uint32s
    seed_high: Any
    offset_low: Any
    offset_high: Any
    unit: Any  # a score in the forward's units times this is s
    sign: Any  # of scale


class Mask(NamedTuple):
    """Tensors of the mask. `bounds` is int32 [batch or 1, intervals, 2, rows], `rows` as in the tensor q."""

    bounds: Any  # or None: the mask is affine
    bounds_batch: Any
    bounds_rows: Any
    dense: tuple[Pairs, ...]
    predicates: tuple[tuple[Table, ...], ...]


class Scores(NamedTuple):
    """Tensors of the score modifiers."""

    slopes: Any  # or None
    slopes_batch: Any
    bias: Any  # Pairs or None
    users: tuple[tuple[Table, ...], ...]


class Dropout(NamedTuple):
    """Tensors of dropout."""

    keep: Any  # Pairs or None
    seed: Any  # int64 [] or None: the number's words are used
    offset: Any


class Quantised(NamedTuple):
    """Scales of stored keys and values: number x at a token and head stands for x times its scale."""

    k: Rows | None  # float32; strides of batch and row are 0 where a head has one scale
    v: Rows | None


class Split(NamedTuple):
    """How the decode kernel cuts the keys of a tile of rows into parts; `opaque` numbers."""

    programs: Any  # no more parts than give each kv head's share of so many programs, beside one a tile
    least: Any  # blocks of keys in a part, if there are so many
    most: Any  # parts of a tile


class Parts(NamedTuple):
    """Results of parts of keys, by slot: slot n of kv head h is number n * heads_kv + h."""

    out: Any  # float32 [slots, rows, columns], or None: nothing is split
    lse: Any  # float32 [slots, rows]
    table: Any  # int32 [batch + 1, 2]: a sequence's first slot n, and the parts of each of its tiles
    slots: Any  # `opaque`, as the next
    rows: Any  # of a tile that are of use


@dataclass(frozen=True)
class Spec:
    """What a kernel is compiled for, beside the types of its arguments and its tile sizes.

    `pieces` are the powers of two that head_dim is cut into: the last may reach beyond it, and is filled with zeros.
    """

    head_dim: int
    head_dim_v: int
    pieces: tuple[int, ...]
    pieces_v: tuple[int, ...]
    precision: Literal["ieee", "tf32"]
    scaling: Literal["q", "s", "p"]  # what the forward multiplies by scale: q, s, or the argument of exp
    flip: bool  # scale <= 0: where exp's argument is scaled, q is multiplied by the sign
    bounded: bool  # pairs of indices may lie beyond the limits of Pairs
    wide: bool  # a tile of rows may span 2^31 elements
    intervals: int  # of mask.bounds; 0: affine
    left: bool  # which bounds an affine mask has
    right: bool
    right_top_left: bool
    num_dense: int
    softcap: bool
    dropout: Literal["", "philox", "keep"]
    names: tuple[str, ...]  # of the functions below: they stand for them in comparisons
    predicates: tuple[Jitted, ...] = field(compare=False)
    users: tuple[Jitted, ...] = field(compare=False)  # score functions, in order of application
    d_users: tuple[Jitted, ...] = field(compare=False)  # their derivatives by s

    @property
    def by_entry(self) -> bool:
        """Whether visibility follows from more than intervals."""
        return self.num_dense > 0 or len(self.predicates) > 0

    @property
    def from_left(self) -> bool:
        """Whether rows may see nothing of the first keys."""
        return self.left or self.intervals > 0

    @property
    def from_right(self) -> bool:
        """Whether rows may see nothing of the last keys."""
        return self.right or self.right_top_left or self.intervals > 0

    @cached_property
    def digest(self) -> str:
        """A short text that differs where the compared fields do."""
        text = repr([(f.name, getattr(self, f.name)) for f in fields(self) if f.compare])
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def __repr__(self) -> str:  # part of Triton's cache keys
        return f"Spec_{self.digest}"


@dataclass(frozen=True)
class Form:
    """What a decode kernel is compiled for beside the `Spec`: how it takes keys, and how they are stored."""

    block_kv: int
    page: int  # keys of a page; 0: there are none, 1: a size that is not compiled in
    shared: bool  # v is a part of k
    stored: Literal["", "int8", "e4m3", "e4m3 bits"]  # "": in q's type; the last: the GPU does not know that type
    k_by_token: bool  # whether k's scales are those of tokens
    v_by_token: bool


class Arguments(NamedTuple):
    """All that a kernel is handed beside q, k, v and what it writes."""

    seqs: Sequences
    mask: Mask
    scores: Scores
    dropout: Dropout
    numbers: Numbers
    sink: Any  # [num_heads_q] or None
    spec: Spec
