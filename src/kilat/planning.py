"""From the arguments of a call to a Problem and a backend, remembered, so that the same call costs a look-up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kilat import config
from kilat.dispatch import choose
from kilat.problem import Operands, present_names
from kilat.validate import problem_of
from kilat.validate_values import check_values, has_values
from kilat.views import Fix, fixes_of

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.backends.protocol import Backend
    from kilat.problem import Options, Problem

Direct = Callable[["Tensor", "Tensor", "Tensor"], "tuple[Tensor, Tensor]"]
"""(q, k, v) -> (out, lse)."""

PLAIN = ("q", "k", "v")
"""The operands of a call without any optional tensor."""

MAX_PLANS = 4096
"""Plans kept; all are dropped when there are more (each costs a millisecond to make again, at most)."""

_plans: dict[Any, Plan] = {}


class Plan:
    """What a kind of call needs: its Problem, the backend, the operands' names and how some of them must be viewed."""

    __slots__ = (
        "_backward",
        "backend",
        "checked",
        "direct",
        "due",
        "fixes",
        "names",
        "options",
        "problem",
        "uses",
        "wanted",
    )

    def __init__(self, options: Options, operands: Operands, names: tuple[str, ...], wanted: tuple[bool, ...]) -> None:
        self.options = options
        self.names = names
        self.wanted = wanted
        self.problem: Problem = problem_of(options, operands, gradients(options, names, wanted))
        self.backend: Backend = choose(self.problem, options.backend)
        self.fixes: tuple[Fix, ...] = fixes_of(options, operands, names)
        self.checked = has_values(operands) and (operands.q.device.type == "cpu" or config.check_values())
        self.uses, self.due = 0, 2  # see `shortcut.remember`
        self.direct: Direct = self._direct
        """The forward of q, k and v of a call that has no other tensors."""
        self._backward: dict[tuple[bool, ...], Problem] = {}

    def _direct(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.backend.forward(self.problem, Operands(q, k, v))

    def prepare(self, operands: Operands) -> None:
        """Let the backend shorten `direct`, if it can."""
        shorten = getattr(self.backend, "direct", None)
        if shorten is not None and self.names == PLAIN:
            self.direct = shorten(self.problem, operands) or self.direct

    def check(self, operands: Operands) -> None:
        """Raise ValueError if lengths, offsets or page tables hold values that cannot be."""
        if self.checked:
            check_values(self.problem, operands)

    def backward_problem(self, wanted: tuple[bool, ...]) -> Problem:
        """The Problem of a backward pass that must return the gradients of the operands marked in `wanted`."""
        if wanted == self.wanted:
            return self.problem
        problem = self._backward.get(wanted)
        if problem is None:
            grad_of = gradients(self.options, self.names, wanted)
            problem = replace(self.problem, needs_grad=True, grad_of=grad_of, memo={})
            self._backward[wanted] = problem
        return problem


_known_names = functools.lru_cache(maxsize=1024)(present_names)


def names_of(operands: Operands) -> tuple[str, ...]:
    """`operands.present()`, remembered (but not where a tracer looks on)."""
    return operands.present() if torch.compiler.is_compiling() else _known_names(*operands.given())


def gradients(options: Options, names: tuple[str, ...], wanted: tuple[bool, ...]) -> frozenset[str]:
    """`Problem.grad_of` for the operands marked in `wanted`."""
    found: set[str] = set()
    for name, want in zip(names, wanted, strict=False):
        if not want:
            continue
        kind, _, index = name.partition(".")
        if kind == "score":
            kind = {"Bias": "bias", "Score": "score_tensors"}.get(type(options.scores[int(index[0])]).__name__, "")
        if kind in ("q", "k", "v", "sink", "bias", "score_tensors"):
            found.add(kind)
    return frozenset(found)


def lookup(options: Options, operands: Operands, names: tuple[str, ...], grad: bool) -> Plan:
    """The plan of a call; made, with every check, if it is new. `grad`: gradients may be asked for."""
    q, k, v = operands.q, operands.k, operands.v
    try:
        # Structures by id: gather.py makes equal ones one object, which the plan that is found here keeps alive.
        scores = options.scores
        key: tuple[Any, ...] = (
            options.layout,
            id(options.mask),
            tuple([id(score) for score in scores]) if scores else (),
            options[3:],
            q.shape,
            q.stride(),
            q.dtype,
            q.device,
            k.shape,
            k.stride(),
            k.dtype,
            k.device,
            v.shape,
            v.stride(),
            v.dtype,
            v.device,
        )
        wanted: tuple[bool, ...] = ()
        if names is PLAIN:
            if grad:
                wanted = (q.requires_grad, k.requires_grad, v.requires_grad)
        else:
            extras = operands.flatten(names)
            for x in extras[3:]:
                key += (x.shape, x.stride(), x.dtype, x.device)
            key += (names,)
            if grad:
                wanted = tuple([x.requires_grad for x in extras])
        if True in wanted:
            key += (wanted,)
        if bool in (type(options.scale), type(options.num_splits)):  # True equals 1, so it would find the plan of 1
            problem_of(options, operands)
        if operands.out is not None:
            key += ("out", *_meta(operands.out), grad and operands.out.requires_grad)
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Something is not a strided tensor, or an option cannot be hashed: validation says which, in its own words.
        problem_of(options, operands)
        raise
    if plan is None:
        plan = Plan(options, operands, names, wanted if True in wanted else ())
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _meta(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def clear() -> None:
    """Forget every plan (tests, and a change of the list of backends)."""
    _plans.clear()
