import numpy as np

from sparse_mla_reference import SM90
from sparse_mla_verify.measure.bound_check import BoundCheck, check_bounds, within
from sparse_mla_verify.measure.predict import exact, predict


def test_values_inside_outside_and_without_a_bound():
    got = np.array([1.0, 1.2, 5.0, 2.0])
    check = within("x", got, np.ones(4), np.array([0.0, 0.1, np.inf, 2.0]))
    assert (check.elements, check.outside, check.unbounded) == (4, 1, 1)
    assert check.worst_share == 0.5
    assert check.first == ("x[1]: 1.2, exact 1, bound 0.1",)


def test_where_the_exact_answer_is_not_finite_the_result_must_be_the_same():
    nan, inf = np.nan, np.inf
    got, answer = np.array([nan, 1, -inf, inf, nan]), np.array([nan, nan, -inf, -inf, 1.0])
    assert within("x", got, answer, np.full(5, 100.0)).outside == 3


def test_a_nan_bound_excuses_no_nan_result():
    check = within("x", np.array([np.nan]), np.array([1.0]), np.array([0.5]))
    assert check.outside == 1


def test_checks_add_up():
    a = BoundCheck(4, 1, 0, 0.5, ("a",))
    assert a + BoundCheck(2, 0, 1, 0.7) == BoundCheck(6, 1, 1, 0.7, ("a",))
    b = BoundCheck(1, 1, 2, 0.1, ("b", "c", "d"))
    assert b + b == BoundCheck(2, 2, 4, 0.1, ("b", "c", "d"))
    assert BoundCheck() == BoundCheck(0, 0, 0, 0.0, ())


def test_the_first_three_elements_outside_are_said():
    check = within("x", np.arange(5.0), np.zeros(5), np.full(5, 0.5))
    assert check.outside == 4
    assert check.first == tuple(f"x[{k}]: {k}, exact 0, bound 0.5" for k in (1, 2, 3))


def test_the_reference_keeps_the_bounds_and_a_larger_error_does_not(few):
    case = few[0]
    latent, lse = predict(case)
    answer = exact(case)
    kept = check_bounds(case, (latent, lse), answer, SM90)
    assert (kept.outside, kept.unbounded) == (0, 0)
    assert kept.elements == latent.size + lse.size
    largest = np.unravel_index(np.argmax(np.abs(answer[0])), latent.shape)
    off = latent.copy()
    off[largest] += 0x20  # a quarter of a binade
    assert check_bounds(case, (off, lse), answer, SM90).outside == 1
    assert check_bounds(case, (latent, lse + np.uint32(4000)), answer, SM90).outside > 0
