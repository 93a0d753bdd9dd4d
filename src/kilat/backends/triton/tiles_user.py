# pyright: basic, reportOperatorIssue=false
# Triton's compiler reads these functions, not Python: values are tensors of Triton, which carry no types here.
"""Functions that user expressions call: what Triton's language lacks, or rounds another way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh x, as exact near 0 as elsewhere: an odd polynomial below 0.6, exponentials above."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    large = (1.0 - e) / (1.0 + e)
    z = x * x
    # tanh(x) / x on [0, 0.62] by weighted least squares: relative error 4e-9
    more = ((-0.0057430025 * z + 0.0206714775) * z - 0.0537491180) * z + 0.1333154887
    small = size * (1.0 + z * (z * more - 0.3333328664))
    result = tl.where(size < 0.6, small, large)
    return tl.where(x < 0.0, -result, result)


@triton.jit
def floordiv_int(a, b):
    """a / b rounded down, 0 for b = 0 (Triton's // rounds toward zero)."""
    divisor = tl.where(b == 0, 1, b)
    quotient = a // divisor
    rest = a - quotient * divisor
    down = (rest != 0) & ((rest < 0) != (divisor < 0))
    return tl.where(b == 0, 0, quotient - down.to(tl.int32))


@triton.jit
def mod_int(a, b):
    """The remainder of `floordiv_int`, 0 for b = 0."""
    return tl.where(b == 0, 0, a - floordiv_int(a, b) * b)


@triton.jit
def floordiv_float(a, b):
    """floor(a / b)."""
    return tl.floor(a / b)


@triton.jit
def mod_float(a, b):
    """a - floor(a / b) * b: it has the sign of b."""
    return a - tl.floor(a / b) * b
