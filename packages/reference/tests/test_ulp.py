"""Distances by encodings."""

import ml_dtypes
import numpy as np
import pytest

from sparse_mla_reference import ulp


def test_distance_counts_encodings():
    one = np.array([1.0, 1.0, -1.0, 0.0, -0.0, 2.0**-149], np.float32)
    other = np.array(
        [1.0, np.nextafter(np.float32(1), np.float32(2)), 1.0, -0.0, 0.0, 0.0], np.float32
    )
    expected = [0, 1, 2 * 0x3F800000 + 1, 1, 1, 1]
    assert ulp.distance(one, other).tolist() == expected


def test_non_finite_pairs_have_no_distance():
    inf, nan = np.inf, np.nan
    a = np.array([inf, inf, inf, nan, nan, np.finfo(np.float32).max], np.float32)
    b = np.array([inf, -inf, 1.0, nan, 1.0, inf], np.float32)
    got = ulp.distance(a, b).tolist()
    assert got == [0, ulp.UNORDERED, ulp.UNORDERED, 0, ulp.UNORDERED, ulp.UNORDERED]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_neighbours_are_one_apart(dtype):
    a = np.array([1.0, -2.0, 0.5], dtype)
    integer = {2: np.int16, 4: np.int32, 8: np.int64}[a.dtype.itemsize]
    b = (a.view(integer) + integer(1)).view(dtype)
    assert ulp.distance(a, b).tolist() == [1, 1, 1]
    assert ulp.distance(b, a).tolist() == [1, 1, 1]


def test_far_float64s_saturate():
    big = np.array([1.7e308])
    assert ulp.distance(big, -big).tolist() == [ulp.UNORDERED - 1]


def test_same_bits_sees_payloads_and_zero_signs():
    a = np.array([0x7FC00000, 0x7FC00000, 0x00000000], np.uint32).view(np.float32)
    b = np.array([0x7FC00000, 0x7FFFFFFF, 0x80000000], np.uint32).view(np.float32)
    assert ulp.same_bits(a, b).tolist() == [True, False, False]


def test_histogram_loses_nothing():
    d = np.array([0, 0, 1, 4, 5, 8, 9, 1000, ulp.UNORDERED])
    counts = ulp.histogram(d)
    assert counts == {
        "0": 2, "1": 1, "2": 0, "3": 0, "4": 1, "5-8": 2, "9-16": 1, "513-1024": 1, "unordered": 1,
    }  # fmt: skip
    assert sum(counts.values()) == d.size
    assert "22.222222%" in ulp.table(counts)


def test_wrong_pairs_are_named():
    with pytest.raises(TypeError, match=r"a and b must share a dtype.*float32 and float64"):
        ulp.distance(np.array([1], np.float32), np.array([1], np.float64))
    swapped = np.ones(1, np.dtype(np.float32).newbyteorder())
    with pytest.raises(TypeError, match="in native byte order"):
        ulp.same_bits(swapped, swapped)
    with pytest.raises(ValueError, match=r"a and b must share a shape, got \(1,\) and \(2,\)"):
        ulp.same_bits(np.array([1], np.float32), np.array([1, 2], np.float32))


def test_a_distance_of_2_to_the_63_is_no_overflow():
    """2.0 has the code 2^62, and its lower neighbour with a minus sign lies 2^63 codes below it."""
    a, b = np.array([2.0]), -np.nextafter(np.array([2.0]), 0)
    assert ulp.distance(a, b).tolist() == [ulp.UNORDERED - 1]


def test_a_table_gives_shares_of_all():
    assert "100.000000%" in ulp.table({"0": 1})
    assert "25.000000%" in ulp.table({"0": 1, "1": 3})
    assert "0.000000%" in ulp.table({"0": 0})
