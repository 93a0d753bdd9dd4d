"""The door for tracers (torch.compile, torch.export, fake tensors): operators `kilat::forward` and `kilat::backward`.

Their schema carries tensors, numbers that may be symbolic, and a text that says the rest; the Problem is made inside,
so that one trace serves every length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kilat import functorch
from kilat.autograd import Call
from kilat.batching import vmap_backward, vmap_forward
from kilat.masks import Mask
from kilat.problem import Operands, Options
from kilat.scores import ScoreModifier
from kilat.validate import DTYPE_NAMES, problem_of

NO_HINT = -1
"""Stands for max_seqlen None in the operators' schema."""


def spec_of(options: Options, names: tuple[str, ...], return_lse: bool) -> str:
    """Everything about a call but tensors, scale, dropout p and the hints, as lines of text.

    Plain string operations, which a tracer can follow: it thereby guards on every value that it reads.
    """
    lines = [
        options.layout,
        "" if options.mask is None else options.mask.to_text(),
        str(options.scale is not None),
        options.dropout,
        "" if options.out_dtype is None else DTYPE_NAMES[options.out_dtype],
        str(options.deterministic),
        str(options.batch_invariant),
        "" if options.num_splits is None else str(options.num_splits),
        options.backend,
        ",".join(names),
        str(return_lse),
        "" if options.ring_first is None else str(options.ring_first),
    ]
    lines += [score.to_text() for score in options.scores]
    return "\n".join(lines)


@functools.lru_cache(maxsize=1024)
def _parse(spec: str) -> tuple[Options, tuple[str, ...], bool, bool]:
    """(options without scale and p, names, return_lse, whether a scale was given) of a text that `spec_of` wrote."""
    layout, mask, scaled, dropout, out_dtype, deterministic, invariant, splits, backend, names, lse, ring, *scores = (
        spec.split("\n")
    )
    options = Options(
        cast("Any", layout),
        Mask.from_text(mask) if mask else None,
        tuple(ScoreModifier.from_text(text) for text in scores),
        None,
        cast("Any", dropout),
        0.0,
        getattr(torch, out_dtype) if out_dtype else None,
        deterministic == "True",
        invariant == "True",
        int(splits) if splits else None,
        backend,
        int(ring) if ring else None,
    )
    return options, tuple(names.split(",")), lse == "True", scaled == "True"


def call_from(spec: str, scale: float, dropout_p: float, max_seqlen_q: int, max_seqlen_kv: int) -> Call:
    """The Call that an operator's arguments describe."""
    options, names, return_lse, scaled = _parse(spec)
    options = options._replace(scale=scale if scaled else None, dropout_p=dropout_p)
    hint_q, hint_kv = (None if hint == NO_HINT else hint for hint in (max_seqlen_q, max_seqlen_kv))
    return Call(options, names, return_lse, hint_q, hint_kv)


@torch.library.custom_op("kilat::forward", mutates_args=())
def forward_op(
    tensors: Sequence[Tensor], spec: str, scale: float, dropout_p: float, max_seqlen_q: int, max_seqlen_kv: int
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operands that `spec` names."""
    call = call_from(spec, scale, dropout_p, max_seqlen_q, max_seqlen_kv)
    out, lse = functorch.forward(call, tensors)
    return out.contiguous(), lse.contiguous()


@forward_op.register_fake
def _(
    tensors: Sequence[Tensor], spec: str, scale: float, dropout_p: float, max_seqlen_q: int, max_seqlen_kv: int
) -> tuple[Tensor, Tensor]:
    call = call_from(spec, scale, dropout_p, max_seqlen_q, max_seqlen_kv)
    operands = call.operands(tensors)
    problem_of(call.options, operands)
    q, v = operands.q, operands.v
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=call.options.out_dtype or q.dtype)
    accumulation = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=accumulation)


@torch.library.custom_op("kilat::backward", mutates_args=())
def backward_op(
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    wanted: Sequence[int],
    spec: str,
    scale: float,
    dropout_p: float,
    max_seqlen_q: int,
    max_seqlen_kv: int,
) -> list[Tensor]:
    """The gradients of the operands whose place is in `wanted`; results are out, lse, dout and dlse if there is one."""
    call = call_from(spec, scale, dropout_p, max_seqlen_q, max_seqlen_kv)
    out, lse, dout, *dlse = results
    flags = tuple(n in wanted for n in range(len(tensors)))
    grads = functorch.gradients(call, flags, tensors, out, lse, dout, dlse[0] if dlse else None)
    return [grad.contiguous() for grad in grads]


@backward_op.register_fake
def _(
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    wanted: Sequence[int],
    spec: str,
    scale: float,
    dropout_p: float,
    max_seqlen_q: int,
    max_seqlen_kv: int,
) -> list[Tensor]:
    return [tensors[n].new_empty(tensors[n].shape) for n in wanted]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, *rest = inputs
    ctx.rest = rest
    ctx.count = len(tensors)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)
    if not _parse(rest[0])[2]:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, (out, lse) = saved[: ctx.count], saved[ctx.count :]
    needed = ctx.needs_input_grad[0]
    flags = needed if isinstance(needed, list | tuple) else [needed] * ctx.count
    wanted = [n for n, (flag, x) in enumerate(zip(flags, tensors, strict=True)) if flag and _differentiable(ctx, n, x)]
    grads: list[Tensor | None] = [None] * ctx.count
    if wanted and (dout is not None or dlse is not None):
        results = [out, lse, torch.zeros_like(out) if dout is None else dout]
        results += [] if dlse is None else [dlse]
        found = backward_op(list(tensors), results, wanted, *ctx.rest)
        for n, grad in zip(wanted, found, strict=True):
            grads[n] = grad
    return grads, None, None, None, None, None


def _differentiable(ctx: Any, n: int, x: Tensor) -> bool:
    name = _parse(ctx.rest[0])[1][n]
    return x.is_floating_point() and (name in ("q", "k", "v", "sink") or name.startswith("score."))


forward_op.register_autograd(_backward, setup_context=_setup_context)


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(functorch.NO_SECOND)


backward_op.register_autograd(_no_second)


@forward_op.register_vmap
def _(info: Any, in_dims: Any, tensors: Sequence[Tensor], *rest: Any) -> Any:
    call = call_from(*rest)

    def again(call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return forward_op(list(tensors), *rest)

    return vmap_forward(info.batch_size, in_dims[0], call, tensors, again), (0, 0)


@backward_op.register_vmap
def _(
    info: Any, in_dims: Any, tensors: Sequence[Tensor], results: Sequence[Tensor], wanted: Sequence[int], *rest: Any
) -> Any:
    call = call_from(*rest)
    count = len(tensors)

    def again(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        return backward_op(list(tensors[:count]), list(tensors[count:]), wanted, *rest)

    dims = [*in_dims[0], *in_dims[1]]
    flags = [n in wanted for n in range(count)]
    grads = list(vmap_backward(info.batch_size, dims, call, flags, [*tensors, *results], again))
    return grads, [0] * len(grads)


def run(options: Options, operands: Operands, names: tuple[str, ...], return_lse: bool) -> Any:
    """Attention through the operators: out, or (out, lse) if `return_lse`."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(functorch.NO_JVP)
    names = as_tensors(operands, names)
    scale = 0.0 if options.scale is None else options.scale
    hints = [NO_HINT if x is None else x for x in (operands.max_seqlen_q, operands.max_seqlen_kv)]
    spec = spec_of(options, names, return_lse)
    out, lse = forward_op(operands.flatten(names), spec, scale, options.dropout_p, *hints)
    if operands.out is not None:
        out = operands.out.copy_(out)
    return (out, lse) if return_lse else out


def as_tensors(operands: Operands, names: tuple[str, ...]) -> tuple[str, ...]:
    """Turn an integer seed and offset into tensors, which is what operators take; all names, with the new ones."""
    changed = False
    for name in ("seed", "offset"):
        value = getattr(operands, name)
        if isinstance(value, int) and value != 0:
            signed = value - 2**64 if value >= 2**63 else value
            setattr(operands, name, torch.full((), signed, dtype=torch.int64, device=operands.q.device))
            changed = True
    return operands.present() if changed else names
