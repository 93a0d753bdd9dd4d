"""The plan of a plain call that was made before, found by one question to torch instead of two dozen.

The question is torch's own guard of compiled code: type, dtype, device, shape, strides, requires_grad, and dispatch
keys, among which are autocast, dispatch modes and the transforms of torch.func; the grad mode is asked for beside it.
Where torch lacks it (it is not public), calls go the ordinary way.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Callable

    from kilat.masks import Mask
    from kilat.planning import Plan
    from kilat.problem import Operands

MAX_SITES = 256
"""Kinds of calls remembered; all are forgotten when there are more."""

MAX_SHAPES = 4
"""Plans remembered of a kind; the oldest makes way."""

KNOWN_VERSIONS = ((2, 10), (2, 11), (2, 12), (2, 13))
"""Of torch: its guards are not public."""


class Site(NamedTuple):
    """A kind of call: its mask, whose id stands in the key, and the rest of the key."""

    mask: Mask | None
    rest: tuple[Any, ...]


class _Known(NamedTuple):
    check: Callable[..., bool]
    plan: Plan
    mask: Mask | None


_known: dict[tuple[Any, ...], list[_Known]] = {}
_is_grad_enabled = torch.is_grad_enabled


def find(mask: Mask | None, rest: tuple[Any, ...], *tensors: Any) -> Plan | None:
    """The plan of an earlier call of this kind with such tensors."""
    if forward_ad._current_level < 0:
        for known in _known.get((id(mask), _is_grad_enabled(), rest), ()):
            if known.check(*tensors):
                return known.plan
    return None


def remember(site: Site, operands: Operands, plan: Plan) -> None:
    """Let `find` know the plan of a call, unless more than the tensors that it is asked for decides about it.

    That happens at its second, fourth, eighth ... call that was not found, so that calls whose lengths always change,
    or change among more than are remembered, are hardly slowed down.
    """
    plan.uses += 1
    if plan.uses < plan.due or plan.checked or plan.fixes:
        return
    plan.due = 2 * plan.uses
    tensors = (operands.q, operands.k, operands.v)
    if operands.cu_seqlens_q is not None and operands.cu_seqlens_kv is not None:
        tensors = (*tensors, *distinct(operands.cu_seqlens_q, operands.cu_seqlens_kv))
    if _twice_or_wrapped(tensors):
        return
    plan.prepare(operands)
    guards_of = _guards()
    if guards_of is None:
        return
    if len(_known) >= MAX_SITES:
        _known.clear()
    key = id(site.mask), _is_grad_enabled(), site.rest
    _known[key] = [_Known(guards_of(*tensors).check, plan, site.mask), *_known.get(key, ())][:MAX_SHAPES]


def distinct(a: Any, b: Any) -> tuple[Any, ...]:
    """(a, b), or (a,) if they are one object: guards refuse one in two places. Their number is part of the key."""
    return (a,) if a is b else (a, b)


def _twice_or_wrapped(tensors: tuple[Tensor, ...]) -> bool:
    """Whether guards will not do: tensors are the same, or one is what a transform left behind, to be unwrapped."""
    wrapped = any(is_functorch_wrapped_tensor(x) for x in tensors)
    return wrapped or len({id(x) for x in tensors}) < len(tensors)


@functools.lru_cache(maxsize=1)
def _guards() -> Callable[..., Any] | None:
    """What makes guards of tensors, in a torch where that is known and where it tells apart what it must."""
    if tuple(map(int, torch.__version__.split(".")[:2])) not in KNOWN_VERSIONS:
        return None  # arguments that it does not expect end the process
    made = functools.partial(guards.TensorGuards, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return made if _tells_apart(made) else None


def _tells_apart(made: Callable[..., Any]) -> bool:
    x, y, z = (torch.zeros(2, 3) for _ in range(3))
    check = made(x, y).check
    leaf = torch.zeros(2, 3, requires_grad=True)
    others = (x.t(), x.bool(), x[:1], torch.zeros(2, 6)[:, ::2], x.to("meta"), torch.nn.Parameter(z), leaf, 1, None)
    with torch.autocast("cpu"):
        cast = check(x, z)
    return check(x, z) and not cast and not any(check(x, other) for other in others)


def clear() -> None:
    """Forget every plan."""
    _known.clear()
