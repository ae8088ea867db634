import ml_dtypes
import numpy as np
import pytest

from sparse_mla_verify.measure.bits import bits_of, compare_bits


def floats(*values):
    return np.array(values, np.float32)


def test_equal_arrays_are_the_same():
    a = floats(1, -0.0, np.nan, np.inf)
    assert compare_bits("a", a, a.copy()).same


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (0.0, -0.0),
        (np.nan, 1.0),
        (1.0, np.nan),
        (np.inf, -np.inf),
        (1.0, np.nextafter(np.float32(1), np.float32(2))),
    ],
)
def test_one_differing_element_is_found_where_it_is(expected, actual):
    a, e = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
    a[1, 2], e[1, 2] = actual, expected
    found = compare_bits("x", a, e)
    assert (found.same, found.differing, found.elements) == (False, 1, 12)
    assert found.first[0].index == (1, 2)
    assert found.first[0].expected_bits == int(np.float32(expected).view(np.uint32))
    assert found.first[0].actual_bits == int(np.float32(actual).view(np.uint32))
    assert "[1, 2]: expected 0x" in str(found)


def test_a_comparison_shows_its_first_three_differences_in_full():
    actual = np.array([1, 1, 0, 1, 1], ml_dtypes.bfloat16)
    found = compare_bits("x", actual, np.zeros(5, ml_dtypes.bfloat16))
    assert str(found) == "x: 4 of 5 elements differ" + "".join(
        f"\n  [{k}]: expected 0x0000 (0), got 0x3F80 (1)" for k in (0, 1, 3)
    )
    one = compare_bits("x", floats(2), floats(1))
    assert str(one.first[0]) == "[0]: expected 0x3F800000 (1), got 0x40000000 (2)"
    least = compare_bits("x", np.array([1], np.uint32), floats(0))
    assert str(least.first[0]).startswith("[0]: expected 0x00000000 (0), got 0x00000001 (1.4")


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_encodings_are_as_wide_as_the_elements(width):
    found = bits_of(np.zeros((2, 3), f"i{width}") - 1)
    assert (found.dtype, found.shape) == (np.dtype(f"u{width}"), (2, 3))
    assert int(found[0, 0]) == 2 ** (8 * width) - 1


def test_one_element_is_enough_to_be_the_same():
    assert compare_bits("x", floats(1), floats(1)).same


def test_nan_payloads_differ():
    a, b = (np.array([p], np.uint32).view(np.float32) for p in (0x7FFFFFFF, 0x7FC00000))
    assert compare_bits("nan", a, b).differing == 1


def test_an_all_nan_output_differs_everywhere():
    got = np.full(100, np.nan, ml_dtypes.bfloat16)
    assert compare_bits("x", got, np.ones(100, ml_dtypes.bfloat16)).differing == 100


def test_bf16_and_its_encodings_compare():
    a = np.array([1.0, -2.5], ml_dtypes.bfloat16)
    assert compare_bits("x", a, a.view(np.uint16)).same
    assert compare_bits("x", a, a.view(np.uint16) ^ np.uint16(1)).first[0].expected == 1.0078125


def test_nothing_compared_is_not_the_same():
    assert not compare_bits("none", floats(), floats()).same


def test_shapes_and_widths_must_agree():
    with pytest.raises(
        ValueError, match=r"must be \(3, 1\) elements of 4 bytes, .*, got \(3,\) of 4"
    ):
        compare_bits("x", np.zeros(3, np.float32), np.zeros((3, 1), np.float32))
    with pytest.raises(
        ValueError, match=r"must be \(3,\) elements of 2 bytes, .*, got \(3,\) of 4"
    ):
        compare_bits("x", np.zeros(3, np.float32), np.zeros(3, np.uint16))
