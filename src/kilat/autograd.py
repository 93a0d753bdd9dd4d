"""The eager door: a direct call without gradients, a plain autograd.Function with them, and the choice among doors.

The other doors: `functorch.py` for torch.func transforms and forward-mode AD, `compiled.py` for tracers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from kilat import views
from kilat.planning import PLAIN, lookup
from kilat.problem import Operands
from kilat.shortcut import remember
from kilat.validate import problem_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kilat.planning import Plan
    from kilat.problem import Grads, Options
    from kilat.shortcut import Site

_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack


class Call(NamedTuple):
    """A call without its tensors: what the functorch and the compile door carry beside a flat list of tensors."""

    options: Options
    names: tuple[str, ...]
    return_lse: bool
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    seed: int = 0
    offset: int = 0

    def operands(self, tensors: Sequence[Tensor]) -> Operands:
        """The Operands that `tensors` were flattened from."""
        operands = Operands.unflatten(self.names, tensors, len(self.options.scores))
        operands.max_seqlen_q, operands.max_seqlen_kv = self.max_seqlen_q, self.max_seqlen_kv
        if "seed" not in self.names:
            operands.seed = self.seed
        if "offset" not in self.names:
            operands.offset = self.offset
        return operands


def call_of(options: Options, operands: Operands, names: tuple[str, ...], return_lse: bool) -> Call:
    """The Call of these operands."""
    seed, offset = (x if isinstance(x, int) else 0 for x in (operands.seed, operands.offset))
    return Call(options, names, return_lse, operands.max_seqlen_q, operands.max_seqlen_kv, seed, offset)


def run(
    options: Options,
    operands: Operands,
    names: tuple[str, ...],
    return_lse: bool,
    site: Site | None = None,
    plan: Plan | None = None,
) -> Any:
    """Attention through the door that fits: out, or (out, lse) if `return_lse`. `site`: see `shortcut.remember`.

    plan: what `lookup` would find, if that is known.
    """
    if _is_compiling():
        return _compiled_run(options, operands, names, return_lse)
    types = (type(operands.q), type(operands.k), type(operands.v))
    if maybe_current_level() is not None or forward_ad._current_level >= 0:
        from kilat import functorch

        return functorch.run(options, operands, names, return_lse)
    if not _PLAIN_TYPES.issuperset(types) or _dispatch_modes():
        if not all(issubclass(kind, Tensor) for kind in types):
            problem_of(options, operands)  # raises, in its own words
        return _compiled_run(options, operands, names, return_lse)
    if plan is None:
        plan = lookup(options, operands, names, torch.is_grad_enabled())
    if plan.checked:
        plan.check(operands)
    if plan.fixes:
        views.apply(operands, plan.fixes)
    if site is not None:
        remember(site, operands, plan)
    if plan.wanted:
        return _Attention.apply(plan, operands, return_lse, *operands.flatten(names))
    out, lse = plan.backend.forward(plan.problem, operands)
    return (out, lse) if return_lse else out


def again(plan: Plan, operands: Operands | None, return_lse: bool, tensors: tuple[Tensor, ...]) -> Any:
    """Attention by a plan that `shortcut.find` found for these tensors; operands None: there are q, k and v alone."""
    if plan.wanted:
        return _apply(plan, operands, return_lse, *tensors)
    out, lse = plan.direct(*tensors) if operands is None else plan.backend.forward(plan.problem, operands)
    return (out, lse) if return_lse else out


def _compiled_run(options: Options, operands: Operands, names: tuple[str, ...], return_lse: bool) -> Any:
    from kilat import compiled

    return compiled.run(options, operands, names, return_lse)


def flat_gradients(grads: Grads, names: tuple[str, ...], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients in the order of `names`, None where not wanted."""
    if names is PLAIN:
        return [grad if want else None for grad, want in zip((grads.q, grads.k, grads.v), wanted, strict=True)]
    found: list[Tensor | None] = []
    for name, want in zip(names, wanted, strict=True):
        kind, _, index = name.partition(".")
        if not want:
            found.append(None)
        elif kind == "score":
            n, _, i = index.partition(".")
            found.append(grads.score_tensors[int(n)][int(i)])
        else:
            found.append(getattr(grads, kind))
    return found


class _Attention(torch.autograd.Function):
    """(plan, operands, return_lse, *flat operands) -> out or (out, lse); autograd follows the flat operands.

    Operands are None where the flat ones are all there is.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, operands: Operands | None, return_lse: bool, *tensors: Tensor) -> Any:
        if operands is None:
            out, lse = plan.direct(*tensors)
            ctx.call = plan.options, plan.names, return_lse
        else:
            out, lse = plan.backend.forward(plan.problem, operands)
            ctx.call = call_of(plan.options, operands, plan.names, return_lse)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        *tensors, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if dout is None and dlse is None:
            return (None,) * (3 + len(tensors))
        call = ctx.call if isinstance(ctx.call, Call) else Call(*ctx.call)
        if torch.is_grad_enabled():
            # create_graph=True: gradients that carry the message that there are no second ones.
            from kilat import functorch

            grads = functorch.backward(call, wanted, tensors, out, lse, dout, dlse)
        else:
            operands = Operands(*tensors) if plan.names is PLAIN else call.operands(tensors)
            grads = run_backward(plan, operands, wanted, out, lse, dout, dlse)
        return None, None, None, *grads


_apply: Any = getattr(super(torch.autograd.Function, _Attention), "apply")  # noqa: B009 (torch has no type for it)
"""`_Attention.apply` without its look for transforms of torch.func, which a guard has done."""


def run_backward(
    plan: Plan,
    operands: Operands,
    wanted: tuple[bool, ...],
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:
    """The gradients of the operands marked in `wanted`, in the order of the plan's names."""
    dout = torch.zeros_like(out) if dout is None else views.last_axis(dout)
    if dlse is not None:
        dlse = views.last_axis(dlse)
    grads = plan.backend.backward(plan.backward_problem(wanted), operands, out, lse, dout, dlse)
    return flat_gradients(grads, plan.names, wanted)
