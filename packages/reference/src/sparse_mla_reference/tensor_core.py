"""Matrix multiply-accumulate as tensor cores do it, bit for bit.

>>> import numpy as np
>>> one, c = np.full((1, 32), 0x38, np.uint8), np.zeros((1, 1), np.float32)
>>> float(mma(one, one.T, c)[0, 0])  # 32 products of 1.0
32.0

Two paths, same bits. Let a row of A be, in one step of an instruction, a vector of integers times
its least significant bit, a = 2^i a', and b = 2^j b' a column of B. Every partial sum of a . b, in
any order, is an integer times 2^(i + j), and by Cauchy and Schwarz at most |a'| |b'| such units. If
that is below 2^24, then each is a float32, and so are all the products; and as |a_k b_k| is below
2^(i + j + 24), the largest exponent is too, so that no term has a bit under the alignment at
2^(e_max - 23) or lower. Then no truncation and no rounding can occur anywhere: the step is the dot
product, which BLAS computes in float32 at once. The other steps take ``aligned_sum``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import float32, minifloat
from sparse_mla_reference.aligned_sum import Operand, aligned_sum, product
from sparse_mla_reference.minifloat import Format
from sparse_mla_reference.mma_models import (
    MODELS,
    SM80_BF16,
    SM80_F16,
    SM89_E4M3,
    SM90_BF16,
    SM90_E4M3,
    SM90_F16,
    SM90_WGMMA_E4M3,
    SM90_WGMMA_F16,
    SM100_BF16,
    SM100_E4M3,
    SM100_F16,
    SM100_TCGEN05_E4M3,
    SM100_TCGEN05_F16,
    SM120_E4M3,
    SM120_F16,
    Evidence,
    Model,
)

__all__ = [
    "MODELS",
    "SM80_BF16",
    "SM80_F16",
    "SM89_E4M3",
    "SM90_BF16",
    "SM90_E4M3",
    "SM90_F16",
    "SM90_WGMMA_E4M3",
    "SM90_WGMMA_F16",
    "SM100_BF16",
    "SM100_E4M3",
    "SM100_F16",
    "SM100_TCGEN05_E4M3",
    "SM100_TCGEN05_F16",
    "SM120_E4M3",
    "SM120_F16",
    "Evidence",
    "Model",
    "mma",
]

# Outputs handled at a time: long enough for numpy's loops, short enough for a core's cache.
_TILE = 1 << 16
# Integers below this are float32s.
_EXACT = 2.0**24


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
    left = _Steps.of(np.broadcast_to(a, (*batch, m, k)).reshape(count, m, k), model)
    columns = np.broadcast_to(b, (*batch, k, n)).reshape(count, k, n).swapaxes(1, 2)
    right = _Steps.of(columns, model)
    d = np.broadcast_to(c, (*batch, m, n)).reshape(count, m, n).copy()
    for tile in _tiles(count, m, n):
        group, rows = tile
        for step in range(k // model.step):
            d[tile] = _step(left.part(step, group, rows), right.part(step, group), d[tile], model)
    return float32.canonical(d.reshape(*batch, m, n))


def _tiles(count: int, m: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Slices of (batch, M) with about ``_TILE`` outputs each."""
    rows = max(1, min(m, _TILE // max(1, n)))
    group = max(1, _TILE // max(1, rows * n))
    for i in range(0, count, group):
        for j in range(0, m, rows):
            yield slice(i, i + group), slice(j, j + rows)


@dataclass(frozen=True)
class _Steps:
    """Rows of A, or columns of B, divided into an instruction's steps.

    Attributes:
        operand: [S, T, k, X], the columns of a step in the order of the model's sums.
        size: [S, T, X] each vector's Euclidean norm in units of its least significant bit, rounded
            up; at least 1; infinite where an element is not finite.
    """

    operand: Operand
    size: NDArray[np.float64]

    @classmethod
    def of(cls, code: NDArray[Any], model: Model) -> "_Steps":
        """Divide encodings [T, X, K]."""
        t, x, k = code.shape
        order = np.concatenate([np.array(columns) for columns in model.sums])
        steps = code.reshape(t, x, k // model.step, model.step)[..., order]
        steps = np.ascontiguousarray(steps.transpose(2, 0, 3, 1))  # [S, T, k, X]
        return cls(Operand.of(steps, model), _size(steps, model.operands))

    def part(self, step: int, group: slice, span: slice = slice(None)) -> "_Steps":
        """One step of a tile."""
        return _Steps(self.operand[step, group, :, span], self.size[step, group, span])


def _size(code: NDArray[Any], form: Format) -> NDArray[np.float64]:
    square, low_bit = (table[code] for table in _size_tables(form))
    norm = np.sqrt(square.sum(axis=-2, dtype=np.float64))
    units = np.ldexp(norm, -low_bit.min(axis=-2, initial=127).astype(np.int32))
    return np.asarray(np.maximum(units, 1.0) * (1 + 2.0**-40))


@cache
def _size_tables(form: Format) -> tuple[NDArray[np.float64], NDArray[np.int16]]:
    """Per encoding: its square (infinite where not finite), the exponent of its lowest set bit."""
    value = minifloat.value_table(form).astype(np.float64)
    square = np.where(np.isfinite(value), value * value, np.inf)
    integer = np.abs(np.ldexp(np.where(np.isfinite(value), value, 0), 149)).astype(object)
    low = [int(x) & -int(x) for x in integer]
    low_bit = np.array([x.bit_length() - 1 - 149 if x else 127 for x in low], np.int16)
    return square, low_bit


def _step(a: _Steps, b: _Steps, c: NDArray[np.float32], model: Model) -> NDArray[np.float32]:
    """One instruction on a tile: a [T, k, M], b [T, k, N], c [T, M, N]."""
    if model.accumulator_inside:
        return _sums(a.operand, b.operand, c, model)
    if model.fraction_bits < 23 or model.output_bits < 23 or not model.normalises_subnormals:
        return np.asarray(c + _sums(a.operand, b.operand, None, model))
    t = product(a.operand.value, b.operand.value)
    for item in range(len(t)):
        for rows, columns in _inexact(a.size[item], b.size[item]):
            left, right = (
                a.operand[item : item + 1, :, rows],
                b.operand[item : item + 1, :, columns],
            )
            t[item][np.ix_(rows, columns)] = _sums(left, right, None, model)[0]
    return np.asarray(c + t)


def _inexact(
    a: NDArray[np.float64], b: NDArray[np.float64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rectangles of rows and columns that cover every pair with a[m] b[n] >= 2^24.

    Below a cut of the rows' sizes and 2^24 / cut of the columns' no pair is inexact: what is left
    are the rows above the cut, with all columns, and the other rows with the columns above theirs.
    """
    if a.size == 0 or b.size == 0 or a.max() * b.max() < _EXACT:
        return
    cuts = np.exp2(np.arange(0, 24.5, 0.5))
    above = a.size - np.searchsorted(np.sort(a), cuts)
    beyond = b.size - np.searchsorted(np.sort(b), _EXACT / cuts)
    cut = cuts[np.argmin(above * b.size + (a.size - above) * beyond)]
    high = a >= cut
    if high.any():
        yield np.flatnonzero(high), np.flatnonzero(b * a.max() >= _EXACT)
    low = ~high & (a * b.max() >= _EXACT)
    if low.any():
        yield np.flatnonzero(low), np.flatnonzero(b * a[low].max() >= _EXACT)


def _sums(
    a: Operand, b: Operand, c: NDArray[np.float32] | None, model: Model
) -> NDArray[np.float32]:
    """The chain of a step's sums: a [T, k, M], b [T, k, N], c [T, M, N] or none."""
    start, t = 0, c
    for columns in model.sums:
        part = slice(start, start + len(columns))
        t = aligned_sum(a[:, part], b[:, part], t, model)
        start = part.stop
    assert t is not None
    return t


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
