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
    marks = np.array([*source.empty, 1.0], np.float32)
    assert is_empty(marks, source).tolist() == [True] * len(source.empty) + [False]
    got = convert(marks, source, target)
    assert (got[:-1] == np.float32(target.empty[0])).all()
    assert is_empty(got, target).tolist() == is_empty(marks, source).tolist()


@pytest.mark.parametrize("source", KNOWN, ids=name)
def test_an_empty_row_has_no_word_in_some_libraries(source):
    mark = np.array([[0.0, source.empty[0]]], np.float32)
    for target in (lse.AITER_MERGE, lse.TILELANG_SPARSE_MLA):
        with pytest.raises(
            ValueError, match=r"lse\[0, 1\] must not mean no keys, for which .* has no value, got"
        ):
            convert(mark, source, target)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, -(2.0**30)])
def test_unfixed_marks_are_refused(value):
    for source in (lse.AITER_MERGE, lse.TILELANG_SPARSE_MLA):
        says = r"lse\[1\] must be finite and at least -1e\+06 .*no fixed value .*, got"
        with pytest.raises(ValueError, match=says):
            convert(np.array([3.0, value], np.float32), source, lse.SPARSE_MLA)


def test_a_real_value_that_would_mean_empty_is_refused():
    with pytest.raises(
        ValueError, match=r"lse\[0\] must not become the value that means no keys .*, got inf"
    ):
        convert(np.array([np.inf], np.float32), lse.SPARSE_MLA, lse.FLASH_MLA)
    with pytest.raises(ValueError, match="means no keys to FlashInfer SM120 sparse, got"):
        convert(np.array([-1e30], np.float32), lse.FLASHINFER, lse.FLASHINFER_SM120_SPARSE)


def test_below_a_finite_mark_is_refused():
    with pytest.raises(
        ValueError, match=r"lse\[0\] must not be below .*-1e\+30, .*, got -2.*e\+30"
    ):
        is_empty(np.array([-2e30], np.float32), lse.FLASHINFER_SM120_SPARSE)


def test_nan_stays_nan_and_infinity_stays_where_it_means_nothing_else():
    got = convert(np.array([np.nan, np.inf], np.float32), lse.FLASHINFER, lse.SPARSE_MLA)
    assert got.view(np.uint32).tolist() == [0x7FFFFFFF, 0x7F800000]


def test_natural_is_one_float32_multiply():
    values = np.random.default_rng(61).uniform(-99, 99, 1000).astype(np.float32)
    np.testing.assert_array_equal(natural(values, SM90), values * np.float32(np.log(2)))


def test_base_2_is_the_max_plus_the_logarithm_of_the_unscaled_total():
    top, total = np.array([3.0, 3.0, -np.inf], np.float32), np.array([1.0, 448.0, 0.0], np.float32)
    got = lse.lse2(top, total, SM90)
    want = [np.float32(3) - np.float32(np.log2(448)), np.float32(3), np.float32(-np.inf)]
    assert np.array_equal(got, np.array(want))


def test_where_no_value_is_fixed_minus_a_million_is_the_least_sure_lse():
    least = np.float32(-1e6)
    assert not is_empty(np.array([least]), lse.AITER_MERGE).any()
    with pytest.raises(ValueError, match=r"must be finite and at least -1e\+06"):
        is_empty(np.array([np.nextafter(least, np.float32(-np.inf))]), lse.AITER_MERGE)


def test_dtype_is_checked():
    with pytest.raises(TypeError, match="lse must be float32, got float64"):
        convert(np.array([1.0]), lse.FLASH_MLA, lse.FLASHINFER)


@pytest.mark.parametrize(
    ("value", "source", "target", "why"),
    [
        (-2.1e38, lse.SPARSE_MLA, lse.MAILBOX, "not be below this project's mailbox's -3e"),
        (-2e30, lse.SPARSE_MLA, lse.FLASHINFER_SM120_SPARSE, "not be below .*-1e"),
        (-2e30, lse.FLASHINFER, lse.FLASHINFER_SM120_SPARSE, "not be below .*-1e"),
        (3e38, lse.SPARSE_MLA, lse.FLASHINFER, "stay in float32's range in base 2"),
        (-3e38, lse.SPARSE_MLA, lse.FLASHINFER, "stay in float32's range in base 2"),
        (3e38, lse.FLASH_ATTENTION_3, lse.TILELANG_SPARSE_MLA, "stay in float32's range in base 2"),
        (-2e6, lse.SPARSE_MLA, lse.AITER_MERGE, "be finite and at least .*AITER"),
        (np.nan, lse.SPARSE_MLA, lse.AITER_MERGE, "be finite and at least .*AITER"),
    ],
)
def test_nothing_is_written_that_could_not_be_read(value, source, target, why):
    values = np.array([1.0, value], np.float32)
    with pytest.raises(ValueError, match=rf"lse\[1\] must {why}.*, got "):
        convert(values, source, target)


@pytest.mark.parametrize("target", CONVENTIONS, ids=name)
def test_what_is_written_can_be_read(target):
    """Over float32's whole range, one value at a time: written and legible, or refused."""
    rng = np.random.default_rng(62)
    values = rng.integers(0, 2**32, 2000, np.uint64).astype(np.uint32).view(np.float32)
    written = 0
    for value in values[np.isfinite(values)]:
        try:
            got = convert(value[None], lse.SPARSE_MLA, target)
        except ValueError:
            continue
        assert np.isfinite(got).all()
        assert not is_empty(got, target).any()
        written += 1
    assert written > 500


def test_a_convention_is_not_its_name():
    values = np.array([1.0], np.float32)
    with pytest.raises(TypeError, match=r"source must be a Convention of .*, got str"):
        convert(values, "FlashMLA", lse.FLASHINFER)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"target must be a Convention of .*, got str"):
        convert(values, lse.FLASHINFER, "FlashMLA")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"convention must be a Convention of .*, got str"):
        is_empty(values, "FlashMLA")  # type: ignore[arg-type]
