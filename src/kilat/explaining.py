"""Which backend a call would take, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kilat import dispatch
from kilat.gather import modifiers
from kilat.numpy_door import as_int32, as_tensors, is_numpy, torch_dtype
from kilat.planning import gradients
from kilat.problem import Operands, Options
from kilat.validate import problem_of

if TYPE_CHECKING:
    from kilat.dropout import Dropout
    from kilat.masks import Mask
    from kilat.problem import Problem
    from kilat.scores import ScoreModifier


def explain(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    *,
    mask: Mask | None = None,
    scores: Sequence[ScoreModifier] = (),
    sink: Any = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    seqlens_q: Any = None,
    seqlens_kv: Any = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> dispatch.Report:
    """What `attention` (with offsets: `ragged_attention`) would do: every backend with its reasons.

    The Report's `chosen` is None where the call would raise UnsupportedError. Raises what the call would raise for
    wrong arguments.
    """
    if is_numpy(q, k, v):
        q, k, v, sink = as_tensors({"q": q, "k": k, "v": v, "sink": sink})
        cu_seqlens_q, cu_seqlens_kv = as_int32({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv})
        seqlens_q, seqlens_kv = as_int32({"seqlens_q": seqlens_q, "seqlens_kv": seqlens_kv})
    operands = Operands(q, k, v, cu_seqlens_q, cu_seqlens_kv, seqlens_q, seqlens_kv)
    structure, ordered, kind, p = modifiers(mask, scores, sink, dropout, operands)
    options = Options(
        "dense" if cu_seqlens_q is None else "ragged",
        structure,
        ordered,
        scale,
        kind,
        p,
        torch_dtype(out_dtype),
        deterministic,
        batch_invariant,
        None,
        backend,
    )
    return dispatch.explain(problem(options, operands), backend)


def problem(options: Options, operands: Operands) -> Problem:
    """The Problem of a call, with the gradients that autograd would ask for."""
    problem_of(options, operands)
    names = operands.present()
    wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in operands.flatten(names))
    return problem_of(options, operands, gradients(options, names, wanted))
