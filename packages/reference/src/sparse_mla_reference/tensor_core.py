"""Matrix multiply-accumulate as tensor cores do it, bit for bit.

>>> import numpy as np
>>> one, c = np.full((1, 32), 0x38, np.uint8), np.zeros((1, 1), np.float32)
>>> float(mma(one, one.T, c)[0, 0])  # 32 products of 1.0
32.0
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import float32, minifloat
from sparse_mla_reference.minifloat import Format
from sparse_mla_reference.mma_models import SM90_E4M3, Evidence, Model

__all__ = ["SM90_E4M3", "Evidence", "Model", "mma"]

# Exponent of a zero term: below every real one, and two of them add up within int16.
_NO_EXPONENT = -10_000
# Outputs handled at a time: the working set stays within a core's L2 cache.
_TILE = 1 << 15


@np.errstate(all="ignore")
def mma(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], *, model: Model = SM90_E4M3
) -> NDArray[np.float32]:
    """D = A x B + C by successive instructions along K, batched.

    Args:
        a: [..., M, K] operands: bytes (uint8 or float8_e4m3fn) for an E4M3 model, float16 or
            bfloat16 for the others. K is a multiple of ``model.step``.
        b: [..., K, N] likewise.
        c: [..., M, N] float32 accumulators.
        model: the instruction.

    Returns:
        [..., M, N] float32, batch dimensions broadcast. Any NaN is 0x7FFFFFFF.

    Raises:
        TypeError: an operand's dtype doesn't suit the model, or ``c`` is not float32.
        ValueError: shapes don't fit together, or K is not a multiple of the model's step.
    """
    a = _encodings("a", a, model.operands)
    b = _encodings("b", b, model.operands)
    c = float32.as_float32("c", c)
    batch = _check_shapes(a, b, c, model)
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    count = math.prod(batch)
    a = np.broadcast_to(a, (*batch, m, k)).reshape(count, m, k)
    b = np.broadcast_to(b, (*batch, k, n)).reshape(count, k, n)
    d = np.broadcast_to(c, (*batch, m, n)).reshape(count, m, n).copy()
    for tile in _tiles(*d.shape):
        d[tile] = _chain(a[tile], b[tile[0]], d[tile], model)
    return float32.canonical(d.reshape(*batch, m, n))


def _tiles(batch: int, m: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Slices of (batch, M) with about ``_TILE`` outputs each."""
    rows = max(1, min(m, _TILE // max(1, n)))
    group = max(1, _TILE // max(1, rows * n))
    for i in range(0, batch, group):
        for j in range(0, m, rows):
            yield slice(i, i + group), slice(j, j + rows)


def _chain(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[np.float32], model: Model
) -> NDArray[np.float32]:
    """All steps of one tile: a [T, M, K], b [T, K, N], c [T, M, N]."""
    d = c
    for start in range(0, a.shape[-1], model.step):
        t = d if model.accumulator_inside else None
        for columns in model.sums:
            k = start + np.array(columns)
            left = _Operand.of(a[:, :, k].swapaxes(1, 2), model)  # [T, k, M]
            right = _Operand.of(b[:, k, :], model)  # [T, k, N]
            t = _sum(left, right, t, model)
        assert t is not None
        d = t if model.accumulator_inside else d + t
    return d


@dataclass(frozen=True)
class _Operand:
    """One side of a sum: value and exponent per entry, [T, k, M or N]."""

    value: NDArray[Any]
    exponent: NDArray[np.int16]
    special: NDArray[np.float64] | None  # values with NaN and infinities, where there are any

    @classmethod
    def of(cls, code: NDArray[Any], model: Model) -> "_Operand":
        table = _table(model.operands, model.normalises_subnormals)
        value = table.value[code]
        finite = table.finite[code].all()
        special = None if finite else minifloat.decode(code, model.operands).astype(np.float64)
        return cls(value, table.exponent[code], special)


@dataclass(frozen=True)
class _Table:
    """Per encoding: value (0 where not finite), exponent and finiteness."""

    value: NDArray[Any]
    exponent: NDArray[np.int16]
    finite: NDArray[np.bool_]


@cache
def _table(form: Format, normalises_subnormals: bool) -> _Table:
    value = minifloat.value_table(form).astype(np.float64)
    finite = np.isfinite(value)
    value[~finite] = 0.0
    exponent = np.frexp(value)[1] - 1
    if not normalises_subnormals:
        exponent = np.maximum(exponent, form.min_exponent)
    exponent[value == 0] = _NO_EXPONENT
    # Products of BF16 leave float32's range.
    work = np.float64 if form is minifloat.BF16 else np.float32
    return _Table(value.astype(work), exponent.astype(np.int16), finite)


def _sum(
    a: _Operand, b: _Operand, c: NDArray[np.float32] | None, model: Model
) -> NDArray[np.float32]:
    """One sum of the model for a tile: a [T, k, M], b [T, k, N], c [T, M, N] or none."""
    largest = _largest_exponent(a, b)
    if c is not None:
        largest = np.maximum(largest, _exponent(c))
    shift = model.fraction_bits - np.where(largest > _NO_EXPONENT // 2, largest, 0).astype(np.int32)
    units = _truncated_products(a, b, shift)
    if c is not None:
        units += np.trunc(np.ldexp(np.where(np.isfinite(c), c, 0).astype(np.float64), shift))
    result = _truncate(np.ldexp(units, -shift), model.output_bits)
    return _with_specials(result, a, b, c)


def _largest_exponent(a: _Operand, b: _Operand) -> NDArray[np.int16]:
    largest = a.exponent[:, 0, :, None] + b.exponent[:, 0, None, :]
    term = np.empty_like(largest)
    for k in range(1, a.exponent.shape[1]):
        np.add(a.exponent[:, k, :, None], b.exponent[:, k, None, :], out=term)
        np.maximum(largest, term, out=largest)
    return largest


def _truncated_products(a: _Operand, b: _Operand, shift: NDArray[np.int32]) -> NDArray[np.float64]:
    """Sum over k of trunc(a b 2^shift), exactly: a product is below 2^(fraction_bits + 2)."""
    total = np.zeros(shift.shape, np.float64)
    scale = np.ldexp(a.value.dtype.type(1), np.minimum(shift, 127))
    term = np.empty(shift.shape, a.value.dtype)
    for k in range(a.value.shape[1]):
        np.multiply(a.value[:, k, :, None], b.value[:, k, None, :], out=term)
        np.multiply(term, scale, out=term)
        np.trunc(term, out=term)
        np.add(total, term, out=total)
    return total


def _exponent(c: NDArray[np.float32]) -> NDArray[np.int16]:
    """Exponents of float32 values; subnormals have the least one, zero has none."""
    field = (c.view(np.uint32) >> 23) & 0xFF
    exponent = np.maximum(field, 1).astype(np.int16) - np.int16(127)
    return np.where((c == 0) | ~np.isfinite(c), np.int16(_NO_EXPONENT), exponent)


def _truncate(x: NDArray[np.float64], output_bits: int) -> NDArray[np.float32]:
    """Truncate toward zero to float32 with ``output_bits`` fraction bits; beyond it, infinity."""
    bits = x.view(np.int64) & -(1 << (52 - output_bits))
    normal = bits.view(np.float64)
    least = np.ldexp(1.0, -126 - output_bits)
    subnormal = np.trunc(x / least) * least
    return np.where(np.abs(x) < 2.0**-126, subnormal, normal).astype(np.float32)


def _with_specials(
    result: NDArray[np.float32], a: _Operand, b: _Operand, c: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Put in NaN and infinities that operands carry: IEEE rules, term by term."""
    if a.special is None and b.special is None and (c is None or np.isfinite(c).all()):
        return result
    left = a.value.astype(np.float64) if a.special is None else a.special
    right = b.value.astype(np.float64) if b.special is None else b.special
    total = np.zeros(result.shape) if c is None else c.astype(np.float64)
    for k in range(left.shape[1]):
        total = total + left[:, k, :, None] * right[:, k, None, :]
    return np.where(np.isfinite(total), result, total.astype(np.float32))


def _encodings(name: str, x: NDArray[Any], form: Format) -> NDArray[Any]:
    """``x`` viewed as encodings of ``form``."""
    x = np.asarray(x)
    dtypes = {"e4m3": ("float8_e4m3fn", "uint8"), "fp16": ("float16",), "bf16": ("bfloat16",)}
    allowed = dtypes[form.name]
    if x.dtype.name not in allowed:
        raise TypeError(f"{name} must be {' or '.join(allowed)}, got {x.dtype}")
    return x.view(form.dtype)


def _check_shapes(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], model: Model
) -> tuple[int, ...]:
    """Check a [..., M, K], b [..., K, N], c [..., M, N]; return the broadcast batch shape."""
    for name, x in (("a", a), ("b", b), ("c", c)):
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got shape {x.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a and b must share K, got a {a.shape} and b {b.shape}")
    if a.shape[-1] % model.step:
        raise ValueError(f"K must be a multiple of {model.step} ({model.name}), got {a.shape[-1]}")
    if c.shape[-2:] != (a.shape[-2], b.shape[-1]):
        raise ValueError(f"c must be [..., {a.shape[-2]}, {b.shape[-1]}], got {c.shape}")
    try:
        return np.broadcast_shapes(a.shape[:-2], b.shape[:-2], c.shape[:-2])
    except ValueError as error:
        raise ValueError(f"a {a.shape}, b {b.shape}, c {c.shape} don't broadcast") from error
