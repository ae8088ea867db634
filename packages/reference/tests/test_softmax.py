"""Online softmax: the order of the sum, the running max, NaN and masks."""

import functools
import operator

import numpy as np
import pytest

from sparse_mla_reference import BASE, IDEAL, SM90, Schedule
from sparse_mla_reference.softmax import chunk_softmax, ordered_sum


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def butterfly(p: np.ndarray) -> np.float32:
    """The sum as threads do it: a lane holds two keys of its warp's eight; lanes exchange with
    xor 1 and xor 2; the warps' results are added from warp 0 on."""
    keys = np.zeros(64, np.float32)
    keys[: len(p)] = p
    sums = []
    for warp in range(8):
        mine = keys[8 * warp : 8 * warp + 8]
        lanes = [mine[2 * lane] + mine[2 * lane + 1] for lane in range(4)]
        for xor in (1, 2):
            lanes = [lanes[lane] + lanes[lane ^ xor] for lane in range(4)]
        assert len({float(x) for x in lanes}) == 1
        sums.append(lanes[0])
    return functools.reduce(operator.add, sums)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 33, 63, 64])
def test_sum_order_is_the_warps(count):
    rng = np.random.default_rng(count)
    p = np.exp2(rng.uniform(-20, 8.8, (50, count))).astype(np.float32)
    expected = np.array([butterfly(row) for row in p])
    np.testing.assert_array_equal(bits(ordered_sum(p, BASE, SM90)), bits(expected))


def test_another_order_gives_other_bits():
    p = np.exp2(np.random.default_rng(9).uniform(-20, 8.8, (200, 64))).astype(np.float32)
    base = ordered_sum(p, BASE, SM90)
    assert (bits(ordered_sum(p, Schedule(warp_keys=16), SM90)) != bits(base)).any()
    np.testing.assert_allclose(base, ordered_sum(p.astype(np.float64), BASE, IDEAL), rtol=1e-6)


def test_first_chunk_takes_alpha_one():
    s = np.array([[1.0, 2.0]], np.float32)
    step = chunk_softmax(s, np.array([True, True]), np.array([-np.inf], np.float32), BASE, SM90)
    assert step.max.tolist() == [2.0]
    assert step.alpha.tolist() == [1.0]
    assert step.p[0, 1] == pytest.approx(448, rel=2**-20)


def test_masked_keys_count_for_nothing():
    s = np.array([[1.0, 100.0, np.nan]], np.float32)
    step = chunk_softmax(s, np.array([True, False, False]), np.array([0.5], np.float32), BASE, SM90)
    assert step.max.tolist() == [1.0]
    assert bits(step.p)[0, 1:].tolist() == [0, 0]
    none = chunk_softmax(s, np.zeros(3, bool), np.array([-np.inf], np.float32), BASE, SM90)
    assert none.max.tolist() == [-np.inf]
    assert bits(none.sum).tolist() == [0]
    assert none.alpha.tolist() == [1.0]


def test_a_nan_logit_is_no_max_but_poisons_the_sum():
    s = np.array([[np.nan, 3.0], [1.0, 3.0]], np.float32)
    step = chunk_softmax(s, np.array([True, True]), np.array([-np.inf] * 2, np.float32), BASE, SM90)
    assert step.max.tolist() == [3.0, 3.0]
    assert np.isnan(step.p[0, 0])
    assert np.isnan(step.sum).tolist() == [True, False]


def test_a_row_of_nan_keeps_the_lowest_max():
    s = np.full((1, 2), np.nan, np.float32)
    step = chunk_softmax(s, np.array([True, True]), np.array([-np.inf], np.float32), BASE, SM90)
    assert step.max.tolist() == [-np.inf]
    assert np.isnan(step.sum).all()
