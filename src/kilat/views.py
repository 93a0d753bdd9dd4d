"""Operands as backends take them: last axis contiguous, biases and pair masks with four axes, the rest contiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from kilat.problem import Operands, Options

Kind = Literal["last axis", "pairs", "contiguous", "any"]
Fix = tuple[str, Kind]
"""An operand, and how it must be viewed or copied."""


def last_axis(x: Tensor) -> Tensor:
    """x with unit stride in its last axis and no lazy negation: x itself, or a copy where it must be.

    A view with a lazy negation is half of a complex tensor, so its strides are even: one test finds both.
    """
    if x.shape[-1] == 1:
        return x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous().resolve_neg()


def pairs(x: Tensor) -> Tensor:
    """x [..., S_q, S_kv] with four axes, expanded axes folded back to size 1, last axis contiguous.

    Where x is a leaf that requires grad, each of its elements has a gradient of its own: its expanded axes are copied.
    """
    x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
    for axis in range(4):
        if x.stride(axis) == 0 and x.shape[axis] > 1:
            if x.requires_grad and x.is_leaf:
                return x.contiguous()
            x = x.narrow(axis, 0, 1)
    return last_axis(x)


def contiguous(x: Tensor) -> Tensor:
    """x, or a copy with row-major strides and no lazy negation."""
    return x.contiguous().resolve_neg()


_VIEWS = {"last axis": last_axis, "pairs": pairs, "contiguous": contiguous, "any": Tensor.resolve_neg}


def _kind(name: str, options: Options) -> Kind:
    if name in ("q", "k", "v"):
        return "last axis"
    if name == "keep":
        return "pairs"
    if name in ("k_scale", "v_scale"):
        return "any"
    kind, _, index = name.partition(".")
    if kind == "score" and type(options.scores[int(index.partition(".")[0])]).__name__ == "Bias":
        return "pairs"
    return "contiguous"


def _ready(x: Tensor, kind: Kind) -> bool:
    if kind == "last axis":
        return x.shape[-1] != 1 and x.stride(-1) == 1
    if kind == "pairs":
        return x.dim() == 4 and 0 not in x.stride() and x.shape[-1] != 1 and x.stride(-1) == 1
    return kind == "any" or x.is_contiguous()


def fixes_of(options: Options, operands: Operands, names: tuple[str, ...]) -> tuple[Fix, ...]:
    """The operands that every call of this kind must view or copy."""
    found: list[Fix] = []
    for name, x in zip(names, operands.flatten(names), strict=True):
        kind = _kind(name, options)
        if not _ready(x, kind):
            found.append((name, kind))
    return tuple(found)


def apply(operands: Operands, fixes: tuple[Fix, ...]) -> None:
    """View or copy operands in place as `fixes` says; differentiable."""
    for name, how in fixes:
        kind, _, index = name.partition(".")
        view = _VIEWS[how]
        if kind == "mask":
            masks = list(operands.mask_tensors)
            masks[int(index)] = view(masks[int(index)])
            operands.mask_tensors = tuple(masks)
        elif kind == "score":
            n, i = (int(part) for part in index.split("."))
            groups = [list(group) for group in operands.score_tensors]
            groups[n][i] = view(groups[n][i])
            operands.score_tensors = tuple(tuple(group) for group in groups)
        else:
            setattr(operands, name, view(getattr(operands, name)))
