"""Gradients of a bias and of the tensors of user scores: what to launch, buffers, and results in the inputs' types."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kilat.backends.triton import backward_scores as kernels
from kilat.backends.triton import expressions, launch
from kilat.backends.triton.adapt import query_tiles, rows
from kilat.backends.triton.arguments import Jitted, Table
from kilat.backends.triton.heuristics_backward import scores_config
from kilat.scores import Bias, Score
from kilat.symbolic import Const, Var, nodes

if TYPE_CHECKING:
    from kilat.backends.triton.backward_launch import Backward

PROGRAMS = 256
"""A bias with fewer tiles than this is summed in parts, so that a GPU has enough to do."""

Mode = Literal["sum", "fixed", "largest"]


@dataclass(frozen=True)
class Slot:
    """One place where user function number `user` reads an element of a float tensor; part of the compile key."""

    name: str  # of `partial`: it stands for it in comparisons
    user: int
    by_query: bool  # whether the element depends on the query, and on the key
    by_key: bool
    partial: Jitted = field(compare=False)  # (d score / d element, its indices...)

    def __repr__(self) -> str:  # part of Triton's cache keys
        return f"Slot_{self.name}_{self.user}_{self.by_query}_{self.by_key}"


def score_gradients(call: Backward) -> list[list[Tensor | None]]:
    """One list a score modifier, one entry a tensor of it; None where there is no gradient or none is wanted."""
    wanted, score_tensors = call.problem.grad_of, call.operands.score_tensors
    grads: list[list[Tensor | None]] = [[None] * len(tensors) for tensors in score_tensors]
    user = 0
    for n, (modifier, tensors) in enumerate(zip(call.problem.scores, score_tensors, strict=True)):
        if isinstance(modifier, Bias) and "bias" in wanted:
            grads[n] = [_bias_gradient(call, tensors[0])]
        elif isinstance(modifier, Score):
            if "score_tensors" in wanted:
                grads[n] = _table_gradients(call, modifier, tensors, user)
            user += 1
    return grads


def _inputs(call: Backward) -> tuple[object, ...]:
    o = call.operands
    return rows(o.q), rows(o.k), rows(o.v), rows(call.do), call.lse, call.delta


# ---- bias ------------------------------------------------------------------------------------------------------------
def _bias_gradient(call: Backward, bias: Tensor) -> Tensor:
    """dbias of the bias's own shape, summed in float32 over its broadcast axes."""
    p, chosen = call.problem, call.chosen(scores_config)
    batches, heads, height, width = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    tiles = batches * heads * -(-height // chosen.block_q) * -(-width // chosen.block_kv)
    reached = (p.batch if batches == 1 else 1) * (p.num_heads_q if heads == 1 else 1)
    splits = max(1, min(PROGRAMS // max(tiles, 1), reached))
    parts = torch.empty((splits, *bias.shape), dtype=torch.float32, device=bias.device)
    if tiles:
        sizes = (splits, batches, heads, height, width)
        launch.run(
            kernels.bias_kernel,
            splits * tiles,
            (*_inputs(call), parts, sizes, *call.shared, call.args.spec, height > 1, width > 1),
            chosen,
        )
    return (parts[0] if splits == 1 else parts.sum(0)).to(bias.dtype)


# ---- tensors of user scores ------------------------------------------------------------------------------------------
def _table_gradients(call: Backward, score: Score, tensors: tuple[Tensor, ...], user: int) -> list[Tensor | None]:
    """The gradients of the float tensors of one user score."""
    slots = _slots(score, user)
    found: list[Tensor | None] = []
    for number, tensor in enumerate(tensors):
        mine = [slot for place, slot in slots if place == number]
        if not tensor.is_floating_point():
            found.append(None)
        elif call.problem.deterministic:
            found.append(_fixed_sum(call, mine, tensor))
        else:
            total = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            for slot in mine:
                _launch(call, slot, "sum", total, None)
            found.append(total.to(tensor.dtype))
    return found


def _slots(score: Score, user: int) -> list[tuple[int, Slot]]:
    """(number of the tensor, Slot) for every element of a float tensor that the function reads."""
    made: list[tuple[int, Slot]] = []
    for load, partial in score.partials():
        function = expressions.tuple_function((partial, *load.indices) if load.indices else (partial, Const(0)))
        names = {node.name for node in nodes(*load.indices) if isinstance(node, Var)}
        slot = Slot(
            expressions.name_of(function),
            user,
            by_query=not names.isdisjoint(("q_pos", "s")),
            by_key=not names.isdisjoint(("j", "s")),
            partial=function,
        )
        made.append((load.tensor, slot))
    return made


def _fixed_sum(call: Backward, slots: list[Slot], tensor: Tensor) -> Tensor:
    """A sum that does not depend on the order: in int64, in units small enough for the largest value.

    unit = 2^(e - 62 + bits) for values below 2^e and at most 2^bits of them. NaN where a value is not finite.
    """
    p = call.problem
    total = torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
    pairs = p.num_heads_q * p.seqlen_q * p.seqlen_kv * (p.batch if call.operands.cu_seqlens_q is None else 1)
    bits = math.ceil(math.log2(max(pairs, 1))) + 1
    for slot in slots:
        largest = _launch(call, slot, "largest", total, None)
        if largest is None:
            continue
        exponent = torch.frexp(largest.amax())[1]
        factor = torch.ldexp(torch.ones((), device=tensor.device), (62 - bits - exponent).clamp(-126, 126))
        added = torch.zeros(tensor.shape, dtype=torch.int64, device=tensor.device)
        _launch(call, slot, "fixed", added, factor)
        part = added.double() / factor.double()
        total += torch.where(torch.isfinite(largest.amax()), part, torch.nan)
    return total.to(tensor.dtype)


def _launch(call: Backward, slot: Slot, mode: Mode, target: Tensor, factor: Tensor | None) -> Tensor | None:
    """Run the kernel of one slot; in mode "largest" the largest values, one a program (None: there is no program)."""
    chosen = call.chosen(scores_config)
    grid = query_tiles(call.problem, call.operands, chosen.block_q)
    if not grid or not target.numel():
        return None
    if factor is None:
        factor = torch.empty(grid if mode == "largest" else 1, dtype=torch.float32, device=target.device)
    table = Table(target, tuple(target.shape), target.stride())
    launch.run(
        kernels.table_kernel,
        grid,
        (*_inputs(call), table, factor, *call.shared, call.args.spec, slot, mode),
        chosen,
    )
    return factor
