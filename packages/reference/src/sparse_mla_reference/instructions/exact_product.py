"""Where a tensor core rounds nothing, and the matrix product that then stands for it.

A row of A is a vector of integers times its least significant bit, and so is a column of B: they
are i' 2^p and j' 2^q. Every sum of some of their products, in any order, is an integer times
2^(p + q) and by Cauchy and Schwarz at most |i'| |j'| such units. The norm |i'| is a vector's *size*
here, and products of two sizes say which bits can occur.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.formats import minifloat
from sparse_mla_reference.formats.minifloat import Format
from sparse_mla_reference.instructions.mma_models import Model

# Outputs from which it pays to look for the pairs in one matrix of a batch.
_LARGE = 1 << 11
# Least significant bit of a vector of zeros: above every other.
_NO_BIT = 1000


def product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """a [T, k, M] and b [T, k, N] to [T, M, N] by BLAS, a few rows at a time.

    A product of a few rows is so small that BLAS computes it in one thread. Several threads would
    wait for each other longer than they work.
    """
    t = np.empty((len(a), a.shape[2], b.shape[2]), a.dtype)
    rows = max(8, (1 << 18) // max(1, b.shape[1] * b.shape[2]))
    for start in range(0, a.shape[2], rows):
        part = slice(start, start + rows)
        np.matmul(a[:, :, part].swapaxes(1, 2), b, out=t[:, part])
    return t


@dataclass(frozen=True)
class Sizes:
    """Sizes of vectors [..., X].

    Attributes:
        norm: Euclidean norm, rounded up; infinite where an element is not finite.
        low_bit: exponent of the least significant bit.
    """

    norm: NDArray[np.float64]
    low_bit: NDArray[np.int32]

    @classmethod
    def of(cls, code: NDArray[Any], model: Model) -> "Sizes":
        """The sizes of vectors of k elements, given as encodings [..., k, X]."""
        square, low_bit = _tables(model.operands, model.normalises_subnormals)
        norm = np.sqrt(square[code].sum(axis=-2)) * (1 + 2.0**-40)
        return cls(norm, low_bit[code].min(axis=-2, initial=_NO_BIT).astype(np.int32))

    def __getitem__(self, index: Any) -> "Sizes":
        """The sizes of the same part of both arrays."""
        return Sizes(self.norm[index], self.low_bit[index])

    def joined(self) -> "Sizes":
        """The sizes of the vectors [X] that result from joining S vectors along the first axis."""
        return Sizes(
            np.sqrt(np.sum(self.norm**2, axis=0)) * (1 + 2.0**-40),
            self.low_bit.min(axis=0, initial=_NO_BIT),
        )

    @property
    def units(self) -> NDArray[np.float64]:
        """Norms in units of the least significant bit, at least 1."""
        return np.maximum(np.ldexp(self.norm, -self.low_bit), 1.0)


@cache
def _tables(
    form: Format, normalises_subnormals: bool
) -> tuple[NDArray[np.float64], NDArray[np.int16]]:
    """Per encoding: its square (infinite where not finite), the exponent of its lowest set bit.

    A subnormal with the least exponent counts as the smallest normal: its products' exponents then
    are no more than their magnitude says. All of BF16 counts as infinite: its products can fall
    below float32, where a zero accumulator has an exponent that matters.
    """
    value = np.abs(minifloat.value_table(form).astype(np.float64))
    finite = np.isfinite(value)
    sized = finite & (form is not minifloat.BF16)
    least = np.where(value > 0, 2.0**form.min_exponent, 0.0)
    size = value if normalises_subnormals else np.maximum(value, least)
    square = np.where(sized, np.where(sized, size, 0) ** 2, np.inf)
    integer = np.ldexp(np.where(finite, value, 0), 149)
    low = [int(x) & -int(x) for x in integer]
    low_bit = [x.bit_length() - 1 - 149 if x else _NO_BIT for x in low]
    return square, np.array(low_bit, np.int16)


Pairs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def pairs_above(a: NDArray[np.float64], b: NDArray[np.float64], limit: float) -> Iterator[Pairs]:
    """Batch items, rows and columns whose rectangles cover every pair with a[m] b[n] >= limit.

    Args:
        a: [T, M] sizes of rows.
        b: [T, N] sizes of columns.
        limit: a power of two, or 0 for all pairs.
    """
    if a.size == 0 or b.size == 0:
        return
    if limit == 0:
        yield np.arange(len(a)), np.arange(a.shape[1]), np.arange(b.shape[1])
        return
    items = np.flatnonzero(a.max(axis=1) * b.max(axis=1) >= limit)
    if items.size and a.shape[1] * b.shape[1] < _LARGE:
        yield items, np.arange(a.shape[1]), np.arange(b.shape[1])
        return
    for item in items:
        for rows, columns in _rectangles(a[item], b[item], limit):
            yield np.array([item]), rows, columns


def _rectangles(
    a: NDArray[np.float64], b: NDArray[np.float64], limit: float
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """One or two rectangles that hold every pair of a row and a column that reaches the limit.

    Take any cut. A row below the cut and a column below limit / cut are no such pair. What remains
    is two rectangles: the rows from the cut upwards with the columns that may reach the limit with
    them, and likewise for the other rows. The cut is the one that leaves the least area.
    """
    cuts = np.exp2(np.arange(0, np.log2(limit) + 0.5, 0.5))
    above = a.size - np.searchsorted(np.sort(a), cuts)
    beyond = b.size - np.searchsorted(np.sort(b), limit / cuts)
    cut = cuts[np.argmin(above * b.size + (a.size - above) * beyond)]
    high = a >= cut
    if high.any():
        yield np.flatnonzero(high), np.flatnonzero(b * a.max() >= limit)
    low = ~high & (a * b.max() >= limit)
    if low.any():
        yield np.flatnonzero(low), np.flatnonzero(b * a[low].max() >= limit)
