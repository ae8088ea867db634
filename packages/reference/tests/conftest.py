"""Exact rational arithmetic that the tests hold the package against."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

Rounder = Callable[[Fraction, int, int, str], Fraction]


def round_fraction(x: Fraction, fraction_bits: int, min_exponent: int, mode: str) -> Fraction:
    """Round to ``fraction_bits`` after the leading bit, exponents from ``min_exponent`` up and
    unbounded above; ``mode`` is "rn" (ties to even) or "rz"."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, min_exponent) - fraction_bits)
    units = round(x / quantum) if mode == "rn" else int(x / quantum)
    return units * quantum


@pytest.fixture(scope="session")
def rounded() -> Rounder:
    return round_fraction


def fraction_fma(a: float, b: float, c: float) -> np.float32:
    """RN(a b + c) in float32; finite inputs, no overflow."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return np.float32(np.float32(a) * np.float32(b) + np.float32(c))  # IEEE sign of zero
    return np.float32(float(round_fraction(exact, 23, -126, "rn")))


@pytest.fixture(scope="session")
def exact_fma() -> Callable[[float, float, float], np.float32]:
    return fraction_fma


def sum_of_products(
    a: list[float],
    b: list[float],
    c: float,
    *,
    fraction_bits: int = 25,
    output_bits: int = 23,
    least: int = -10_000,
) -> float:
    """One tensor-core sum by its description, finite; operands' exponents are at least ``least``.

    A product of two significands and its quotient by a power of two are exact in Python's floats.
    """
    terms = [(x * y, _binade(x, least) + _binade(y, least)) for x, y in zip(a, b, strict=True)]
    terms = [(value, exponent) for value, exponent in terms if value]
    terms.append((c, _binade(c, -126) if c else -126))
    quantum = 2.0 ** (max(exponent for _, exponent in terms) - fraction_bits)
    total = sum(int(value / quantum) for value, _ in terms)
    result = float(round_fraction(total * Fraction(quantum), output_bits, -126, "rz"))
    return math.copysign(
        result, total
    )  # exact cancellation is +0, what is cut to zero keeps a sign


def _binade(x: float, least: int) -> int:
    return max(math.frexp(x)[1] - 1, least)


@pytest.fixture(scope="session")
def exact_sum() -> Callable[..., float]:
    return sum_of_products


def emulated_e4m3(a: list[float], b: list[float], c: float) -> np.float32:
    """sm_90's E4M3 instruction on one row and column of any multiple of 32 products."""
    d = np.float32(c)
    for start in range(0, len(a), 32):
        t = 0.0
        for remainders in ((0, 1), (2, 3)):
            k = [start + i for i in range(32) if i % 4 in remainders]
            t = sum_of_products([a[i] for i in k], [b[i] for i in k], t)
        d = np.float32(d + np.float32(t))
    return d


@pytest.fixture(scope="session")
def exact_e4m3_mma() -> Callable[[list[float], list[float], float], np.float32]:
    return emulated_e4m3
