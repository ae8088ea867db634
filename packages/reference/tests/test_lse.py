"""LSE conventions: every pair of libraries, and what is refused."""

from itertools import product

import numpy as np
import pytest

from sparse_mla_reference import SM90, lse
from sparse_mla_reference.lse import CONVENTIONS, convert, is_empty, natural

KNOWN = [c for c in CONVENTIONS if c.empty is not None]


def name(convention: lse.Convention) -> str:
    return convention.name


@pytest.mark.parametrize(
    ("source", "target"), list(product(CONVENTIONS, CONVENTIONS)), ids=lambda c: c.name
)
def test_real_lses_convert_between_any_two(source, target):
    values = np.random.default_rng(60).uniform(-200, 200, 500).astype(np.float32)
    got = convert(values, source, target)
    factor = {"2e": np.log(2), "e2": 1 / np.log(2)}.get(source.base + target.base, 1.0)
    expected = (values.astype(np.float64) * factor).astype(np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("source", "target"), list(product(KNOWN, KNOWN)), ids=lambda c: c.name)
def test_every_mark_of_an_empty_row_becomes_the_other(source, target):
    marks = np.float32([*source.empty, 1.0])
    assert is_empty(marks, source).tolist() == [True] * len(source.empty) + [False]
    got = convert(marks, source, target)
    assert (got[:-1] == np.float32(target.empty[0])).all()
    assert is_empty(got, target).tolist() == is_empty(marks, source).tolist()


@pytest.mark.parametrize("source", KNOWN, ids=name)
def test_an_empty_row_has_no_word_in_some_libraries(source):
    mark = np.float32([[0.0, source.empty[0]]])
    for target in (lse.AITER_MERGE, lse.TILELANG_SPARSE_MLA):
        with pytest.raises(ValueError, match=r"lse\[0, 1\] = .* means no keys, which .* has no"):
            convert(mark, source, target)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, -(2.0**30)])
def test_unfixed_marks_are_refused(value):
    for source in (lse.AITER_MERGE, lse.TILELANG_SPARSE_MLA):
        with pytest.raises(ValueError, match=r"lse\[1\] = .* may mean no keys"):
            convert(np.float32([3.0, value]), source, lse.SPARSE_MLA)


def test_a_real_value_that_would_mean_empty_is_refused():
    with pytest.raises(ValueError, match=r"lse\[0\] = inf is a real LSE and would mean no keys"):
        convert(np.float32([np.inf]), lse.SPARSE_MLA, lse.FLASH_MLA)
    with pytest.raises(ValueError, match="would mean no keys to FlashInfer SM120 sparse"):
        convert(np.float32([-1e30]), lse.FLASHINFER, lse.FLASHINFER_SM120_SPARSE)


def test_below_a_finite_mark_is_refused():
    with pytest.raises(ValueError, match=r"lse\[0\] = -2.*e\+30 is below .*-1e\+30"):
        is_empty(np.float32([-2e30]), lse.FLASHINFER_SM120_SPARSE)


def test_nan_stays_nan_and_infinity_stays_where_it_means_nothing_else():
    got = convert(np.float32([np.nan, np.inf]), lse.FLASHINFER, lse.SPARSE_MLA)
    assert got.view(np.uint32).tolist() == [0x7FFFFFFF, 0x7F800000]


def test_natural_is_one_float32_multiply():
    values = np.random.default_rng(61).uniform(-99, 99, 1000).astype(np.float32)
    np.testing.assert_array_equal(natural(values, SM90), values * np.float32(np.log(2)))


def test_dtype_is_checked():
    with pytest.raises(TypeError, match="lse must be float32, got float64"):
        convert(np.array([1.0]), lse.FLASH_MLA, lse.FLASHINFER)
