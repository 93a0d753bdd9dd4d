"""From a Problem and its Operands to what Triton kernels take: a `Spec` to compile for, pointers, strides, numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kilat.backends.triton import bounds, expressions
from kilat.backends.triton.arguments import (
    OPAQUE,
    Arguments,
    Dropout,
    Mask,
    Numbers,
    Pairs,
    Rows,
    Scores,
    Sequences,
    Spec,
    Table,
)
from kilat.masks.affine import Affine, affine
from kilat.masks.core import Parts, decompose, depends_on_batch
from kilat.scores import Alibi, Bias, Score, Softcap

if TYPE_CHECKING:
    from kilat.problem import Operands, Problem

LARGEST_BLOCK = 256
"""No kernel has a tile of more rows."""

UNLIMITED = 2**31 - 1


class Static(NamedTuple):
    """What follows from the Problem alone."""

    spec: Spec
    numbers: Numbers
    parts: Parts


def adapt(problem: Problem, operands: Operands) -> Arguments:
    """Everything that kernels take beside q, k, v and their results."""
    wide = max(x.stride(-3) for x in (operands.q, operands.k, operands.v)) * LARGEST_BLOCK >= 2**31
    wide |= problem.num_heads_q * max(problem.head_dim, problem.head_dim_v) * LARGEST_BLOCK >= 2**31
    precision = _precision(problem)
    key = f"triton {wide} {precision}"
    static: Static | None = problem.memo.get(key)
    if static is None:
        static = problem.memo[key] = _static(problem, wide, precision)
    numbers = static.numbers
    if problem.dropout == "philox":
        numbers = numbers._replace(**_words(operands))
    return Arguments(
        _sequences(problem, operands),
        _mask(problem, operands, static),
        _scores(problem, operands),
        _dropout(problem, operands),
        numbers,
        operands.sink,
        static.spec,
    )


def rows(x: Tensor) -> Rows:
    """A tensor [batch, seqlen, heads, dim], [total, heads, dim] or pages; its last axis must be contiguous."""
    strides = x.stride()
    return Rows(x.detach(), *(strides[:3] if x.dim() == 4 else (0, *strides[:2])))


def query_tiles(problem: Problem, operands: Operands, block: int) -> int:
    """Programs that `tiles.query_tile` hands the queries to."""
    if operands.cu_seqlens_q is not None:
        return (problem.seqlen_q // block + problem.batch + 1) * problem.num_heads_q if problem.seqlen_q else 0
    return -(-problem.seqlen_q // block) * problem.num_heads_q * problem.batch


def pieces(dim: int) -> tuple[int, ...]:
    """Powers of two from 16 on that hold `dim` columns: one, or two where that saves a fifth of the columns.

    Matrix units want powers of two; 96 columns as 64 + 32 cost three quarters of 128.
    """
    whole = max(16, 1 << (dim - 1).bit_length())
    half = whole // 2
    rest = max(16, 1 << max(dim - half - 1, 0).bit_length())
    return (half, rest) if half >= 16 and 5 * (half + rest) <= 4 * whole else (whole,)


def _precision(problem: Problem) -> str:
    """How float32 products are computed; half precision knows one way only."""
    allowed = problem.dtype == "float32" and problem.device == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if allowed else "ieee"


# ---- what follows from the Problem -----------------------------------------------------------------------------------
def _static(problem: Problem, wide: bool, precision: Any) -> Static:
    parts = decompose(problem.mask)
    found = affine(parts.interval)
    kind = (False, False, False) if found is None else found.kind
    predicates = [expressions.predicate_function(part.expr) for part in parts.predicates]
    scores = [s for s in problem.scores if isinstance(s, Score)]
    users = [expressions.score_function(score.expr) for score in scores]
    d_users = [expressions.score_function(score.d_expr) for score in scores]
    spec = Spec(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        pieces=pieces(problem.head_dim),
        pieces_v=pieces(problem.head_dim_v),
        precision=precision,
        scaling=_scaling(problem),
        flip=problem.scale <= 0.0,
        bounded=problem.layout != "dense",
        wide=wide,
        intervals=_num_intervals(parts) if found is None else 0,
        left=kind[0],
        right=kind[1],
        right_top_left=kind[2],
        num_dense=len(parts.dense),
        softcap=any(isinstance(s, Softcap) for s in problem.scores),
        dropout=problem.dropout,
        names=tuple(expressions.name_of(f) for f in (*predicates, *users, *d_users)),
        predicates=tuple(predicates),
        users=tuple(users),
        d_users=tuple(d_users),
    )
    return Static(spec, _numbers(problem, found or Affine()), parts)


def _num_intervals(parts: Parts) -> int:
    from kilat.masks.core import leaves

    return max((len(leaf.intervals()) for leaf in leaves(parts.interval)), default=1)  # type: ignore[attr-defined]


def _numbers(problem: Problem, found: Affine) -> Numbers:
    longest = problem.seqlen_q + problem.seqlen_kv  # a wider window shows the same keys
    keep_share = 1.0 - problem.dropout_p
    threshold = min(math.ceil(problem.dropout_p * 2.0**32), 2**32 - 1)
    return Numbers(
        scale=problem.scale,
        softcap=next((s.cap for s in problem.scores if isinstance(s, Softcap)), 0.0),
        left=opaque(min(found.left, longest)),
        right=opaque(min(found.right, longest)),
        right_top_left=opaque(min(found.right_top_left, longest)),
        threshold=opaque(_signed(threshold)),
        keep_scale=1.0 / keep_share if keep_share > 0.0 else 0.0,
        seed_low=opaque(0),
        seed_high=opaque(0),
        offset_low=opaque(0),
        offset_high=opaque(0),
        unit=abs(problem.scale) or 1.0 if _scaling(problem) == "p" else 1.0,
        sign=float((problem.scale > 0.0) - (problem.scale < 0.0)),
    )


def _scaling(problem: Problem) -> Any:
    """q where it is float32 anyway; else exp's argument, as long as no score modifier wants to see s itself."""
    if problem.dtype == "float32":
        return "q"
    return "s" if problem.scores else "p"


def opaque(value: int) -> int:
    """A number that kernels read by `tiles.plain`: inside tuples Triton compiles anew for 1 and for multiples of 16.

    Always of 64 bits, odd and not 1: no length, seed or number of heads is part of what a kernel is compiled for.
    """
    return ((value + OPAQUE) << 4) | 3


# ---- what belongs to one call ----------------------------------------------------------------------------------------
def _sequences(problem: Problem, o: Operands) -> Sequences:
    table = o.page_table
    return Sequences(
        cu_q=o.cu_seqlens_q,
        cu_kv=o.cu_seqlens_kv,
        len_q=o.seqlens_q,
        len_kv=o.seqlens_kv,
        page_table=table,
        page_table_batch=opaque(0 if table is None else table.stride(0)),
        page_size=opaque(problem.page_size),
        num_pages=opaque(0 if table is None else o.k.shape[0]),
        batch=opaque(problem.batch),
        heads_q=opaque(problem.num_heads_q),
        group=problem.group,
        seqlen_q=opaque(problem.seqlen_q),
        seqlen_kv=opaque(problem.seqlen_kv),
    )


def _mask(problem: Problem, o: Operands, static: Static) -> Mask:
    parts, tensors = static.parts, o.mask_tensors
    table = _bounds(problem, o) if static.spec.intervals else None
    return Mask(
        bounds=table,
        bounds_batch=opaque(0 if table is None or table.shape[0] == 1 else table.stride(0)),
        bounds_rows=opaque(0 if table is None else table.shape[3]),
        dense=tuple(_pairs(tensors[n]) for n in parts.dense),
        predicates=tuple(_tables([tensors[n] for n in part.tensors]) for part in parts.predicates),
    )


def _bounds(problem: Problem, o: Operands) -> Tensor:
    """The table of an interval mask; remembered if no tensor says anything about it."""
    lengths = (o.cu_seqlens_q, o.cu_seqlens_kv, o.seqlens_q, o.seqlens_kv)
    fixed = not o.mask_tensors and all(x is None for x in lengths)
    key = f"triton bounds {o.q.device}"
    found: Tensor | None = problem.memo.get(key) if fixed else None
    if found is None:
        mask = problem.mask
        interval = decompose(mask.with_tensors(o.mask_tensors) if mask is not None else None).interval
        if interval is None:
            raise ValueError("a mask without intervals has no bounds")
        shared = all(x is None for x in lengths) and not depends_on_batch(interval)
        at = bounds.places(problem, o, shared)
        found = bounds.table(interval, at, problem.seqlen_q + problem.seqlen_kv)
        if fixed:
            problem.memo[key] = found
    return found


def _scores(problem: Problem, o: Operands) -> Scores:
    slopes, slopes_batch, bias = None, 0, None
    users: list[tuple[Table, ...]] = []
    for score, tensors in zip(problem.scores, o.score_tensors, strict=True):
        if isinstance(score, Alibi):
            slopes = tensors[0].detach()
            slopes_batch = slopes.stride(0) if slopes.dim() == 2 and slopes.shape[0] > 1 else 0
        elif isinstance(score, Bias):
            bias = _pairs(tensors[0])
        elif isinstance(score, Score):
            users.append(_tables(tensors))
    return Scores(slopes, opaque(slopes_batch), bias, tuple(users))


def _dropout(problem: Problem, o: Operands) -> Dropout:
    if problem.dropout == "keep" and o.keep is None:
        raise ValueError("keep must be a bool tensor when Problem.dropout is 'keep'; got None")
    keep = _pairs(o.keep) if problem.dropout == "keep" and o.keep is not None else None
    seed, offset = (x if isinstance(x, Tensor) and problem.dropout else None for x in (o.seed, o.offset))
    return Dropout(keep, seed, offset)


def _words(o: Operands) -> dict[str, int]:
    """The halves of seed and offset, where they are no tensors."""
    words: dict[str, int] = {}
    for name, value in (("seed", o.seed), ("offset", o.offset)):
        if isinstance(value, int):
            words[f"{name}_low"], words[f"{name}_high"] = opaque(_signed(value)), opaque(_signed(value >> 32))
    return words


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of a value."""
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def _pairs(x: Tensor) -> Pairs:
    """A tensor that broadcasts to [batch, heads, seqlen_q, seqlen_kv]."""
    x = _bytes(x.detach())
    shape = (1,) * (4 - x.dim()) + tuple(x.shape)
    strides = (0,) * (4 - x.dim()) + x.stride()
    steps = [0 if n == 1 else step for n, step in zip(shape, strides, strict=True)]
    limits = [UNLIMITED if n == 1 else n for n in shape[2:]]
    return Pairs(x, *steps, *limits)


def _tables(tensors: Any) -> tuple[Table, ...]:
    """The tensors of a user's function; an empty one is read as a single zero."""
    made: list[Table] = []
    for x in tensors:
        x = _bytes(x.detach())
        if not x.numel():
            x = x.new_zeros((1,) * x.dim())
        made.append(Table(x, tuple(x.shape), x.stride()))
    return tuple(made)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x
