"""The door for torch.func: grad, vjp and vmap in any nesting. Forward-mode AD and second derivatives raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kilat import views
from kilat.autograd import Call, call_of, run_backward
from kilat.batching import vmap_backward, vmap_forward
from kilat.planning import lookup
from kilat.validate import problem_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kilat.problem import Operands, Options

NO_JVP = "kilat has no forward-mode derivative (jvp, jacfwd, hessian); use reverse mode (grad, vjp, jacrev)"
NO_SECOND = "kilat has no second derivative: the gradients of attention cannot be differentiated again"


def run(options: Options, operands: Operands, names: tuple[str, ...], return_lse: bool) -> Any:
    """Attention on wrapped tensors: out, or (out, lse) if `return_lse`."""
    problem_of(options, operands)
    if forward_ad._current_level >= 0:
        for tensor in operands.flatten(names):
            if tensor.is_floating_point() and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(NO_JVP)
    views.apply(operands, views.fixes_of(options, operands, names))
    call = call_of(options, operands, names, return_lse)
    out, lse = _Forward.apply(call, *operands.flatten(names))
    return (out, lse) if return_lse else out


def forward(call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) of plain tensors."""
    operands = call.operands(tensors)
    plan = lookup(call.options, operands, call.names, False)
    plan.check(operands)
    views.apply(operands, plan.fixes)
    return plan.backend.forward(plan.problem, operands)


def gradients(
    call: Call,
    wanted: tuple[bool, ...],
    tensors: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, ...]:
    """The gradients of the plain tensors marked in `wanted`, and only those."""
    operands = call.operands(tensors)
    plan = lookup(call.options, operands, call.names, False)
    views.apply(operands, plan.fixes)
    out, lse = views.last_axis(out), views.last_axis(lse)
    grads = run_backward(plan, operands, wanted, out, lse, dout, dlse)
    return tuple(grad for grad in grads if grad is not None)


def backward(
    call: Call,
    wanted: tuple[bool, ...],
    tensors: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:
    """Gradients under transforms, in the order of the call's names, None where not wanted."""
    if dout is None:
        dout = torch.zeros_like(out)
    rest = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
    found = iter(_Backward.apply(call, wanted, *tensors, *rest))
    return [next(found) if want else None for want in wanted]


class _Forward(torch.autograd.Function):
    """(call, *flat operands) -> (out, lse)."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return forward(call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)
        if not call.return_lse:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[1:])
        if (dout is None and dlse is None) or True not in wanted:
            return (None,) * (1 + len(tensors))
        return None, *backward(ctx.call, wanted, tensors, out, lse, dout, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(NO_JVP)

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[Any, ...], call: Call, *tensors: Tensor
    ) -> Any:
        def again(call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return _Forward.apply(call, *tensors)

        return vmap_forward(info.batch_size, in_dims[1:], call, tensors, again), (0, 0)


class _Backward(torch.autograd.Function):
    """(call, wanted, *flat operands, out, lse, dout[, dlse]) -> the gradients of the operands marked in wanted."""

    @staticmethod
    def forward(call: Call, wanted: tuple[bool, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(call.names)
        out, lse, dout, *dlse = tensors[count:]
        return gradients(call, wanted, tensors[:count], out, lse, dout, dlse[0] if dlse else None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(NO_SECOND)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(NO_JVP)

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[Any, ...], call: Call, wanted: tuple[bool, ...], *tensors: Tensor
    ) -> Any:
        def again(call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return _Backward.apply(call, wanted, *tensors)

        grads = vmap_backward(info.batch_size, in_dims[2:], call, wanted, tensors, again)
        return grads, (0,) * len(grads)
