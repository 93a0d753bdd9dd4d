"""Calls that read a KV cache with few queries: the decode kernel, and the merge of what it cut into parts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kilat import config
from kilat.backends.triton.adapt import adapt, opaque, query_tiles, rows
from kilat.backends.triton.arguments import Form, Parts, Quantised, Rows, Split
from kilat.backends.triton.decode import decode_kernel, merge_kernel
from kilat.backends.triton.heuristics_decode import INTERPRETED, DecodeConfig, decode_config
from kilat.backends.triton.heuristics_decode import Rows as Tile

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.backends.triton.arguments import Arguments, Spec
    from kilat.problem import Operands, Problem

FEW_QUERIES = 16
"""Queries of a sequence up to which the decode kernel is chosen whatever the group's size."""

FEW_ROWS = 64
"""Rows (queries times heads of the group) up to which it is."""

FORWARD_ROWS = 128
"""Queries of the forward's largest tiles."""

INVARIANT_KEYS, INVARIANT_PARTS = 1024, 16
"""Under batch_invariant=True: keys of a part, if that does not make more parts."""

ANY = 2**30
CHUNK = 16
"""Parts that a merge sums at a time."""

KNOWS_E4M3 = (8, 9)
"""The first compute capability with instructions for that type."""


class Shape(NamedTuple):
    """What the launches of a Problem need; nothing in it follows from values inside tensors."""

    spec: Spec
    chosen: DecodeConfig
    split: Split
    per_head: int  # programs of a kv head
    merged: bool
    batch: int  # BATCH of the kernel
    page: int
    rows: int  # of a tile that are of use
    columns: int

    @property
    def options(self) -> dict[str, Any]:
        """Of the launch."""
        return {"num_warps": self.chosen.num_warps, "num_stages": self.chosen.num_stages}


def wanted(problem: Problem, operands: Operands) -> bool:
    """Whether the decode kernel does a cached call, and not the forward; worked out once a Problem."""
    key = f"triton decodes {operands.k.dtype}"
    found: bool | None = problem.memo.get(key)
    if found is None:
        found = problem.memo[key] = must(problem, operands) or _better(problem, operands)
    return found


def _better(p: Problem, operands: Operands) -> bool:
    """Few queries, or so few tiles of the forward that half of the GPU would be idle.

    With batch_invariant=True the answer follows from what all companions share.
    """
    if p.num_splits is not None and p.num_splits > 1:
        return True
    idle = 2 * query_tiles(p, operands, FORWARD_ROWS) < processors(operands.q)
    if operands.cu_seqlens_q is not None:
        return p.batch_invariant or p.seqlen_q <= FEW_QUERIES * p.batch or idle
    few = p.seqlen_q <= FEW_QUERIES or p.seqlen_q * p.group <= FEW_ROWS
    return few or (idle and not p.batch_invariant)


def must(problem: Problem, operands: Operands) -> bool:
    """Whether only the decode kernel can do a call."""
    return operands.k.dtype != operands.q.dtype or problem.head_dim > 512


def decode(problem: Problem, operands: Operands, out: Tensor, lse: Tensor, capability: tuple[int, int] | None) -> None:
    """Write out and lse of a cached call."""
    from kilat.backends.triton.launch import on_device, start

    o, args = operands, adapt(problem, operands)
    shared = _shared(o, args.spec)
    shape = _shape(problem, o, args, shared, capability)
    heads = problem.num_heads_kv
    if not shape.per_head or not heads:
        return
    chosen, slots = shape.chosen, shape.per_head * heads
    parts, device = Parts(None, None, None, opaque(slots), opaque(shape.rows)), o.q.device
    if shape.merged:
        parts = parts._replace(
            out=torch.empty((slots, shape.rows, shape.columns), dtype=torch.float32, device=device),
            lse=torch.empty((slots, shape.rows), dtype=torch.float32, device=device),
            table=torch.empty((problem.batch + 1, 2), dtype=torch.int32, device=device),
        )
    # values that are a part of the keys have the keys' scales, unless they have their own
    v_scale = o.k_scale if o.v_scale is None and o.v.data_ptr() == o.k.data_ptr() else o.v_scale
    by_token = [scale is not None and scale.dim() > 1 for scale in (o.k_scale, v_scale)]
    form = Form(chosen.block_kv, shape.page, shared, _stored(o.k, capability), *by_token)
    seqs, mask, scores, _, numbers, sink, _ = args
    tensors = (rows(o.q), rows(_bytes(o.k)), rows(_bytes(o.v)), rows(out), lse)
    scales = Quantised(_scales(o.k_scale), _scales(v_scale))
    rest = (scales, parts, shape.split, seqs, mask, scores, numbers, sink, shape.spec)
    with on_device(o.q):
        start(
            decode_kernel, slots, (*tensors, *rest, chosen.block_rows, shape.batch, shape.columns, form), shape.options
        )
        if shape.merged:
            width = 1 << (problem.head_dim_v - 1).bit_length()
            constants = (shape.spec, chosen.block_rows, shape.columns, width, CHUNK)
            grid = lse.numel()
            start(
                merge_kernel, grid, (rows(out), lse, parts, seqs, sink, *constants), {"num_warps": 4, "num_stages": 2}
            )


def processors(x: Tensor) -> int:
    """Multiprocessors of the GPU; where there is none, those of an H200; a few in the interpreter."""
    if config.triton_interprets():
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132


def _shape(problem: Problem, o: Operands, args: Arguments, shared: bool, capability: tuple[int, int] | None) -> Shape:
    """The Shape of a Problem; worked out once."""
    key = f"triton decode {args.spec.digest} {shared} {o.k.dtype} {o.q.get_device()} {capability}"
    found: Shape | None = problem.memo.get(key)
    if found is not None:
        return found
    p, spec = problem, replace(args.spec, scaling="q" if problem.dtype == "float32" else "s", flip=False)
    ragged = o.cu_seqlens_q is not None
    queries = -(-p.seqlen_q // max(p.batch, 1)) if ragged else p.seqlen_q
    queries = FEW_ROWS if ragged and p.batch_invariant else queries
    columns = sum(spec.pieces_v)
    sizes = o.k.element_size(), o.q.element_size()
    tile = Tile(p.group, queries, sum(spec.pieces), columns, shared, *sizes, p.page_size > 0)
    chosen = INTERPRETED if config.triton_interprets() else decode_config(tile, capability)
    if ragged:  # each sequence may end with a tile that is not full; one more holds what no sequence owns
        tiles = p.seqlen_q * p.group // chosen.block_rows + p.batch + 1 if p.seqlen_q else 0
    else:
        tiles = p.batch * -(-p.seqlen_q * p.group // chosen.block_rows)
    used = chosen.block_rows if ragged else min(chosen.block_rows, p.seqlen_q * p.group)
    split, per_head = _split(p, chosen, tiles, processors(o.q) * chosen.programs)
    page = p.page_size if p.page_size >= 16 and not p.page_size & (p.page_size - 1) else min(p.page_size, 1)
    batch = 16
    while batch <= p.batch:
        batch *= 8
    found = Shape(spec, chosen, split, per_head, per_head > tiles, batch, page, used, columns)
    problem.memo[key] = found
    return found


def _split(p: Problem, chosen: DecodeConfig, tiles: int, programs: int) -> tuple[Split, int]:
    """How keys are cut, and how many programs a kv head gets: enough, whatever the lengths."""
    blocks = -(-p.seqlen_kv // chosen.block_kv)  # of a sequence, at most
    least, most, out_of_reach = max(chosen.least // chosen.block_kv, 1), ANY, 2**31 - 1
    if p.num_splits is not None:
        least, most, programs = 1, p.num_splits, out_of_reach
    elif p.batch_invariant:
        least, most, programs = max(INVARIANT_KEYS // chosen.block_kv, 1), INVARIANT_PARTS, out_of_reach
    elif tiles * p.num_heads_kv >= 8 * programs:  # enough to do without
        most = 1
    most = max(min(most, -(-blocks // least)), 1)
    # each tile has less than a part more than its share of `programs`
    per_head = min(tiles * most, tiles + programs // p.num_heads_kv)
    return Split(opaque(programs), opaque(least), opaque(most)), per_head


def _shared(o: Operands, spec: Spec) -> bool:
    """Whether the values are the first channels of the keys, so that a tile of K holds one of V."""
    same = o.v.data_ptr() == o.k.data_ptr() and o.v.stride() == o.k.stride() and o.v.dtype == o.k.dtype
    return same and spec.pieces[: len(spec.pieces_v)] == spec.pieces_v


def _stored(x: Tensor, capability: tuple[int, int] | None) -> Any:
    """`Form.stored`."""
    if x.dtype == torch.float8_e4m3fn:
        return "e4m3 bits" if capability is not None and capability < KNOWS_E4M3 else "e4m3"
    return "int8" if x.dtype == torch.int8 else ""


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _scales(x: Tensor | None) -> Rows | None:
    """[num_heads_kv], or by token [batch or pages, tokens, num_heads_kv]."""
    if x is None:
        return None
    return Rows(x, 0, 0, x.stride(0)) if x.dim() == 1 else Rows(x, *x.stride())
