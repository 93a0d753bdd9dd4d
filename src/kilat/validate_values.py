"""Checks of the values inside int32 tensors: offsets, lengths, page tables. They read the tensors: on CPUs for free."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from kilat.masks.window import ring_room
from kilat.validate_basic import fail

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kilat.problem import Operands, Problem


def has_values(operands: Operands) -> bool:
    """Whether a call has offsets, lengths or a page table."""
    tensors = (operands.cu_seqlens_q, operands.cu_seqlens_kv, operands.seqlens_q, operands.seqlens_kv)
    return any(x is not None for x in tensors)


def check_values(problem: Problem, operands: Operands) -> None:
    """ValueError unless offsets start at 0, never decrease and fit, lengths fit, and used page-table entries exist."""
    cached = problem.layout == "cached"
    if operands.cu_seqlens_q is not None:
        _check_offsets("cu_seqlens_q", operands.cu_seqlens_q, "total_q", problem.seqlen_q)
    if operands.cu_seqlens_kv is not None:
        _check_offsets("cu_seqlens_kv", operands.cu_seqlens_kv, "total_kv", problem.seqlen_kv)
    if operands.seqlens_q is not None:
        _check_lengths("seqlens_q", operands.seqlens_q, "seqlen_q", problem.seqlen_q)
    if operands.seqlens_kv is not None:
        name = "cache.lengths" if cached else "seqlens_kv"
        _check_lengths(name, operands.seqlens_kv, "capacity" if cached else "seqlen_kv", problem.seqlen_kv)
        if operands.page_table is not None:
            check_pages(operands.page_table, operands.seqlens_kv, problem.page_size, operands.k.shape[0])
    if problem.ring_first is not None and operands.cu_seqlens_q is not None:
        _check_ring(problem, operands)
    if problem.layout != "dense" and (operands.mask_tensors or operands.score_tensors or operands.keep is not None):
        _check_pairs(problem, operands)


def _values(x: Tensor) -> NDArray[np.int32]:
    return x.detach().cpu().numpy()


def _check_offsets(name: str, offsets: Tensor, total_name: str, total: int) -> None:
    values: list[int] = offsets.tolist()
    if values[0] == 0 and values[-1] <= total and values == sorted(values):
        return
    if values[0] != 0:
        fail(ValueError, f"{name} must start at 0", **{f"{name}[0]": values[0]})
    for n, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            fail(ValueError, f"{name} must never decrease", **{f"{name}[{n}]": a, f"{name}[{n + 1}]": b})
    fail(ValueError, f"{name} must end at {total_name} or before", **{f"{name}[-1]": values[-1], total_name: total})


def _check_lengths(name: str, lengths: Tensor, limit_name: str, limit: int) -> None:
    values: list[int] = lengths.tolist()
    for b, value in enumerate(values):
        if not 0 <= value <= limit:
            fail(ValueError, f"{name} must be from 0 to {limit_name}", **{f"{name}[{b}]": value, limit_name: limit})


def check_pages(page_table: Tensor, lengths: Tensor, page_size: int, num_pages: int) -> None:
    """ValueError unless every entry that a length reaches is a page; entries beyond may hold anything."""
    table, used = _values(page_table), _values(lengths)
    if not table.size:
        return
    pages = (used.astype(np.int64) + page_size - 1) // page_size
    bad = (np.arange(table.shape[1]) < pages[:, None]) & ((table < 0) | (table >= num_pages))
    if bad.any():
        b, n = (int(x[0]) for x in bad.nonzero())
        got = {f"page_table[{b}, {n}]": int(table[b, n]), "num_pages": num_pages}
        fail(ValueError, "cache.page_table must hold page numbers from 0 to num_pages - 1 where lengths reach", **got)


def longest(problem: Problem, operands: Operands) -> tuple[int, int]:
    """Largest seqlen_q and seqlen_kv of the sequences of a ragged or cached call (0 if there are none)."""
    if operands.cu_seqlens_q is not None:
        seqlen_q = int(np.diff(_values(operands.cu_seqlens_q)).max(initial=0))
    else:
        seqlen_q = problem.seqlen_q
    if operands.cu_seqlens_kv is not None:
        seqlen_kv = int(np.diff(_values(operands.cu_seqlens_kv)).max(initial=0))
    elif operands.seqlens_kv is not None:
        seqlen_kv = int(_values(operands.seqlens_kv).max(initial=0))
    else:
        seqlen_kv = problem.seqlen_kv
    return seqlen_q, seqlen_kv


def _check_ring(problem: Problem, operands: Operands) -> None:
    """The longest sequence of queries must find its keys in the ring."""
    room = ring_room(problem.mask, problem.ring_first or 0, operands.k.shape[1])
    seqlen_q = longest(problem, operands)[0]
    if seqlen_q > room:
        fail(ValueError, f"cu_seqlens_q must have at most {room} queries of a sequence for this ring", longest=seqlen_q)


def _check_pairs(problem: Problem, operands: Operands) -> None:
    """Tensors of masks, scores and keep must reach over the longest sequence (or be broadcast along it)."""
    lengths = longest(problem, operands)
    if problem.mask is not None and operands.mask_tensors:
        mask = problem.mask.with_tensors(operands.mask_tensors)
        mask.check(problem.batch, problem.num_heads_q, *lengths, exact=False)
    for score, tensors in zip(problem.scores, operands.score_tensors, strict=True):
        if tensors:
            score.with_tensors(tensors).check(problem.batch, problem.num_heads_q, *lengths, exact=False)
    keep = operands.keep
    if keep is not None:
        sizes = (1, 1, *keep.shape)[-2:]
        if any(size != 1 and size < length for size, length in zip(sizes, lengths, strict=True)):
            fail(ValueError, f"keep must reach over the longest sequence {list(lengths)}", shape=keep.shape)
