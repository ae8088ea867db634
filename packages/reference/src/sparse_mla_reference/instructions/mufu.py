"""The special-function unit (MUFU) of NVIDIA's sm_90, bit for bit.

The unit evaluates one quadratic per segment in fixed point: the architecture of S. F. Oberman and
M. Y. Siu, "A High-Performance Area-Efficient Multifunction Interpolator" (ARITH 2005). Here it is
integers: `Quadratic` is that datapath and `_mufu_tables` holds its coefficients, fitted to recorded
results by ``tools/fit_mufu.py``. The models agree with an H200 on all 2^32 inputs
(``tools/check_mufu.py``; the recordings lie in ``tests/data``).

Every function takes float32 arrays and returns a float32 array; NaN results are 0x7FFFFFFF. With
``ftz=True``, the default, it stands for the ``.approx.ftz.f32`` form, which is one MUFU
instruction for the one-input functions. With ``ftz=False`` it stands for ``.approx.f32``, which
ptxas 13.0 for sm_90 expands as the docstring says: subnormals are scaled into range and back.

>>> import numpy as np
>>> hex(ex2(np.float32(0.5)).view(np.uint32)), hex(lg2(np.float32(10.0)).view(np.uint32))
('0x3fb504f3', '0x40549a78')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.instructions import _mufu_tables as tables
from sparse_mla_reference.instructions.float32 import add, as_float32, mul

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]

NAN_BITS = 0x7FFFFFFF
_INF_BITS = 0x7F800000
_ONE_BITS = 0x3F800000
_MIN_NORMAL_BITS = 0x00800000
_FRACTION = 0x007FFFFF
_SIGN = np.int32(-(1 << 31))
_LOG2_E = np.uint32(0x3FB8AA3B).view(np.float32)
# Elements at a time: temporaries of 64 and 128 KiB stay in cache.
_BLOCK = 1 << 14


@cache
def truncating_square() -> Int32s:
    """The unit's squarer for each 17-bit offset r: int32 [2^17], about r^2 / 2^19.

    A triangle of partial products cut off on the right: half, rounded down, of the sum over the
    set bits i of r of ``r >> (18 - i)``.
    """
    r = np.arange(1 << 17, dtype=np.int32)
    total = np.zeros_like(r)
    for i in range(17):
        total += ((r >> i) & 1) * (r >> (18 - i))
    return total >> 1


@dataclass(frozen=True)
class Quadratic:
    """One function's interpolator: S = a 2^a_shift + b r + c sq(r) 2^c_shift + rounding.

    The argument's upper bits choose the segment, whose integers (a, b, c) `coefficients` holds,
    and its low `offset_bits`, 16 or 17, are r. sq is `truncating_square` of the offset as 17 bits
    (of 2r where r has 16). The unit keeps S's bits from 2^shift upward.
    """

    coefficients: tuple[tuple[int, int, int], ...]
    rounding: int
    offset_bits: int
    a_shift: int
    c_shift: int
    shift: int

    @cached_property
    def _columns(self) -> NDArray[np.float64]:
        a, b, c = np.array(self.coefficients, dtype=np.int64).T
        scaled = np.array([(a << self.a_shift) + self.rounding, b, c << self.c_shift])
        return scaled.astype(np.float64) / 2.0**self.shift

    @cached_property
    def _square(self) -> Int32s:
        return truncating_square()[:: 1 << (17 - self.offset_bits)]

    def __call__(self, argument: Int32s) -> NDArray[np.float64]:
        """S / 2^shift, not yet rounded down, of int32 arguments; float64 holds it exactly."""
        a, b, c = self._columns
        segment = argument >> self.offset_bits
        r = argument & ((1 << self.offset_bits) - 1)
        total = b.take(segment, mode="clip")
        total *= r
        total += a.take(segment, mode="clip")
        curve = c.take(segment, mode="clip")
        curve *= self._square.take(r, mode="clip")
        total += curve
        return total


# 2^f in [1, 2), units 2^-23: 64 segments.
EX2 = Quadratic(tables.EX2, tables.EX2_ROUNDING, offset_bits=17, a_shift=13, c_shift=0, shift=15)
# log2 m in [0, 1), units 2^-36, for m in [1, 2): 64 segments.
LG2 = Quadratic(tables.LG2, tables.LG2_ROUNDING, offset_bits=17, a_shift=12, c_shift=1, shift=2)
# 1 / m in (1/2, 1], units 2^-24, for m in [1, 2): 128 segments.
RCP = Quadratic(tables.RCP, tables.RCP_ROUNDING, offset_bits=16, a_shift=13, c_shift=0, shift=15)
# 1 / sqrt(m) in (1/2, 1], units 2^-24, for m in [1, 2), then in [2, 4): 2 x 64 segments.
RSQRT = Quadratic(
    tables.RSQRT, tables.RSQRT_ROUNDING, offset_bits=17, a_shift=14, c_shift=2, shift=16
)
# sqrt(m) in [1, 2), units 2^-23, for m in [1, 2), then in [2, 4): 2 x 64 segments.
SQRT = Quadratic(tables.SQRT, tables.SQRT_ROUNDING, offset_bits=17, a_shift=15, c_shift=1, shift=17)


def ex2(x: NDArray[Any], *, ftz: bool = True) -> Float32s:
    """2^x: ``ex2.approx.ftz.f32`` (MUFU.EX2) or ``ex2.approx.f32``.

    With t = trunc(|x| 2^23), the fixed-point exponent k is t for x >= 0; for x < 0 it is -t where
    t's low 23 bits are zero, else -t - 1. The result is 2^(k >> 23) times the interpolated power
    of k's low 23 bits; below 2^-126 it is +0, from 2^128 on +inf. A subnormal x gives 1. Without
    ftz: for x < -126, ``y = ex2(x * 0.5)`` then ``y * y``.

    Args:
        x: float32, any shape.
        ftz: the ``.ftz`` form.

    Returns:
        float32 of x's shape.

    Raises:
        TypeError: x is not float32.
    """
    x = as_float32("x", x)
    if ftz:
        return _blockwise(_ex2_bits, x)
    below = x < -126
    y = ex2(_scale(x, below, 0.5))
    return np.where(below, mul(y, y), y)


def lg2(x: NDArray[Any], *, ftz: bool = True) -> Float32s:
    """log2 x: ``lg2.approx.ftz.f32`` (MUFU.LG2) or ``lg2.approx.f32``.

    Exponent plus interpolated log2 of the significand is one fixed-point sum in units of 2^-36;
    a negative sum is complemented (-sum - 1), and the magnitude truncated to 24 bits. So errors
    are absolute near 1, where the result is small; x = 1 gives exactly +0. +-0 and subnormals
    give -inf, negative x NaN. Without ftz: for |x| < 2^-126, ``lg2(x * 2^24) - 24``.

    Args, Returns, Raises: as `ex2`.
    """
    x = as_float32("x", x)
    if ftz:
        return _blockwise(_lg2_bits, x)
    tiny = _tiny(x)
    y = lg2(_scale(x, tiny, 2.0**24))
    return np.where(tiny, add(y, np.float32(-24)), y)


def rcp(x: NDArray[Any], *, ftz: bool = True) -> Float32s:
    """1 / x: ``rcp.approx.ftz.f32`` (MUFU.RCP) or ``rcp.approx.f32``.

    The interpolated reciprocal of the significand with the exponent negated; below 2^-126 it is 0
    of x's sign. +-0 and subnormals give +-inf. Without ftz: x and the result are multiplied by
    0.25 for |x| > 2^126 and by 2^24 for |x| < 2^-126.

    Args, Returns, Raises: as `ex2`.
    """
    x = as_float32("x", x)
    if ftz:
        return _blockwise(_rcp_bits, x)
    tiny, huge = _tiny(x), _huge(x)
    y = rcp(_scale(_scale(x, tiny, 2.0**24), huge, 0.25))
    return _scale(_scale(y, tiny, 2.0**24), huge, 0.25)


def rsqrt(x: NDArray[Any], *, ftz: bool = True) -> Float32s:
    """1 / sqrt(x): ``rsqrt.approx.ftz.f32`` (MUFU.RSQ) or ``rsqrt.approx.f32``.

    Interpolated over two octaves; a power of 4 gives the exact result. +-0 and subnormals give
    +-inf, other negative x NaN. Without ftz: for |x| < 2^-126, ``rsqrt(x * 2^24) * 2^12``.

    Args, Returns, Raises: as `ex2`.
    """
    x = as_float32("x", x)
    if ftz:
        return _blockwise(_rsqrt_bits, x)
    tiny = _tiny(x)
    return _scale(rsqrt(_scale(x, tiny, 2.0**24)), tiny, 2.0**12)


def sqrt(x: NDArray[Any], *, ftz: bool = True) -> Float32s:
    """sqrt(x): ``sqrt.approx.ftz.f32`` (MUFU.SQRT) or ``sqrt.approx.f32``.

    Interpolated over two octaves. +-0 and subnormals give 0 of x's sign, other negative x NaN.
    Without ftz: for |x| < 2^-126, ``sqrt(x * 2^24) * 2^-12``.

    Args, Returns, Raises: as `ex2`.
    """
    x = as_float32("x", x)
    if ftz:
        return _blockwise(_sqrt_bits, x)
    tiny = _tiny(x)
    return _scale(sqrt(_scale(x, tiny, 2.0**24)), tiny, 2.0**-12)


def exp(x: NDArray[Any], *, ftz: bool = True) -> Float32s:
    """e^x by way of 2^x, as CUDA's ``__expf``: a multiply, then `ex2`.

    ``mul.rn.ftz.f32 t, x, 0f3FB8AA3B; ex2.approx.ftz.f32 y, t;`` or both without ``.ftz``.

    Args, Returns, Raises: as `ex2`.
    """
    return ex2(mul(as_float32("x", x), _LOG2_E, ftz=ftz), ftz=ftz)


def div_approx(a: NDArray[Any], b: NDArray[Any], *, ftz: bool = True) -> Float32s:
    """a / b: ``div.approx.ftz.f32`` or ``div.approx.f32``: a multiplied by `rcp` of b.

    Without ftz: a and b are multiplied by 2^24 for |b| < 2^-126. For |b| from 2^126 on the
    reciprocal can be 0, and then so is the result (NaN for infinite a).

    Args:
        a: float32, dividend.
        b: float32, divisor; broadcasts against a.
        ftz: the ``.ftz`` form.

    Returns:
        float32 of the broadcast shape.

    Raises:
        TypeError: a or b is not float32.
    """
    a, b = as_float32("a", a), as_float32("b", b)
    if not ftz:
        tiny = _tiny(b)
        a, b = _scale(a, tiny, 2.0**24), _scale(b, tiny, 2.0**24)
    return mul(a, rcp(b), ftz=ftz)


def div_full(a: NDArray[Any], b: NDArray[Any], *, ftz: bool = True) -> Float32s:
    """a / b: ``div.full.ftz.f32`` or ``div.full.f32``: `div_approx` over the whole range of b.

    a and b are multiplied by 0.25 for |b| > 2^126; without ftz also by 2^24 for |b| < 2^-126.

    Args, Returns, Raises: as `div_approx`.
    """
    a, b = as_float32("a", a), as_float32("b", b)
    huge = _huge(b)
    a, b = _scale(a, huge, 0.25, ftz=ftz), _scale(b, huge, 0.25, ftz=ftz)
    return div_approx(a, b, ftz=ftz)


def _ex2_bits(bits: Int32s) -> Int32s:
    x = bits.view(np.float32)
    # 192 is past both ends of the range, and 192 * 2^23 still fits int32; fmin drops NaN.
    t = (np.fmin(np.abs(x), np.float32(192)) * np.float32(1 << 23)).astype(np.int32)
    negative = bits >> 31
    # -t - 1 is the complement of t; -t is that plus one.
    k = (t ^ negative) + (negative & ((t & _FRACTION) == 0))
    exponent = k >> 23
    out = EX2(k & _FRACTION).astype(np.int32)
    out += (exponent + 126) << 23
    out[exponent < -126] = 0
    out[exponent > 127] = _INF_BITS
    out[np.isnan(x)] = NAN_BITS
    return out


def _lg2_bits(bits: Int32s) -> Int32s:
    exponent = (bits >> 23) - 127
    total = LG2(bits & _FRACTION)
    np.floor(total, out=total)
    total += exponent * 2.0**36
    # From two's complement to sign and magnitude: total for total >= 0, else -total - 1.
    magnitude = np.abs(total + 0.5) - 0.5
    # Float64 holds it exactly; its sign, exponent and 23 upper fraction bits are the float32's.
    out = ((magnitude.view(np.int64) >> 29) - ((1023 - 127 + 36) << 23)).astype(np.int32)
    out |= (total.view(np.int64) >> 32).astype(np.int32) & _SIGN
    out[bits == _ONE_BITS] = 0
    out[bits < 0] = NAN_BITS
    out[(bits & ~_SIGN) < _MIN_NORMAL_BITS] = _INF_BITS | _SIGN
    out[bits == _INF_BITS] = _INF_BITS
    out[bits > _INF_BITS] = NAN_BITS
    return out


def _rcp_bits(bits: Int32s) -> Int32s:
    magnitude = bits & ~_SIGN
    out = RCP(bits & _FRACTION).astype(np.int32)
    out += (252 - (magnitude >> 23)) << 23
    out[out < _MIN_NORMAL_BITS] = 0
    out[magnitude < _MIN_NORMAL_BITS] = _INF_BITS
    out |= bits & _SIGN
    out[magnitude > _INF_BITS] = NAN_BITS
    return out


def _rsqrt_bits(bits: Int32s) -> Int32s:
    exponent, argument = _two_octaves(bits)
    out = RSQRT(argument).astype(np.int32)
    out[argument == 0] = 1 << 24
    out += (125 - exponent) << 23
    zero = (bits & ~_SIGN) < _MIN_NORMAL_BITS
    out[(bits < 0) | (bits > _INF_BITS)] = NAN_BITS
    out[zero] = bits[zero] & _SIGN | _INF_BITS
    out[bits == _INF_BITS] = 0
    return out


def _sqrt_bits(bits: Int32s) -> Int32s:
    exponent, argument = _two_octaves(bits)
    out = SQRT(argument).astype(np.int32)
    out += (126 + exponent) << 23
    zero = (bits & ~_SIGN) < _MIN_NORMAL_BITS
    out[(bits < 0) | (bits > _INF_BITS)] = NAN_BITS
    out[zero] = bits[zero] & _SIGN
    out[bits == _INF_BITS] = _INF_BITS
    return out


def _two_octaves(bits: Int32s) -> tuple[Int32s, Int32s]:
    """Encodings of 4^e m: e, and the 24-bit interpolator argument of m in [1, 4)."""
    exponent = (bits >> 23) - 127
    return exponent >> 1, (exponent & 1) << 23 | bits & _FRACTION


def _blockwise(unit: Callable[[Int32s], Int32s], x: Float32s) -> Float32s:
    """Apply `unit`, from a flat block of encodings to its results' encodings, to all of x."""
    flat = np.ascontiguousarray(x).reshape(-1).view(np.int32)
    out = np.empty(flat.shape, dtype=np.int32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        for start in range(0, flat.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            out[block] = unit(flat[block])
    return out.view(np.float32).reshape(x.shape)


def _scale(x: Float32s, where: NDArray[np.bool_], factor: float, ftz: bool = False) -> Float32s:
    """x with the elements that `where` chooses multiplied by the factor."""
    return np.where(where, mul(x, np.float32(factor), ftz=ftz), x)


def _tiny(x: Float32s) -> NDArray[np.bool_]:
    return np.asarray(np.abs(x) < np.float32(2.0**-126))


def _huge(x: Float32s) -> NDArray[np.bool_]:
    return np.asarray(np.abs(x) > np.float32(2.0**126))
