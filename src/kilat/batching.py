"""How a call is batched by vmap: one call on a longer batch where that says the same, a loop elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kilat.autograd import Call

Again = Callable[["Call", Sequence[Tensor]], Sequence[Tensor]]
"""The call itself, on tensors without the mapped axis."""


def vmap_forward(size: int, dims: Sequence[int | None], call: Call, tensors: Sequence[Tensor], again: Again) -> Any:
    """(out, lse), each with the mapped axis first. dims: the mapped axis of each tensor, None for the others."""
    if can_fold(size, dims, call, tensors):
        return unfold(size, again(call, fold(size, dims, call.names, tensors)))
    return loop(size, dims, call, tensors, again)


def vmap_backward(
    size: int, dims: Sequence[int | None], call: Call, wanted: Sequence[bool], tensors: Sequence[Tensor], again: Again
) -> Any:
    """The wanted gradients, each with the mapped axis first.

    A tensor that is shared by the mapped calls has a gradient in each, so it is folded only where it was given a batch.
    """
    shared = [name for name, want, dim in zip(call.names, wanted, dims, strict=False) if want and dim is None]
    if any(name not in ("q", "k", "v") for name in shared) or not can_fold(size, dims, call, tensors):
        return loop(size, dims, call, tensors, again)
    names = (*call.names, *("q",) * (len(tensors) - len(call.names)))  # out, lse and their gradients have a batch axis
    return unfold(size, again(call, fold(size, dims, names, tensors)))


def can_fold(size: int, dims: Sequence[int | None], call: Call, tensors: Sequence[Tensor]) -> bool:
    """Whether `size` calls are one call with `size` times the batch: nothing shared depends on the batch entry."""
    options, names = call.options, call.names
    if options.layout != "dense" or options.dropout or size == 0:
        return False
    if options.mask is not None and (options.mask.tensors() or options.mask.depends_on_batch()):
        return False
    batch = _batch(dims[0], tensors[0])
    for name, dim, tensor in zip(names, dims, tensors, strict=False):
        if name.startswith("score."):
            kind = type(options.scores[int(name.split(".")[1])]).__name__
            if not _score_folds(kind, dim, tensor, batch):
                return False
        elif name in ("seed", "offset", "keep") or (name == "sink" and dim is not None):
            return False
    return True


def _score_folds(kind: str, dim: int | None, tensor: Tensor, batch: int) -> bool:
    """A shared score must say the same to every batch entry, a mapped one must have a batch of its own."""
    if kind == "Alibi":
        return tensor.dim() == 1 and dim is None
    if kind != "Bias":
        return False
    return tensor.shape[0] == 1 if dim is None else tensor.movedim(dim, 0).shape[1] == batch


def _batch(dim: int | None, q: Tensor) -> int:
    return q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]


def fold(size: int, dims: Sequence[int | None], names: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mapped axis and the batch in one axis; tensors without a batch stay."""
    folded: list[Tensor] = []
    for name, dim, tensor in zip(names, dims, tensors, strict=True):
        has_batch = name in ("q", "k", "v", "seqlens_q", "seqlens_kv")
        if dim is not None:
            folded.append(tensor.movedim(dim, 0).flatten(0, 1))
        elif has_batch:
            folded.append(tensor.expand(size, *tensor.shape).flatten(0, 1))
        else:
            folded.append(tensor)
    return folded


def unfold(size: int, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The mapped axis first, the batch second."""
    return tuple(x.unflatten(0, (size, x.shape[0] // size)) for x in results)


def loop(size: int, dims: Sequence[int | None], call: Call, tensors: Sequence[Tensor], again: Again) -> Any:
    """One call for each entry of the mapped axis, stacked; for none, the shapes come from a call on zeros."""
    if size == 0:
        empty = [
            x if d is None else x.new_zeros([n for a, n in enumerate(x.shape) if a != d])
            for x, d in zip(tensors, dims, strict=True)
        ]
        return tuple(x.new_empty((0, *x.shape)) for x in again(call, empty))
    results = [
        again(call, [x if dim is None else x.select(dim, n) for x, dim in zip(tensors, dims, strict=True)])
        for n in range(size)
    ]
    return tuple(torch.stack(group) for group in zip(*results, strict=True))
