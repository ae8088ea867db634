"""The special-function unit (MUFU) of NVIDIA's sm_90, bit for bit.

The unit evaluates one quadratic a segment in fixed point: the architecture of S. F. Oberman and
M. Y. Siu, "A High-Performance Area-Efficient Multifunction Interpolator" (ARITH 2005). Here it is
integers: `Quadratic` is that datapath, `_mufu_tables` its coefficients, fitted to recorded results
by ``tools/fit_mufu.py`` (the recordings lie in ``tests/data``).

Every function takes a float32 array of any shape and returns a float32 array of that shape. What
follows it in PTX is in its docstring. NaN results carry the unit's encoding, 0x7FFFFFFF.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from . import _mufu_tables as tables

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]

NAN_BITS = 0x7FFFFFFF
_ONE_BITS = 127 << 23
_INF_BITS = 255 << 23
_FRACTION = (1 << 23) - 1
# Elements at a time: temporaries of 64 KiB stay in cache, and below malloc's mmap threshold.
_BLOCK = 1 << 14


@cache
def truncating_square(bits: int) -> NDArray[np.int32]:
    """The unit's squarer for every `bits`-wide offset r: int32 [2^bits], about r^2 >> (bits + 2).

    A triangle of partial products cut off on the right: half, rounded down, of the sum over the
    set bits i of r of ``r >> (bits + 1 - i)``.
    """
    r = np.arange(1 << bits, dtype=np.int32)
    total = np.zeros_like(r)
    for i in range(bits):
        total += ((r >> i) & 1) * (r >> (bits + 1 - i))
    return total >> 1


@dataclass(frozen=True)
class Quadratic:
    """One function's interpolator: ``(a * 2^13 + b * r + c * sq(r) + rounding) >> 15``.

    A 23-bit argument is split into a segment (its top bits) and an offset r of `offset_bits`;
    `coefficients` holds (a, b, c) for each segment and sq is `truncating_square`.
    """

    coefficients: tuple[tuple[int, int, int], ...]
    rounding: int
    offset_bits: int

    @cached_property
    def _columns(self) -> tuple[Int32s, Int32s, Int32s, Int32s]:
        a, b, c = np.array(self.coefficients, dtype=np.int64).T
        # Below the shift by 15, so that 32 bits do: a's upper bits, and one r of b * r.
        low = ((a & 3) << 13) + self.rounding
        columns = (a >> 2, low, b - (1 << 15), c)
        high, low32, slope, curve = (column.astype(np.int32) for column in columns)
        return high, low32, slope, curve

    def __call__(self, argument: Int32s) -> Int32s:
        """Interpolate at int32 arguments in [0, 2^23); int32 of the same shape."""
        high, low, slope, curve = self._columns
        segment = argument >> self.offset_bits
        r = argument & ((1 << self.offset_bits) - 1)
        fine = slope.take(segment)
        fine *= r
        fine += low.take(segment)
        fine += curve.take(segment) * truncating_square(self.offset_bits).take(r)
        fine >>= 15
        fine += high.take(segment)
        fine += r
        return fine


EX2 = Quadratic(tables.EX2, tables.EX2_ROUNDING, offset_bits=17)


def ex2(x: Float32s) -> Float32s:
    """``ex2.approx.ftz.f32`` (one MUFU.EX2): 2^x.

    x: float32, any shape. Returns float32 of that shape. With t = trunc(|x| * 2^23), the fixed
    point number k is t for x >= 0 and, for x < 0, -t where t's low 23 bits are zero, else -t - 1;
    the result is 2^(k >> 23) times the interpolated 2^(k & (2^23 - 1) over 2^23). Below 2^-126 it
    is +0, from 2^128 on +inf. A subnormal x counts as 0 and gives 1. Raises TypeError if x isn't
    float32.
    """
    return _blockwise(_ex2_bits, x)


def _ex2_bits(x: Float32s) -> Int32s:
    # 192 is past both ends of the range, and 192 * 2^23 still fits int32; fmin drops NaN.
    t = (np.fmin(np.abs(x), np.float32(192)) * np.float32(1 << 23)).astype(np.int32)
    negative = x.view(np.int32) >> 31
    # -t - 1 is the complement of t; -t is that plus one.
    k = (t ^ negative) + (negative & ((t & _FRACTION) == 0))
    exponent = k >> 23
    bits = EX2(k & _FRACTION)
    bits += (exponent + 126) << 23
    bits[exponent < -126] = 0
    bits[exponent > 127] = _INF_BITS
    bits[np.isnan(x)] = NAN_BITS
    return bits


def _blockwise(kernel: Callable[[Float32s], Int32s], x: Float32s) -> Float32s:
    """Apply `kernel`, from a flat float32 block to its results' encodings, to all of x."""
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"x must be a float32 array, got {x.dtype}")
    flat = np.ascontiguousarray(x).ravel()
    out = np.empty(flat.shape, dtype=np.int32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        for start in range(0, flat.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            out[block] = kernel(flat[block])
    return out.view(np.float32).reshape(x.shape)
