"""What a call must give and how exactly: four runs of the oracle turned into an error budget for each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kilat import numerics, reference
from kilat.problem import Grads, Operands, Problem


@dataclass
class Expected:
    """Float64 results and their budgets by name: out, lse, and gradients q, k, v, sink, score.<n>.<m>."""

    exact: dict[str, Tensor]
    budgets: dict[str, numerics.Budget]

    def check(self, actual: dict[str, Tensor]) -> dict[str, float]:
        """Error over budget of every tensor given, by name; raises BudgetExceededError if one is above 1."""
        return {name: numerics.check(name, x, self.exact[name], self.budgets[name]) for name, x in actual.items()}


def named(grads: Grads) -> dict[str, Tensor]:
    """The gradients of a backward that are there, by name."""
    found = {"q": grads.q, "k": grads.k, "v": grads.v, "sink": grads.sink}
    for n, group in enumerate(grads.score_tensors):
        found |= {f"score.{n}.{m}": x for m, x in enumerate(group)}
    return {name: x for name, x in found.items() if x is not None}


def expected(
    problem: Problem,
    operands: Operands,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    heads: tuple[int, ...] | None = None,
) -> Expected:
    """The exact out and lse of a call, its gradients if dout is given, and the budget of each (see `numerics.budget`).

    `rows` and `heads` restrict the oracle to some query rows and heads, for sequences too long for all of them: compare
    those entries only. Gradients of k and v need all rows.
    """
    chosen: dict[str, Any] = {"rows": rows, "heads": heads}
    runs: list[dict[str, Tensor]] = []
    for mode in ("plain", "rounded", "opposed", "magnitude"):
        out, lse = reference.forward(problem, operands, exact=True, mode=mode, **chosen)
        found = {"out": out, "lse": lse}
        if dout is not None:
            grads = reference.backward(problem, operands, out, lse, dout, dlse, exact=True, mode=mode, **chosen)
            found |= named(grads)
        runs.append(found)
    exact, rounded, opposed, magnitude = runs
    magnitude["lse"] = torch.ones_like(exact["lse"])
    stored, accumulate = _dtypes(problem, operands), numerics.accumulation_dtype(problem.dtype)
    largest = max_score(problem, operands, **chosen)
    budgets = {
        name: numerics.budget(
            exact[name],
            (rounded[name], opposed[name]),
            magnitude[name],
            dtype=stored[name],
            accumulate=accumulate,
            max_score=largest,
        )
        for name in exact
    }
    return Expected(exact, budgets)


def _dtypes(problem: Problem, op: Operands) -> dict[str, str]:
    """What each result is stored in: a gradient in its input's dtype."""
    stored = {"out": problem.out_dtype, "lse": numerics.accumulation_dtype(problem.dtype)}
    tensors = {"q": op.q, "k": op.k, "v": op.v, "sink": op.sink}
    for n, group in enumerate(op.score_tensors):
        tensors |= {f"score.{n}.{m}": x for m, x in enumerate(group)}
    return stored | {name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items() if x is not None}


def max_score(
    problem: Problem, operands: Operands, rows: Tensor | None = None, heads: tuple[int, ...] | None = None
) -> float:
    """The scale of errors in exp(s): the largest |scale| sum |q_c k_c| or |s| after a score modifier, of visible pairs.

    A dot product is as inexact as the largest of its partial sums, whatever is left of them in the end.
    """
    largest = 0.0
    for t in reference.tiles(problem, operands, "plain", rows, heads):
        for s in (abs(problem.scale) * t.q.abs() @ t.k.abs().T, *t.stages[1:]):
            seen = s[t.visible & torch.isfinite(s)].abs()
            largest = max(largest, float(seen.max()) if len(seen) else 0.0)
    return largest
