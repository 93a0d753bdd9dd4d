"""Mathematics on float and integer vectors, written with the emitter: exp, log, tanh, half types, transpose, Philox.

The functions work on F32 and F64 with any number of lanes, 0 (a scalar) included, and keep NaN. Errors are the largest
seen against long double over the domains in the tests; a machine without fused multiply-add loses about one ulp more.

The polynomials p(r) = 1 + c1 r + ... are fitted to e^r on |r| <= ln(2)/2 for the smallest relative error with
p(0) = 1, by iteratively reweighted least squares (degree 3 to 6; the tests refit them), or interpolate (e^r - 1)/r in
Chebyshev nodes (degree 11). Those of tanh interpolate (tanh(x)/x - 1)/x^2 in x^2 on |x| <= 1/2, in the same nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kilat.backends.cpu.emit import BF16, F16, F32, I16, I32, I64, Function, Type, Value
from kilat.backends.cpu.isa import Isa

LOG2_E = math.log2(math.e)

# degree: c1, c2, ...
EXP_COEFFICIENTS: dict[int, tuple[float, ...]] = {
    3: (1.0001966006918388, 0.5041384186629361, 0.16517690583168426),
    4: (0.9999667118548594, 0.5000302563266159, 0.16787704479990778, 0.04151352571669123),
    5: (0.9999997054760091, 0.4999914622818443, 0.1666763997253929, 0.04189837927223787, 0.008290231439571054),
    6: (
        1.000000032348081,
        0.4999999417500951,
        0.16666430358947631,
        0.04166800729659431,
        0.008374234068187037,
        0.0013843561933402503,
    ),
    11: (
        1.0,
        0.5000000000000006,
        0.1666666666666667,
        0.041666666666572406,
        0.008333333333326084,
        0.0013888888932744835,
        0.00019841269874997539,
        2.4801504022232965e-05,
        2.7557255176003713e-06,
        2.762649230331981e-07,
        2.5105310235689788e-08,
    ),
}
# tanh(x) = x + x^3 (c0 + c1 x^2 + ...) on |x| <= 1/2
_TANH_F32 = (
    -0.33333332794129966,
    0.13333225379339886,
    -0.05393337473375148,
    0.02146998166507713,
    -0.0069413449290215675,
)
_TANH_F64 = (
    -0.3333333333333333,
    0.13333333333329794,
    -0.05396825396357582,
    0.02186948829570526,
    -0.008863229236099647,
    0.003592033043877941,
    -0.0014549563268240286,
    0.0005849525003660172,
    -0.00022104311282916195,
    5.9442213932478704e-05,
)


@dataclass(frozen=True)
class _Format:
    """One IEEE format. ln2_high has trailing zeros enough for exact multiples; exp_low is ln of the least normal."""

    integer: Type
    mantissa: int
    bias: int
    magic: float
    ln2_high: float
    ln2_low: float
    exp_low: float
    degree: int
    log_terms: int
    sqrt_half_bits: int


_SINGLE = _Format(
    I32, 23, 127, 1.5 * 2**23, 0.693145751953125, 1.428606820309417e-06, -126 * math.log(2), 6, 5, 0x3F3504F3
)
_DOUBLE = _Format(
    I64,
    52,
    1023,
    1.5 * 2**52,
    0.6931471787393093,
    1.8206359985041462e-09,
    -1022 * math.log(2),
    11,
    11,
    0x3FE6A09E667F3BCD,
)


def _format(t: Type) -> _Format:
    if t.elem == "float":
        return _SINGLE
    if t.elem == "double":
        return _DOUBLE
    raise TypeError(f"expected float or double lanes; got {t}")


def polynomial(f: Function, x: Value, coefficients: Sequence[float]) -> Value:
    """c[0] + c[1] x + c[2] x^2 + ... by Horner's rule."""
    p = f.const(coefficients[-1], x.type)
    for c in reversed(coefficients[:-1]):
        p = f.fma(p, x, c)
    return p


# ---- exponentials ----------------------------------------------------------------------------------------------------
def exp(f: Function, x: Value, *, accurate: bool = True, degree: int | None = None) -> Value:
    """e^x for x up to 88 (F32) or 709 (F64); exactly 0 where the result would be below the normal numbers, 1 at 0.

        n = round(x log2 e),  r = x - n ln 2,  e^x = 2^n p(r)

    Args:
        x: above its domain the result is unspecified; NaN gives NaN, -inf gives 0.
        accurate: reduce in two steps: 1.1 ulp. Otherwise r is the remainder in log2 units of one fused
            multiply-add, whose relative error grows to 2e-6 at -87 in F32, where the result hardly counts.
        degree: of p, one of 3 to 6 (relative error 1e-4, 3e-6, 1e-7, 2e-9) or 11; default 6 (5 if not accurate) in F32.
    """
    form, t = _format(x.type), x.type
    if degree is None:
        degree = form.degree if accurate or t.elem == "double" else 5
    # The magic sum rounds to an integer in the low bits of z; with the bias in it, a shift makes them 2^n.
    magic = form.magic + form.bias
    z = f.fma(x, LOG2_E, magic)
    n = z - magic
    coefficients = EXP_COEFFICIENTS[degree]
    if accurate:
        r = f.fma(n, -form.ln2_low, f.fma(n, -form.ln2_high, x))
    else:
        r = f.fma(x, LOG2_E, -n)
        coefficients = [c * math.log(2) ** k for k, c in enumerate(coefficients, 1)]
    return _scaled(f, z, polynomial(f, r, [1.0, *coefficients]), x < form.exp_low)


def exp2(f: Function, x: Value, *, degree: int | None = None) -> Value:
    """2^x for x up to 127 (F32) or 1023 (F64); exactly 0 below -126 (-1022); 1 ulp.

        n = round(x),  2^x = 2^n p((x - n) ln 2)

    Args:
        x: above its domain the result is unspecified; NaN gives NaN, -inf gives 0.
        degree: as in `exp`; default 6 in F32, 11 in F64.
    """
    form = _format(x.type)
    magic = form.magic + form.bias
    z = x + magic
    r = x - (z - magic)
    coefficients = [c * math.log(2) ** k for k, c in enumerate(EXP_COEFFICIENTS[degree or form.degree], 1)]
    return _scaled(f, z, polynomial(f, r, [1.0, *coefficients]), x < 1.0 - form.bias)


def _scaled(f: Function, z: Value, p: Value, underflow: Value) -> Value:
    """p 2^n, n + bias standing in the low bits of z; a product, not a sum of bits, since only that keeps NaN."""
    form = _format(p.type)
    bits = f.bitcast(z, p.type.like(form.integer)) << form.mantissa
    return f.select(underflow, 0.0, p * f.bitcast(bits, p.type))


def exp_full(f: Function, x: Value) -> Value:
    """e^x on the whole line, as user functions need it: denormal results and overflow to inf included."""
    form, t = _format(x.type), x.type
    integer = t.like(form.integer)
    # e^low rounds to 0 and e^high to inf; a NaN passes the comparisons as the second operand.
    low, high = -(form.bias + form.mantissa + 2) * math.log(2), (form.bias + 2) * math.log(2)
    x = f.minimum(f.const(high, t), f.maximum(f.const(low, t), x))
    z = f.fma(x, LOG2_E, form.magic)
    n = z - form.magic
    r = f.fma(n, -form.ln2_low, f.fma(n, -form.ln2_high, x))
    p = polynomial(f, r, [1.0, *EXP_COEFFICIENTS[form.degree]])
    whole = f.bitcast(z, integer) - f.bitcast(f.const(form.magic, t), integer)
    half = whole.ashr(1)
    for part in (half, whole - half):  # 2^n itself may be outside the format
        p = p * f.bitcast((part + form.bias) << form.mantissa, t)
    return p


# ---- logarithm, hyperbolic tangent -----------------------------------------------------------------------------------
def log(f: Function, x: Value) -> Value:
    """Natural logarithm on the whole line, 1 ulp: log(0) = -inf, log(inf) = inf, NaN below 0.

    x = 2^e m, sqrt(1/2) <= m < sqrt(2),  s = (m - 1)/(m + 1),  log x = e ln 2 + 2 (s + s^3/3 + s^5/5 + ...)
    """
    form, t = _format(x.type), x.type
    integer = t.like(form.integer)
    denormal = x < 2.0 ** (1 - form.bias)
    normal = f.select(denormal, x * 2.0**form.mantissa, x)
    bits = f.bitcast(normal, integer)
    e = (bits - form.sqrt_half_bits).ashr(form.mantissa)
    m = f.bitcast(bits - (e << form.mantissa), t) - 1.0
    k = f.cast("sitofp", e, t) - f.select(denormal, f.const(float(form.mantissa), t), 0.0)
    s = m / (m + 2.0)
    s2 = s * s
    # log(1 + m) = m - (m^2/2 - s (m^2/2 + R(s^2))) keeps m itself exact, so that numbers near 1 lose no digit
    tail = s2 * polynomial(f, s2, [2.0 / (2 * i + 3) for i in range(form.log_terms)])
    square = m * m * 0.5
    small = square - s * (square + tail)
    y = f.fma(k, form.ln2_high, m - (small - k * form.ln2_low))
    y = f.select(x.eq(math.inf), x, y)
    y = f.select(x.eq(0.0), f.const(-math.inf, t), y)
    return f.select(x >= 0.0, y, f.const(math.nan, t))


def tanh(f: Function, x: Value) -> Value:
    """Hyperbolic tangent on the whole line, 2.5 ulp.

    tanh |x| = (1 - e)/(1 + e),  e = exp(-2 |x|); an odd polynomial where |x| <= 1/2 and 1 - e would cancel.
    """
    a = absolute(f, x)
    e = exp(f, a * -2.0)
    large = (1.0 - e) / (1.0 + e)
    a2 = a * a
    small = f.fma(a * a2, polynomial(f, a2, _TANH_F32 if x.type.elem == "float" else _TANH_F64), a)
    return copysign(f, f.select(a < 0.5, small, large), x)


def absolute(f: Function, x: Value) -> Value:
    """|x|, of floats and of signed integers."""
    if x.type.is_float:
        return f.intrinsic(f"llvm.fabs.{x.type.suffix}", x.type, x)
    return f.select(x < 0, -x, x)


def copysign(f: Function, magnitude: Value, sign: Value) -> Value:
    """|magnitude| with the sign of `sign`."""
    return f.intrinsic(f"llvm.copysign.{sign.type.suffix}", sign.type, magnitude, sign)


def sqrt(f: Function, x: Value) -> Value:
    """Square root, correctly rounded; NaN below 0."""
    return f.intrinsic(f"llvm.sqrt.{x.type.suffix}", x.type, x)


# ---- half types ------------------------------------------------------------------------------------------------------
def widen(f: Function, bits: Value, half: Type, isa: Isa) -> Value:
    """I16 lanes that hold `half` (F16 or BF16) as F32, exactly; NaN stays NaN."""
    t, integer = bits.type.like(F32), bits.type.like(I32)
    if half == F16 and isa.has_f16:
        return f.cast("fpext", f.bitcast(bits, bits.type.like(F16)), t)
    x = f.cast("zext", bits, integer)
    if half == BF16:
        return f.bitcast(x << 16, t)
    _expect_half(half)
    # Exponent and mantissa moved into place are the number times 2^-112, denormals included; inf and NaN come out as
    # exponent 31 and want 255.
    magnitude = (x & 0x7FFF) << 13
    number = f.bitcast(f.bitcast(magnitude, t) * 2.0**112, integer)
    special = magnitude | 0x7F800000
    return f.bitcast(f.select(magnitude >= 31 << 23, special, number) | ((x & 0x8000) << 16), t)


def widen_fp8(f: Function, bits: Value) -> Value:
    """I8 lanes that hold float8_e4m3fn as F32, exactly and without denormals on the way, which a CPU may flush."""
    t, integer = bits.type.like(F32), bits.type.like(I32)
    x = f.cast("zext", bits, integer)
    magnitude = x & 0x7F
    # Exponents have bias 7 where F32 has 127. A denormal m 2^-9 is (1 + m / 8) 2^-6 less 2^-6.
    denormal = magnitude < 8
    bias = f.select(denormal, f.const(121 << 23, integer), 120 << 23)
    number = f.bitcast((magnitude << 20) + bias, t) - f.select(denormal, f.const(2.0**-6, t), 0.0)
    nan = f.select(magnitude.eq(0x7F), f.const(0x7FC00000, integer), f.bitcast(number, integer))
    return f.bitcast(nan | ((x & 0x80) << 24), t)


def narrow(f: Function, x: Value, half: Type, isa: Isa) -> Value:
    """F32 lanes rounded to the nearest `half` (F16 or BF16), ties to even, as I16 lanes; NaN stays NaN.

    The bfloat16 instruction of AVX-512 takes denormals for 0, the other ways keep them.
    """
    short, integer = x.type.like(I16), x.type.like(I32)
    if half == F16 and isa.has_f16:
        return f.bitcast(f.cast("fptrunc", x, x.type.like(F16)), short)
    if half == BF16 and isa.has_dot_bf16 and x.type.lanes in (4, 8, 16):
        return f.bitcast(f.cast("fptrunc", x, x.type.like(BF16)), short)
    bits = f.bitcast(x, integer)
    if half == BF16:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return f.cast("trunc", f.select(x.ne(x), (bits >> 16) | 0x40, rounded), short)
    _expect_half(half)
    magnitude = bits & 0x7FFFFFFF
    # Below 2^-14 the sum with 1/2 rounds in the hardware to the denormal's last place, 2^-24.
    denormal = f.bitcast(f.bitcast(magnitude, x.type) + 0.5, integer) - 0x3F000000
    # The exponent moves from bias 127 to 15; numbers from 65520 up carry into infinity by themselves.
    normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    y = f.select(magnitude < 113 << 23, denormal, f.select(magnitude >= 0x47800000, f.const(0x7C00, integer), normal))
    nan = ((magnitude >> 13) & 0x1FF) | 0x7E00
    y = f.select(magnitude > 0x7F800000, nan, y)
    return f.cast("trunc", y | ((bits >> 16) & 0x8000), short)


def _expect_half(half: Type) -> None:
    if half != F16:
        raise TypeError(f"half must be F16 or BF16; got {half}")


# ---- lanes -----------------------------------------------------------------------------------------------------------
def transpose(f: Function, rows: Sequence[Value]) -> list[Value]:
    """The w vectors whose lane i is lane j of row i, for w rows of w lanes: log2(w) rounds of two shuffles a pair."""
    w = len(rows)
    if any(row.type.lanes != w for row in rows) or w & (w - 1):
        raise TypeError(f"transpose takes w rows of w lanes, w a power of two; got {w} of {rows[0].type}")
    now, step = list(rows), 1
    while step < w:
        after = list(now)
        for i in range(w):
            if not i & step:
                a, b = now[i], now[i + step]
                after[i] = f.shuffle(a, b, [w + lane - step if lane & step else lane for lane in range(w)])
                after[i + step] = f.shuffle(a, b, [w + lane if lane & step else lane + step for lane in range(w)])
        now, step = after, 2 * step
    return now


# ---- Philox ----------------------------------------------------------------------------------------------------------
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def multiply_wide(f: Function, x: Value, by: int) -> tuple[Value, Value]:
    """(low, high) words of the 64-bit products of I32 lanes (or a scalar) and a constant, all unsigned."""
    t, w = x.type, x.type.lanes
    if not w:
        wide = f.cast("zext", x, I64) * by
        return f.cast("trunc", wide, t), f.cast("trunc", wide >> 32, t)
    # The hardware multiplies every other lane: even and odd ones apart, then interleaved, at half the cost of widening
    # all lanes at once (48 against 107 ns for ten rounds on 16 lanes).
    pairs = f.bitcast(x, I64.vec(w // 2))
    even, odd = f.bitcast((pairs & 0xFFFFFFFF) * by, t), f.bitcast((pairs >> 32) * by, t)
    low = f.shuffle(even, odd, [w + i - 1 if i % 2 else i for i in range(w)])
    high = f.shuffle(even, odd, [w + i if i % 2 else i + 1 for i in range(w)])
    return low, high


def philox4x32(
    f: Function, counter: Sequence[Value], key: Sequence[Value], rounds: int = 10
) -> tuple[Value, Value, Value, Value]:
    """Philox4x32: four words of random bits per lane, from four counter words and two key words.

    Words are I32 lanes or scalars: what has no lanes yet is computed once, in the first rounds of a counter word that
    is the same in all lanes. If all words are scalars, so are the results; else at least two rounds make them lanes.

    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011); the multipliers and key steps
    are theirs, and the tests hold the known answers of their Random123 library.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(rounds):
        if i:
            k0, k1 = k0 + _PHILOX_KEY_STEPS[0], k1 + _PHILOX_KEY_STEPS[1]
        low0, high0 = multiply_wide(f, c0, _PHILOX_MULTIPLIERS[0])
        low1, high1 = multiply_wide(f, c2, _PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = _xor(high1, c1, k0), low1, _xor(high0, c3, k1), low0
    return c0, c1, c2, c3


def _xor(*words: Value) -> Value:
    """Exclusive or, the scalars among the words first, so that they cost a scalar instruction."""
    first, *rest = sorted(words, key=lambda w: w.type.lanes)
    for word in rest:
        first = word ^ first
    return first
