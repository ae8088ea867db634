"""Bitwise comparison of encodings, not values. Every element counts, also NaN and -0."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Difference:
    """One element whose encodings differ."""

    index: tuple[int, ...]
    expected_bits: int
    actual_bits: int
    expected: float
    actual: float
    digits: int

    def __str__(self) -> str:
        want, got = (f"0x{b:0{self.digits}X}" for b in (self.expected_bits, self.actual_bits))
        at = ", ".join(map(str, self.index))
        return f"[{at}]: expected {want} ({self.expected:.9g}), got {got} ({self.actual:.9g})"


@dataclass(frozen=True)
class Comparison:
    """How many of `elements` differ in any bit, and the first of them in index order."""

    what: str
    elements: int
    differing: int
    first: tuple[Difference, ...] = ()

    @property
    def same(self) -> bool:
        """Whether something was compared and no bit differs."""
        return self.elements > 0 and self.differing == 0

    def __str__(self) -> str:
        text = f"{self.what}: {self.differing} of {self.elements} elements differ"
        return text + "".join(f"\n  {difference}" for difference in self.first)


def bits_of(array: NDArray[Any]) -> NDArray[Any]:
    """The encodings of an array's elements as unsigned integers of the same width and shape."""
    return np.ascontiguousarray(array).view(_UNSIGNED[array.dtype.itemsize]).reshape(array.shape)


def values_of(bits: NDArray[Any]) -> NDArray[np.float64]:
    """The values of BF16 (uint16) or FP32 (uint32) encodings, as float64."""
    kinds: dict[int, Any] = {2: ml_dtypes.bfloat16, 4: np.float32}
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return np.ascontiguousarray(bits).view(kinds[bits.dtype.itemsize]).astype(np.float64)


def compare_bits(
    what: str, actual: NDArray[Any], expected: NDArray[Any], *, show: int = 3
) -> Comparison:
    """Compare two arrays of BF16 or FP32, or of their encodings (uint16, uint32), bit for bit.

    `show` is how many differences are kept. Raises ValueError when the shapes or the widths of the
    elements differ: nothing is broadcast, and nothing is converted.
    """
    a, e = bits_of(actual), bits_of(expected)
    if a.shape != e.shape or a.dtype != e.dtype:
        raise ValueError(
            f"actual must be {e.shape} elements of {e.dtype.itemsize} bytes, as expected is, "
            f"got {a.shape} of {a.dtype.itemsize}"
        )
    where = np.argwhere(a != e)
    first = tuple(_difference(tuple(map(int, i)), e, a) for i in where[:show])
    return Comparison(what, a.size, len(where), first)


def _difference(index: tuple[int, ...], expected: NDArray[Any], actual: NDArray[Any]) -> Difference:
    want, got = expected[index], actual[index]
    values = values_of(np.array([want, got]))
    return Difference(
        index, int(want), int(got), float(values[0]), float(values[1]), 2 * want.dtype.itemsize
    )
