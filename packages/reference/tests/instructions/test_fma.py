"""FMA and float32 arithmetic against rationals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla_reference import float32, fma

FLOATS = st.floats(width=32, allow_nan=False, min_value=-(2.0**60), max_value=2.0**60)


def bits(x) -> int:
    return int(np.asarray(x, np.float32).view(np.uint32))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(FLOATS, FLOATS, FLOATS)
def test_fma_is_rounded_once(exact_fma, a, b, c):
    assert bits(fma(*np.array([a, b, c], np.float32))) == bits(exact_fma(a, b, c))


def test_fma_near_ties(exact_fma):
    """a b is below half an ulp of c by k^2 2^-70, which a float64 sum loses: it sees a tie."""
    rng = np.random.default_rng(2)
    k = rng.integers(1, 300, 2000) * 2.0**-23
    a, b = ((1 + k) * 2.0**-12).astype(np.float32), ((1 - k) * 2.0**-12).astype(np.float32)
    c = (1 + rng.integers(0, 1 << 22, 2000) * 2.0**-23).astype(np.float32)
    by_cast = (a.astype(np.float64) * b + c).astype(np.float32)
    expected = np.array([exact_fma(*xyz) for xyz in zip(a, b, c, strict=True)], np.float32)
    np.testing.assert_array_equal(fma(a, b, c).view(np.uint32), expected.view(np.uint32))
    assert (by_cast != expected).sum() > 500


@pytest.mark.parametrize("units", [-2, -1, 0, 1, 2])
def test_fma_around_ties_on_both_sides(units, exact_fma):
    """The float64 sum lies some units from a tie of float32, the exact sum under one from it."""
    rng = np.random.default_rng(5 + units)
    near = (1 << 46) + (units << 18)  # half an ulp of c is 2^46; an ulp of the float64 sum 2^18
    m = rng.integers(1 << 23, 1 << 24, 20_000)
    n = np.rint(near / m).astype(np.int64)
    rest = m * n - near
    chosen = (np.abs(rest) < 1 << 17) & (rest != 0)
    m, n, rest = m[chosen][:200], n[chosen][:200], rest[chosen][:200]
    assert len(m) == 200
    assert 50 < np.sum(rest > 0) < 150
    scale = 2.0 ** rng.integers(-3, 4, 200)
    a, b = (m * 2.0**-35 * scale).astype(np.float32), (n * 2.0**-35).astype(np.float32)
    c = ((1 + rng.integers(0, 1 << 22, 200) * 2.0**-23) * scale).astype(np.float32)
    for sign in (1, -1):
        got = fma(sign * a, b, sign * c)
        for x, y, z, result in zip(sign * a, b, sign * c, got, strict=True):
            assert bits(result) == bits(exact_fma(x, y, z))


def test_fma_into_subnormals(exact_fma):
    rng = np.random.default_rng(3)
    a = np.ldexp(rng.uniform(1, 2, 2000), -70).astype(np.float32)
    b = np.ldexp(rng.uniform(1, 2, 2000), rng.integers(-80, -50, 2000)).astype(np.float32)
    c = np.ldexp(rng.uniform(-2, 2, 2000), -130).astype(np.float32)
    for x, y, z, result in zip(a, b, c, fma(a, b, c), strict=True):
        assert bits(result) == bits(exact_fma(x, y, z))


def test_specials():
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    one, zero = np.float32(1), np.float32(0)
    assert bits(fma(inf, zero, one)) == 0x7FFFFFFF
    assert bits(fma(inf, one, -inf)) == 0x7FFFFFFF
    assert bits(fma(one, one, nan)) == 0x7FFFFFFF
    assert bits(fma(inf, one, one)) == bits(inf)
    assert bits(fma(np.float32(2e38), np.float32(2), zero)) == bits(inf)
    assert bits(fma(-one, zero, -zero)) == bits(-zero)
    assert bits(fma(one, one, -one)) == 0
    assert bits(float32.add(inf, -inf)) == bits(float32.div(zero, zero)) == 0x7FFFFFFF
    assert bits(float32.mul(inf, zero)) == 0x7FFFFFFF


def test_subnormals_are_kept_unless_flushed():
    tiny, one = np.float32(2.0**-127), np.float32(1)
    for kept in (
        float32.add(tiny, np.float32(0)),
        float32.mul(tiny, one),
        float32.div(tiny, one),
        fma(tiny, one, np.float32(0)),
    ):
        assert bits(kept) == bits(tiny)


def test_ftz_flushes_inputs_and_results_and_keeps_signs():
    tiny, one = np.float32(-(2.0**-127)), np.float32(1)
    zero = np.float32(0)
    least = np.float32(2.0**-126)
    assert bits(fma(tiny, one, -zero, ftz=True)) == 0x80000000
    assert bits(fma(tiny, one, -zero)) == bits(tiny)
    assert bits(float32.mul(least, np.float32(-0.5), ftz=True)) == 0x80000000
    assert bits(float32.add(least, tiny, ftz=True)) == bits(least)
    assert bits(float32.div(least, np.float32(2), ftz=True)) == 0
    assert bits(float32.div(least, np.float32(2))) == 1 << 22


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="b must be float32, got float64"):
        fma(np.float32(1), np.float64(1), np.float32(1))
    with pytest.raises(TypeError, match="a must be float32, got int32"):
        float32.add(np.int32(1), np.float32(1))
