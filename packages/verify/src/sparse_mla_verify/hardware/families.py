"""Inputs of tensor-core instructions, by what they are meant to upset.

A family takes a generator of random numbers, the operands' format and the shape, and returns the
encodings of A [T, M, K] and of B by columns [T, N, K], and C [T, M, N] in float32; M = N = `SIDE`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import minifloat
from sparse_mla_reference.formats.minifloat import Format

SIDE = 128
# Steps of an instruction along K, where there is more than one: the accumulator of each but the
# first is the result of the one before.
STEPS = {"chained": 8, "chained-spread": 8}

Rng = np.random.Generator
Codes = NDArray[Any]
Inputs = tuple[Codes, Codes, NDArray[np.float32]]


@dataclass(frozen=True)
class Shape:
    """T problems of D [side, side], K columns of A."""

    problems: int
    side: int
    k: int

    @property
    def operand(self) -> tuple[int, int, int]:
        """Of A, and of B by columns."""
        return self.problems, self.side, self.k

    @property
    def accumulator(self) -> tuple[int, int, int]:
        """Of C and D."""
        return self.problems, self.side, self.side


def _codes(rng: Rng, form: Format, shape: tuple[int, ...], low: int, high: int) -> Codes:
    """Finite encodings: random signs and fractions, exponent fields from low to high inclusive."""
    field = rng.integers(low, high + 1, shape)
    fraction = rng.integers(0, 1 << form.fraction_bits, shape)
    magnitude = np.minimum(field << form.fraction_bits | fraction, form.max_finite)
    return magnitude | rng.integers(0, 2, shape) << (form.bits - 1)


def _float(rng: Rng, shape: tuple[int, ...], low: Any, high: Any) -> NDArray[np.float32]:
    """Random signs and fractions, exponents from low to high inclusive (-127: subnormals)."""
    low, high = np.clip(low, -127, 127), np.clip(high, -127, 127)
    bits = rng.integers(low + 127, high + 128, shape) << 23 | rng.integers(0, 1 << 23, shape)
    return np.asarray(bits | rng.integers(0, 2, shape) << 31).astype(np.uint32).view(np.float32)


def _normal_codes(rng: Rng, form: Format, shape: tuple[int, ...]) -> Codes:
    x = rng.standard_normal(shape, dtype=np.float32)
    return minifloat.encode(x, form, saturate=True).astype(np.int64)


def _top(form: Format) -> int:
    """Exponent field of the largest finite numbers."""
    return form.max_finite >> form.fraction_bits


def _span(form: Format) -> tuple[int, int]:
    """First and last exponent field whose products are normal float32 numbers."""
    return max(0, form.bias - 62), min(_top(form), form.bias + 60)


def _dot(form: Format, a: Codes, b: Codes) -> NDArray[np.float64]:
    """A B in float64, summed in the order of k on every machine."""
    table = minifloat.value_table(form).astype(np.float64)
    left, right = table[a], table[b]
    total = np.zeros((*a.shape[:2], b.shape[1]))
    for k in range(a.shape[2]):
        total += left[:, :, None, k] * right[:, None, :, k]
    return total


def _normal(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """Standard normal operands, C as large as the sum."""
    a, b = (_normal_codes(rng, form, shape.operand) for _ in "ab")
    c = rng.standard_normal(shape.accumulator, dtype=np.float32) * np.float32(shape.k**0.5)
    return a, b, c


def _chained(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """Standard normal operands over eight steps, from zero."""
    a, b, c = _normal(rng, form, shape)
    return a, b, np.zeros_like(c)


def _spread(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """Every exponent alike, of the operands and, over the products' range, of C."""
    first, last = _span(form)
    a, b = (_codes(rng, form, shape.operand, first, last) for _ in "ab")
    low = 2 * (max(first, 1) - form.bias - form.fraction_bits)
    return a, b, _float(rng, shape.accumulator, low, 2 * (last - form.bias) + 6)


def _cancellation(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """Products in pairs of opposite sign, a third of them not quite equal; C is small."""
    first, last = _span(form)
    a, b = (_codes(rng, form, shape.operand, first + last // 3, last - 1) for _ in "ab")
    nudge = rng.random(b[..., 1::2].shape) < 0.3
    a[..., 1::2] = a[..., ::2] ^ 1 << (form.bits - 1)
    b[..., 1::2] = b[..., ::2] + nudge
    order = rng.permutation(shape.k)
    middle = first + last - 2 * form.bias
    return a[..., order], b[..., order], _float(rng, shape.accumulator, middle - 30, middle)


def _cancelled_by_c(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """C the negative of the sum, to the last bit or three beside it."""
    a, b = (_normal_codes(rng, form, shape.operand) for _ in "ab")
    c = -_dot(form, a, b).astype(np.float32)
    beside = c.view(np.int32) + rng.integers(-3, 4, c.shape, dtype=np.int32)
    return a, b, np.where(c == 0, c, beside.view(np.float32))


def _subnormals(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """A subnormal or next to it; so is B, or middling, by problem; C tiny, subnormal or zero."""
    a = _codes(rng, form, shape.operand, 0, 1)
    b = _codes(rng, form, shape.operand, 0, 1)
    middling = _codes(rng, form, shape.operand, form.bias - 2, form.bias + 2)
    b[::2] = middling[::2]
    least = 2 * (form.min_exponent - form.fraction_bits)
    c = _float(rng, shape.accumulator, least - 4, form.min_exponent + 4)
    kind = rng.integers(0, 4, c.shape)
    c[kind == 0] *= np.float32(0)
    return a, b, np.where(kind == 1, _float(rng, c.shape, -127, -127), c)


def _overflow(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """Products about 2^127, or the largest; of one or both signs; C near FLT_MAX or infinite."""
    about = min(_top(form), form.bias + 63)
    a, b = (_codes(rng, form, shape.operand, about - 1, about) for _ in "ab")
    largest_codes = (_codes(rng, form, shape.operand, _top(form) - 1, _top(form)) for _ in "ab")
    for x, largest in zip((a, b), largest_codes, strict=True):
        x[::4] = largest[::4]
    a[::2] &= (1 << (form.bits - 1)) - 1
    b[::2] &= (1 << (form.bits - 1)) - 1
    c = _float(rng, shape.accumulator, 120, 127)
    highest = np.uint32(0x7F7FFFFF) - rng.integers(0, 4, c.shape, dtype=np.uint32)
    kind = rng.random(c.shape)
    near = np.copysign(highest.view(np.float32), c)
    c = np.where(kind < 0.5, near, c)
    return a, b, np.where(kind > 0.9, np.copysign(np.float32(np.inf), c), c)


def _specials(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """A few NaN (of any payload) and infinities among normal operands and in C."""
    a, b, c = _normal(rng, form, shape)
    beyond = (1 << (form.bits - 1)) - form.max_finite - 1
    for x in (a, b):
        chosen = rng.random(x.shape) < 0.004
        special = form.max_finite + 1 + rng.integers(0, beyond, x.shape)
        special = np.where(rng.random(x.shape) < 0.5, form.max_finite + 1, special)
        x[chosen] = (special | rng.integers(0, 2, x.shape) << (form.bits - 1))[chosen]
    bits = rng.choice(
        np.array([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32), c.shape
    )
    bits |= rng.integers(0, 2, c.shape, dtype=np.uint32) << np.uint32(31)
    return a, b, np.where(rng.random(c.shape) < 0.05, bits.view(np.float32), c)


def _zeros(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """Zeros of both signs nearly everywhere, in whole rows of A; C zero, subnormal or normal."""
    a, b, c = _normal(rng, form, shape)
    for x in (a, b):
        x[rng.random(x.shape) < 0.8] &= 1 << (form.bits - 1)
    a[rng.random(shape.operand[:2]) < 0.3] &= 1 << (form.bits - 1)
    kind = rng.integers(0, 4, c.shape)
    c = np.where(kind == 1, _float(rng, c.shape, -127, -127), c)
    return a, b, np.where(kind >= 2, np.copysign(np.float32(0), c), c)


def _tiny_c(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """Huge products, and a C that lies across the last bits that are kept."""
    last = _span(form)[1]
    a, b = (_codes(rng, form, shape.operand, last - 2, last) for _ in "ab")
    largest = 2 * (last - form.bias)
    return a, b, _float(rng, shape.accumulator, largest - 40, largest - 8)


def _huge_c(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """Tiny products that lie across the last bits of a huge C."""
    first = max(1, _span(form)[0])
    a, b = (_codes(rng, form, shape.operand, first, first + 3) for _ in "ab")
    least = 2 * (first - form.bias)
    return a, b, _float(rng, shape.accumulator, least + 8, least + 40)


def _alignment(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """One large product, the others 8 to 28 binades below it: cut at every position."""
    top = _span(form)[1] - 1
    a, b = (_codes(rng, form, shape.operand, top, top) for _ in "ab")
    below = np.minimum(rng.integers(4, 15, (2, shape.problems, 1, shape.k)), top)
    below[..., rng.integers(shape.k)] = 0
    a, b = (x - (drop << form.fraction_bits) for x, drop in zip((a, b), below, strict=True))
    largest = 2 * (top - form.bias)
    c = _float(rng, shape.accumulator, largest - 28, largest + 2)
    return a, b, np.where(rng.random(c.shape) < 0.5, np.float32(0), c)


def _encodings(rng: Rng, form: Format, shape: Shape) -> Inputs:
    """Every encoding alike, NaN and infinities among them."""
    a, b = (rng.integers(0, 1 << form.bits, shape.operand) for _ in "ab")
    c = rng.integers(0, 1 << 32, shape.accumulator, dtype=np.uint32).view(np.float32)
    return a, b, c


MATRIX_FAMILIES: dict[str, Callable[[Rng, Format, Shape], Inputs]] = {
    "normal": _normal,
    "spread": _spread,
    "cancellation": _cancellation,
    "cancelled-by-c": _cancelled_by_c,
    "subnormals": _subnormals,
    "overflow": _overflow,
    "specials": _specials,
    "zeros": _zeros,
    "tiny-c": _tiny_c,
    "huge-c": _huge_c,
    "alignment": _alignment,
    "encodings": _encodings,
    "chained": _chained,
    "chained-spread": _spread,
}
