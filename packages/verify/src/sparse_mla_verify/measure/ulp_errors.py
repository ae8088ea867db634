"""Errors against the exact answer, in units of the last place of the type that holds them.

The error is fractional: (got - exact) / ulp, where ulp is that of the exact value's binade (of the
least normal one below it). A correctly rounded result has at most 0.5. Where a row's terms cancel,
an element is near zero and its own ulp says little; the ulp of the row's largest element is the
other measure.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_verify.measure.bits import values_of

# Fraction bits and least normal exponent, by the bytes of the encoding.
_FORMATS = MappingProxyType({2: (7, -126), 4: (23, -126)})
# Upper edges of the histogram's bins; 0.5 is a correctly rounded result.
EDGES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, float("inf"))


def ulp_of(exact: NDArray[np.float64], encoding_bytes: int) -> NDArray[np.float64]:
    """The unit of the last place of BF16 (2) or FP32 (4) at each value, same shape."""
    fraction, least = _FORMATS[encoding_bytes]
    exponent = np.frexp(np.where(np.isfinite(exact), exact, 0.0))[1] - 1
    exponent = np.where(exact == 0.0, least, np.maximum(exponent, least))
    return np.asarray(np.ldexp(1.0, exponent - fraction))


@dataclass(frozen=True)
class UlpErrors:
    """The errors of many elements: a count per bin of `EDGES`, and the worst.

    `unordered` counts pairs that have no distance: NaN, or an infinity, on one side only or of
    different kinds. `matched` counts pairs of the same NaN or infinity; they are in no bin.
    """

    counts: tuple[int, ...] = (0,) * len(EDGES)
    worst: float = 0.0
    total: float = 0.0
    matched: int = 0
    unordered: int = 0

    @property
    def elements(self) -> int:
        """All pairs."""
        return sum(self.counts) + self.matched + self.unordered

    @property
    def mean(self) -> float:
        """The mean absolute error of the pairs in the bins."""
        return self.total / max(1, sum(self.counts))

    def __add__(self, other: "UlpErrors") -> "UlpErrors":
        return UlpErrors(
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            max(self.worst, other.worst),
            self.total + other.total,
            self.matched + other.matched,
            self.unordered + other.unordered,
        )


def ulp_errors(
    bits: NDArray[Any], exact: NDArray[np.float64], *, of_row: bool = False
) -> UlpErrors:
    """The errors of BF16 (uint16) or FP32 (uint32) encodings against exact float64 values.

    In ulp of each exact value, or of the largest finite one along the last axis (`of_row`). Raises
    ValueError when the shapes differ.
    """
    if bits.shape != exact.shape:
        raise ValueError(f"bits must be of exact's shape {exact.shape}, got {bits.shape}")
    size = np.abs(np.where(np.isfinite(exact), exact, 0.0))
    if of_row:
        size = np.broadcast_to(size.max(axis=-1, keepdims=True), size.shape)
    got = values_of(bits)
    finite = np.isfinite(got) & np.isfinite(exact)
    matched = ~finite & ((got == exact) | (np.isnan(got) & np.isnan(exact)))
    gap = np.abs(got[finite] - exact[finite]) / ulp_of(size[finite], bits.dtype.itemsize)
    bins = np.searchsorted(EDGES, gap)
    counts = np.bincount(bins, minlength=len(EDGES))
    return UlpErrors(
        counts=tuple(int(c) for c in counts),
        worst=float(gap.max(initial=0.0)),
        total=float(gap.sum()),
        matched=int(matched.sum()),
        unordered=int((~finite & ~matched).sum()),
    )


def bin_labels() -> tuple[str, ...]:
    """The bins in words, as `<= 0.5`, `<= 1`, ..., `> 64`."""
    return (*(f"<= {edge:g}" for edge in EDGES[:-1]), f"> {EDGES[-2]:g}")
