"""Error budgets, the merging of partial results and the constants of base-2 softmax; NumPy only, no torch, no DSL.

The tolerance of every comparison in tests, `kilat check` and benchmarks comes from `budget` and from nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LOG2E = 1.0 / math.log(2.0)  # exp(x) = exp2(x * LOG2E)
LN2 = math.log(2.0)

# The distance from 1 to the next number of each type.
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
# The smallest positive number of each type: results below it are stored as this or zero.
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
# Relative error allowed to arithmetic in the accumulation type: sums of products, exp, running maxima.
ACCUMULATION = {"float32": 2.0**-21, "float64": 2.0**-50}


def accumulation_dtype(dtype: str) -> str:
    """The type that sums are kept in: float64 for float64 inputs, float32 for all others."""
    return "float64" if dtype == "float64" else "float32"


class BudgetExceededError(AssertionError):
    """A result is further from the exact one than its budget allows."""


@dataclass(frozen=True)
class Budget:
    """The largest absolute error allowed in one tensor, and where it comes from."""

    rounding: float  # 2 (1 + 12 / n) max |rounded - exact|: storing P, out and dS in the data's type
    storage: float  # eps * max |exact| + the smallest number: storing the result
    accumulation: float  # 2^-21 * (1 + max |s|) * max(magnitude): arithmetic in float32 (2^-50 in float64)

    @property
    def limit(self) -> float:
        """The sum of the three parts."""
        return self.rounding + self.storage + self.accumulation


def budget(exact: Any, rounded: Any, magnitude: Any, *, dtype: str, accumulate: str, max_score: float) -> Budget:
    """The error budget of one tensor x (out, lse, dq, dk, dv, dsink, dbias or a user tensor's gradient).

    limit = 2 (1 + 12/n) max|rounded - exact| + eps(dtype) max|exact| + tiny(dtype) + c (1 + max|s|) max(magnitude).
    n is the number of entries: the largest of a few rounding errors may by chance be small, so few entries (a sink's
    gradient has one a head) get more room. c = 2^-21 (2^-50 where sums are kept in float64), because an absolute error
    of about c max|s| in a score becomes a relative error of that size in exp(s), and so in every term of the sums that
    follow. Arrays of x's shape:

    - exact: x in float64 from the stored inputs, and nothing rounded;
    - rounded, or a tuple of them: runs in float64 with every entry of P = exp(s - max) moved by half a spacing of q's
      dtype before P V, of out before delta = sum(dO * out), of P = exp(s - lse) before P^T dO, and of dS before dS K
      and dS^T Q: up or down at random, which is sqrt(3) times what rounding does in the mean square. It is what no
      kernel working in that dtype can avoid. In a second run dS moves the other way, so that errors of out and dS
      cannot cancel in both;
    - magnitude: the sum x with every term replaced by its absolute value: no cancellation.

    dtype is what x is stored in, accumulate what sums are kept in (`accumulation_dtype` of q's dtype), and max_score
    the largest |s| of a visible pair, or |scale| sum |q_c k_c| where that is larger. Only finite entries count.
    """
    exact, magnitude = _float64(exact), _float64(magnitude)
    runs = rounded if isinstance(rounded, tuple) else (rounded,)
    moved = max(max_error(x, exact, finite_only=True) for x in runs)
    return Budget(
        rounding=2.0 * (1.0 + 12.0 / max(exact.size, 1)) * moved,
        storage=EPS[dtype] * _largest(exact) + TINY[dtype],
        accumulation=ACCUMULATION[accumulate] * (1.0 + max_score) * _largest(magnitude),
    )


def max_error(actual: Any, exact: Any, *, finite_only: bool = False) -> float:
    """max |actual - exact|; inf if NaN or an infinity stands in one and not in the other (unless finite_only)."""
    actual, exact = _float64(actual), _float64(exact)
    finite = np.isfinite(actual) & np.isfinite(exact)
    same = finite | (np.isnan(actual) & np.isnan(exact)) | (actual == exact)
    if not finite_only and not same.all():
        return math.inf
    with np.errstate(invalid="ignore"):
        return _largest(np.where(finite, actual - exact, 0.0))


def check(name: str, actual: Any, exact: Any, allowed: Budget) -> float:
    """Return max |actual - exact| over the budget; raise BudgetExceededError, naming the worst entry, if above 1."""
    actual, exact = _float64(actual), _float64(exact)
    if actual.shape != exact.shape:
        raise BudgetExceededError(f"{name} must have shape {exact.shape}; got {actual.shape}")
    error = max_error(actual, exact)
    if error <= allowed.limit:
        return error / allowed.limit
    with np.errstate(invalid="ignore"):
        distance = np.where(actual == exact, 0.0, np.abs(actual - exact))
    distance = np.where(np.isnan(actual) & np.isnan(exact), 0.0, np.nan_to_num(distance, nan=math.inf))
    at = tuple(int(n) for n in np.unravel_index(int(distance.argmax()), distance.shape))
    wrong = int((distance > allowed.limit).sum())
    raise BudgetExceededError(
        f"{name}{list(at)} must be {exact[at]:.9g} within {allowed.limit:.3g}; got {actual[at]:.9g} "
        f"({wrong} of {actual.size} entries off; {allowed})"
    )


def merge_partials(outs: list[Any], lses: list[Any], xp: Any = np) -> tuple[Any, Any]:
    """Combine attention over disjoint sets of keys, in list order.

    m = max_n lse_n, w_n = exp(lse_n - m), lse = m + log(sum_n w_n), out = sum_n w_n out_n / sum_n w_n. A part whose lse
    is -inf changes nothing, whatever its out holds; if all are -inf the result is (0, -inf). outs are [..., seqlen,
    heads, dim], lses [..., heads, seqlen]; xp is numpy or torch, and the arithmetic is in the type of the arrays given.
    """
    peak = lses[0]
    for lse in lses[1:]:
        peak = xp.maximum(peak, lse)
    shift = xp.where(peak == -math.inf, xp.zeros_like(peak), peak)  # -inf - -inf would be NaN
    total, out = xp.zeros_like(peak), xp.zeros_like(outs[0])
    for part, lse in zip(outs, lses, strict=True):
        weight = xp.exp(lse - shift)
        total = total + weight
        weight, seen = (xp.swapaxes(x, -1, -2)[..., None] for x in (weight, lse != -math.inf))
        out = out + xp.where(seen, weight * part, xp.zeros_like(part))
    empty = total == 0
    safe = xp.where(empty, xp.ones_like(total), total)
    return out / xp.swapaxes(safe, -1, -2)[..., None], xp.where(empty, peak, shift + xp.log(safe))


def _float64(x: Any) -> Array:
    """A float64 NumPy array of a NumPy array or a torch tensor of any floating type."""
    if hasattr(x, "detach"):
        x = x.detach().double().cpu().numpy()
    return np.asarray(x, dtype=np.float64)


def _largest(x: Array) -> float:
    """max |x| over the finite entries; 0 if there is none."""
    return float(np.abs(x, where=np.isfinite(x), out=np.zeros_like(x)).max(initial=0.0))
