"""From a caller's arguments to Options and Operands: structures here, tensors there, drawn seeds, autocast."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kilat.dropout import Dropout
from kilat.masks import Mask
from kilat.numpy_door import as_tensor
from kilat.scores import ScoreModifier, in_order
from kilat.shortcut import Site, find
from kilat.structure import Structured
from kilat.validate_basic import fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kilat.planning import Plan
    from kilat.problem import Operands

DropoutKind = Literal["", "philox", "keep"]
Modifiers = tuple["Mask | None", tuple[ScoreModifier, ...], DropoutKind, float]
"""Structures of mask and scores, kind of dropout, its p: four fields of Options, in parts."""


_memo: dict[int, tuple[weakref.ref[Any], Structured, tuple[Tensor, ...]]] = {}
"""By id of a mask or score: the object, its structure, its tensors. An entry goes when its object does."""

_structures: dict[Structured, Structured] = {}
MAX_STRUCTURES = 4096


def parts_of(x: Structured) -> tuple[Any, tuple[Tensor, ...]]:
    """The structure and the tensors of a mask or score; equal structures are one object, so that an id finds a plan."""
    entry = _memo.get(id(x))
    if entry is not None and entry[0]() is x:
        return entry[1], entry[2]
    structure, tensors = x.structure(), _tensors(x.tensors())
    if len(_structures) >= MAX_STRUCTURES:
        _structures.clear()
    structure = _structures.setdefault(structure, structure)
    key = id(x)
    _memo[key] = weakref.ref(x, lambda _: _memo.pop(key, None)), structure, tensors
    return structure, tensors


def find_equal(mask: Any, rest: tuple[Any, ...], *tensors: Any) -> tuple[Plan | None, Site | None]:
    """The plan of an earlier call with an equal mask that `shortcut.find` does not know, and where to remember one.

    None for what is not there; masks with tensors equal no other.
    """
    if mask is None:
        return None, Site(None, rest)
    same = _structures.get(mask) if isinstance(mask, Mask) else None
    if not isinstance(same, Mask):
        return None, None
    return None if same is mask else find(same, rest, *tensors), Site(same, rest)


def modifiers(mask: Any, scores: Any, sink: Any, dropout: Any, operands: Operands) -> Modifiers:
    """What mask, scores and dropout say without their tensors, which go into `operands`.

    Raises TypeError for objects of other kinds, ValueError for two of one built-in score.
    """
    structure: Mask | None = None
    if mask is not None:
        if not isinstance(mask, Mask):
            wanted = f"mask must be a kilat mask or None ({_remedy(mask)})"
            fail(TypeError, wanted, type=type(mask).__name__)
        structure, operands.mask_tensors = _taken_apart(mask)
    ordered: tuple[ScoreModifier, ...] = ()
    if scores != ():
        ordered = _scores(scores, operands)
    operands.sink = sink
    if dropout is None:
        return structure, ordered, "", 0.0
    return structure, ordered, *_dropout(dropout, operands)


def _remedy(mask: Any) -> str:
    """What to write instead of a mask that is none."""
    if isinstance(mask, type) and issubclass(mask, Mask):
        return f"an object, {mask.__name__}(...), and not the class"
    if callable(mask):
        return "a function of b, h, q_pos, j goes into Predicate"
    if hasattr(mask, "dtype") and str(mask.dtype).removeprefix("torch.") != "bool":
        return "a tensor that is added to the scores goes into scores=[kilat.Bias(...)]"
    return "such as kilat.Causal(); a bool tensor goes into Dense"


def _taken_apart(x: Structured) -> tuple[Any, tuple[Tensor, ...]]:
    if torch.compiler.is_compiling():  # a tracer reads the object itself, to guard on what it holds
        return x.structure(), _tensors(x.tensors())
    return parts_of(x)


def _scores(scores: Sequence[ScoreModifier], operands: Operands) -> tuple[ScoreModifier, ...]:
    if not isinstance(scores, list | tuple | ScoreModifier):
        fail(TypeError, "scores must be a sequence of Softcap, Alibi, Bias and Score", type=type(scores).__name__)
    parts = [_taken_apart(score) for score in in_order(scores)]
    operands.score_tensors = tuple([tensors for _, tensors in parts])
    return tuple([structure for structure, _ in parts])


def _tensors(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple([x if isinstance(x, Tensor) else as_tensor("a tensor of a mask or score", x) for x in values])


def _dropout(dropout: Any, operands: Operands) -> tuple[DropoutKind, float]:
    if not isinstance(dropout, Dropout):
        fail(TypeError, "dropout must be a Dropout or None", type=type(dropout).__name__)
    if dropout.keep is not None:
        (operands.keep,) = _tensors((dropout.keep,))
        return "keep", dropout.p
    if dropout.p == 0.0:
        return "", 0.0
    if dropout.seed is None:
        # Drawn on q's device and never read here: checkpointing and graph replays draw again, from torch's own state.
        low, high = -(2**63), 2**63 - 1
        drawn = torch.randint(low, high, (2,), dtype=torch.int64, device=operands.q.device, generator=dropout.generator)
        operands.seed, operands.offset = drawn.unbind()
    else:
        operands.seed = dropout.seed
        operands.offset = 0 if dropout.offset is None else dropout.offset
    return "philox", dropout.p


def autocast(operands: Operands, cached: bool) -> None:
    """Cast q, k and v as torch.autocast says; float64 stays. `cached`: q alone, to the cache's floats if it has any."""
    device = operands.q.device.type
    if not torch.is_autocast_enabled(device):
        return
    if cached and operands.k_scale is None:
        operands.q = operands.q.to(operands.k.dtype)
        return
    dtype = torch.get_autocast_dtype(device)
    for name in ("q",) if cached else ("q", "k", "v"):
        value = getattr(operands, name)
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            setattr(operands, name, value.to(dtype))
