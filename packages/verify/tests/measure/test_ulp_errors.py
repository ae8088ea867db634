import ml_dtypes
import numpy as np
import pytest

from sparse_mla_verify.measure.ulp_errors import (
    EDGES,
    UlpErrors,
    bin_labels,
    ulp_errors,
    ulp_of,
)


def bf16(*values):
    return np.array(values, ml_dtypes.bfloat16).view(np.uint16)


def test_the_ulp_is_that_of_the_binade():
    exact = np.array([1.0, 1.99, 2.0, 2.0**-126, 2.0**-130, 0.0])
    wanted = [2.0**-7, 2.0**-7, 2.0**-6, 2.0**-133, 2.0**-133, 2.0**-133]
    assert ulp_of(exact, 2).tolist() == wanted
    assert ulp_of(np.array([1.0]), 4)[0] == 2.0**-23


def test_errors_fall_into_their_bins():
    exact = np.array([1.0, 1.0 + 2.0**-8, 1.0 + 2.0**-7, 1.0 + 2.0**-6, 1.75])
    errors = ulp_errors(bf16(1, 1, 1, 1, 1), exact)
    assert dict(zip(EDGES, errors.counts, strict=True)) == {
        **dict.fromkeys(EDGES, 0),
        0.5: 2,
        1.0: 1,
        2.0: 1,
        float("inf"): 1,
    }
    assert errors.worst == 96.0
    assert errors.mean == (0 + 0.5 + 1 + 2 + 96) / 5


def test_a_half_ulp_more_is_not_correct_rounding():
    errors = ulp_errors(bf16(1), np.array([1.0 + 2.0**-8 + 2.0**-20]))
    assert errors.counts[0] == 0


def test_nothing_is_dropped():
    inf, nan = np.inf, np.nan
    got, exact = bf16(nan, nan, inf, inf, 1, -inf), np.array([nan, 1, inf, -inf, nan, -inf])
    errors = ulp_errors(got, exact)
    assert (errors.matched, errors.unordered, sum(errors.counts)) == (3, 3, 0)
    assert errors.elements == 6


def test_the_ulp_of_a_row_is_that_of_its_largest():
    exact = np.array([[8.0, 2.0**-9], [2.0**-9, np.inf]])
    got = bf16(8, 0, 0, np.inf).reshape(2, 2)
    assert ulp_errors(got, exact, of_row=True).worst == 1 / 2.0**-7
    assert ulp_errors(got, exact, of_row=True).counts[0] == 2
    assert ulp_errors(got[:1], exact[:1], of_row=True).worst == 2.0**-9 / 2.0**-4


def test_errors_add_up():
    a, b = ulp_errors(bf16(1), np.array([1.5])), ulp_errors(bf16(2, np.nan), np.array([2, np.nan]))
    both = ulp_errors(bf16(1, 2, np.nan), np.array([1.5, 2, np.nan]))
    assert a + b == both
    assert a + UlpErrors() == a
    assert UlpErrors() == UlpErrors((0,) * len(EDGES), 0.0, 0.0, 0, 0)
    assert (a.mean, UlpErrors().mean) == (a.worst, 0.0)
    nan = ulp_errors(bf16(np.nan, np.nan), np.array([1.0, np.nan]))
    assert ((nan + nan).unordered, (nan + nan).matched) == (2, 2)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"bits must be of exact's shape \(3,\), got \(2,\)"):
        ulp_errors(bf16(1, 2), np.zeros(3))


def test_every_bin_has_a_label():
    assert (0.5, 1, 2, 4, 8, 16, 32, 64, float("inf")) == EDGES
    assert bin_labels() == (
        *("<= 0.5", "<= 1", "<= 2", "<= 4", "<= 8", "<= 16", "<= 32", "<= 64"),
        "> 64",
    )
