"""Distances in units of the last place, by encodings.

Distances count encodings between two values of one format, so +0 and -0 are one apart. A pair that
is non-finite on one side only, NaN against infinity, or infinities of opposite sign has no distance
and is reported as ``UNORDERED``, the largest int64: it can't be averaged away or pass a bound.
Two NaNs of any payload are 0 apart; ``same_bits`` tells payloads apart.

>>> import numpy as np
>>> one = np.float32(1)
>>> int(distance(one, np.nextafter(one, np.float32(2))))
1
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNORDERED = int(np.iinfo(np.int64).max)

_INTEGER = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Elementwise equality of encodings: NaN payloads and zero signs count.

    Raises:
        TypeError: dtypes differ or are not floats this module knows.
        ValueError: shapes differ.
    """
    x, y = _paired(a, b)
    return np.asarray(x == y)


def distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """ULP distance of each pair, int64, same shape.

    Args:
        a, b: arrays of one shape and one dtype: float16, bfloat16, float32 or float64 (float64
            distances beyond 2^63 saturate at ``UNORDERED - 1``).

    Raises:
        TypeError: dtypes differ or are not floats this module knows.
        ValueError: shapes differ.
    """
    x, y = _paired(a, b)
    gap = np.abs(_ordinal(x).astype(np.float64) - _ordinal(y).astype(np.float64))
    exact = np.abs(_ordinal(x) - _ordinal(y))
    result = np.where(gap >= 2.0**63, UNORDERED - 1, exact)
    a64, b64 = (np.asarray(v).astype(np.float64) for v in (a, b))
    both_nan = np.isnan(a64) & np.isnan(b64)
    comparable = np.isfinite(a64) & np.isfinite(b64) | (a64 == b64)
    return np.asarray(np.where(both_nan, 0, np.where(comparable, result, UNORDERED)))


def histogram(distances: NDArray[np.int64]) -> dict[str, int]:
    """Counts of distances by range: exact up to 4, then by powers of two, and unordered pairs.

    Returns:
        Ordered mapping of label (``"0"``, ``"1"``, ..., ``"5-8"``, ..., ``"unordered"``) to count;
        ranges above 4 appear only where they hold something.
    """
    values = np.asarray(distances).ravel()
    ordered = values[values != UNORDERED]
    counts = {str(k): int((ordered == k).sum()) for k in range(5)}
    low = 4
    while ordered.size and low < ordered.max():
        count = int(((ordered > low) & (ordered <= 2 * low)).sum())
        if count:
            counts[f"{low + 1}-{2 * low}"] = count
        low *= 2
    counts["unordered"] = int((values == UNORDERED).sum())
    return counts


def table(counts: Mapping[str, int]) -> str:
    """A histogram as aligned text lines: label, count, share."""
    total = max(1, sum(counts.values()))
    return "\n".join(f"{k:>12} ULP {v:>12,} {v / total:10.6%}" for k, v in counts.items())


def _paired(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    a, b = np.asarray(a), np.asarray(b)
    native = a.dtype.isnative and b.dtype.isnative
    if a.dtype != b.dtype or a.dtype.name not in _INTEGER or not native:
        raise TypeError(
            f"a and b must share a dtype of {sorted(_INTEGER)} in native byte order, "
            f"got {a.dtype} and {b.dtype}"
        )
    if a.shape != b.shape:
        raise ValueError(f"a and b must share a shape, got {a.shape} and {b.shape}")
    integer = _INTEGER[a.dtype.name]
    return a.view(integer), b.view(integer)


def _ordinal(bits: NDArray[Any]) -> NDArray[np.int64]:
    """Sign-magnitude codes as integers in numeric order (-0 just below +0)."""
    wide = bits.astype(np.int64)
    magnitude = wide & int(np.iinfo(bits.dtype).max)
    return np.asarray(np.where(bits < 0, -magnitude - 1, magnitude))
