"""One sum of a tensor core, term by term: align to the largest exponent, truncate, add, truncate.

This is the careful path of ``tensor_core.mma``; ``mma_models`` says what the numbers mean.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.formats import minifloat
from sparse_mla_reference.formats.minifloat import Format
from sparse_mla_reference.instructions.exact_product import product
from sparse_mla_reference.instructions.mma_models import Model

# Exponent of a zero term: below every real one, and two of them add up within int16.
NO_EXPONENT = -10_000


@dataclass(frozen=True)
class Operand:
    """Columns of A, or rows of B, for one or more sums: [..., k, X] with X of M or N.

    Attributes:
        value: exact values, 0 where not finite, in a dtype that holds any product exactly.
        exponent: int16 exponents, ``NO_EXPONENT`` for zero.
        digits: float32 2^(6 exponent), 0 for zero, where products of two stay normal; else None.
        special: float64 values with their NaN and infinities; None where there are none.
    """

    value: NDArray[Any]
    exponent: NDArray[np.int16]
    digits: NDArray[np.float32] | None
    special: NDArray[np.float64] | None

    @classmethod
    def of(cls, code: NDArray[Any], model: Model) -> "Operand":
        """The operand of encodings [..., k, X]."""
        value, exponent, finite = _tables(model.operands, model.normalises_subnormals)
        special = None
        if not finite[code].all():
            special = minifloat.decode(code, model.operands).astype(np.float64)
        exponents = exponent[code]
        return cls(value[code], exponents, _digits(exponents, exponent), special)

    def __getitem__(self, index: Any) -> "Operand":
        """The operand of the same part of every array."""
        digits, special = (x if x is None else x[index] for x in (self.digits, self.special))
        return Operand(self.value[index], self.exponent[index], digits, special)


@cache
def _tables(
    form: Format, normalises_subnormals: bool
) -> tuple[NDArray[Any], NDArray[np.int16], NDArray[np.bool_]]:
    """Per encoding: value (0 where not finite), exponent, whether it is finite."""
    value = minifloat.value_table(form).astype(np.float64)
    finite = np.isfinite(value)
    value[~finite] = 0.0
    exponent = np.frexp(value)[1] - 1
    if not normalises_subnormals:
        exponent = np.maximum(exponent, form.min_exponent)
    exponent[value == 0] = NO_EXPONENT
    # Products of BF16 leave float32's range.
    work = np.float64 if form is minifloat.BF16 else np.float32
    return value.astype(work), exponent.astype(np.int16), finite


def _digits(exponent: NDArray[np.int16], table: NDArray[np.int16]) -> NDArray[np.float32] | None:
    real = table[table != NO_EXPONENT]
    if 12 * real.min() < -126 or 12 * real.max() + 6 > 127:
        return None
    zero = exponent == NO_EXPONENT
    field = np.where(zero, 0, 6 * exponent + np.int16(127)).astype(np.int32)
    return np.asarray((field << 23).view(np.float32))


def aligned_sum(
    a: Operand, b: Operand, c: NDArray[np.float32] | None, model: Model
) -> NDArray[np.float32]:
    """One sum of the model, batched: a [T, k, M], b [T, k, N], c [T, M, N] or none."""
    largest = _largest_exponent(a, b)
    if c is not None:
        largest = np.maximum(largest, _exponent(c))
    largest = np.where(largest > NO_EXPONENT // 2, largest, 0)
    shift = model.fraction_bits - largest
    value = _truncated_terms(a, b, c, shift, model).astype(np.float64)
    value *= power_of_two(-shift, value.dtype)
    tiny = bool(shift.max(initial=0) > 126)  # a result may be subnormal
    return _with_specials(truncate(value, model.output_bits, subnormal=tiny), a, b, c)


def _largest_exponent(a: Operand, b: Operand) -> NDArray[np.int32]:
    """[T, M, N]: over k, the largest exponent of a product; ``NO_EXPONENT`` or less for none.

    With a digit of 6 bits for each exponent, the sum of up to 63 products of 2^(6 e) has its
    leading bit in the largest one's digit: for narrow formats one float32 matrix product finds it.
    """
    if a.digits is not None and b.digits is not None:
        digits = product(a.digits, b.digits)
        largest = ((digits.view(np.int32) >> 23) - 127) // 6
        return np.where(digits == 0, np.int32(NO_EXPONENT), largest)
    largest = a.exponent[:, 0, :, None] + b.exponent[:, 0, None, :]
    term = np.empty_like(largest)
    for k in range(1, a.exponent.shape[1]):
        np.add(a.exponent[:, k, :, None], b.exponent[:, k, None, :], out=term)
        np.maximum(largest, term, out=largest)
    return largest.astype(np.int32)


def _truncated_terms(
    a: Operand,
    b: Operand,
    c: NDArray[np.float32] | None,
    shift: NDArray[np.int32],
    model: Model,
) -> NDArray[Any]:
    """[T, M, N]: trunc(c 2^shift) + the sum over k of trunc(a b 2^shift), exactly.

    C contributes less than 2^(fraction_bits + 1); a product's significand is below 4.
    """
    largest_term = (2 - 2.0**-model.operands.fraction_bits) ** 2 * 2.0**model.fraction_bits
    room = np.iinfo(np.int32).max - 2.0 ** (model.fraction_bits + 1)
    group = int(room // largest_term)  # products that add up within int32, C beside them
    scale = power_of_two(shift, a.value.dtype)
    term, whole = np.empty(shift.shape, a.value.dtype), np.empty(shift.shape, np.int32)
    part = np.zeros(shift.shape, np.int32) if c is None else _truncated(c, shift)
    total: NDArray[Any] = part
    for k in range(a.value.shape[1]):
        if k and k % group == 0:
            total = total.astype(np.float64) if k == group else total + part
            part = np.zeros(shift.shape, np.int32)
        np.multiply(a.value[:, k, :, None], b.value[:, k, None, :], out=term)
        np.multiply(term, scale, out=term)
        np.copyto(whole, term, casting="unsafe")  # truncates toward zero
        np.add(part, whole, out=part)
    return total if total is part else total + part


def _truncated(c: NDArray[np.float32], shift: NDArray[np.int32]) -> NDArray[np.int32]:
    """trunc(c 2^shift), below 2^31 for a finite c of its exponent or less."""
    finite = np.where(np.isfinite(c), c, np.float32(0))
    return np.asarray((finite * power_of_two(shift, np.dtype(np.float64))).astype(np.int32))


def power_of_two(exponent: NDArray[np.int32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """2^exponent in float32 or float64, clipped to the exponents of its normal numbers."""
    if dtype == np.float32:
        return ((np.clip(exponent, -126, 127) + np.int32(127)) << np.int32(23)).view(np.float32)
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def _exponent(c: NDArray[np.float32]) -> NDArray[np.int32]:
    """Exponents of float32 values; subnormals and zero have the least one."""
    field = (c.view(np.int32) >> 23) & 0xFF
    return np.asarray(np.maximum(field, 1) - np.int32(127))


def truncate(
    value: NDArray[np.float64], output_bits: int, *, subnormal: bool = True
) -> NDArray[np.float32]:
    """Truncate toward zero to float32 with ``output_bits`` fraction bits.

    Args:
        value: float64 array, any shape; it is overwritten.
        output_bits: at most 23.
        subnormal: False if no value but zero is below 2^-126.

    Returns:
        float32 array; infinity from 2^128 on; a subnormal keeps ``output_bits`` bits below 2^-126.
    """
    if subnormal:
        least = 2.0 ** (-126 - output_bits)
        value = np.where(np.abs(value) < 2.0**-126, np.trunc(value / least) * least, value)
    bits = value.view(np.int64)
    bits &= -(1 << (52 - output_bits))
    return value.astype(np.float32)


def _with_specials(
    result: NDArray[np.float32], a: Operand, b: Operand, c: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Put in the NaN and infinities that come of the operands' own: IEEE rules, term by term."""
    if a.special is None and b.special is None and (c is None or np.isfinite(c).all()):
        return result
    left = a.value.astype(np.float64) if a.special is None else a.special
    right = b.value.astype(np.float64) if b.special is None else b.special
    total = np.zeros(result.shape) if c is None else c.astype(np.float64)
    for k in range(left.shape[1]):
        total = total + left[:, k, :, None] * right[:, k, None, :]
    return np.where(np.isfinite(total), result, total.astype(np.float32))
