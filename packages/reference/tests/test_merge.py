"""The cluster merge."""

import ml_dtypes
import numpy as np
import pytest

from sparse_mla_reference import IDEAL, SM90
from sparse_mla_reference.merge import merge, merge_states
from sparse_mla_reference.owner_merge import owner_merge
from sparse_mla_reference.partial import Partial, empty_partial


def some(rng: np.random.Generator, heads: int = 3) -> Partial:
    return Partial(
        rng.uniform(-5, 5, heads).astype(np.float32),
        rng.uniform(448, 4000, heads).astype(np.float32),
        (rng.standard_normal((heads, 512)) * 400).astype(np.float32),
    )


def same(a, b) -> bool:
    return all(
        np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True)
    )


def test_empty_partials_change_no_bit():
    rng = np.random.default_rng(40)
    a, b, none = some(rng), some(rng), empty_partial(3, SM90)
    scale = np.array(0.75, np.float32)
    base = merge([a, b], scale, SM90)
    for order in ([none, a, b], [a, none, b], [a, b, none]):
        assert same(base, merge(order, scale, SM90))


def test_nothing_is_zero_and_lowest():
    row, lse2 = merge([empty_partial(2, SM90)] * 4, np.array(1, np.float32), SM90)
    assert (row.view(np.uint32) == 0).all()
    assert np.isneginf(lse2).all()


def test_a_nan_sum_is_not_empty():
    a, b = some(np.random.default_rng(41)), empty_partial(3, SM90)
    b.sum[1] = np.nan
    row, lse2 = merge([a, b], np.array(1, np.float32), SM90)
    assert np.isnan(lse2).tolist() == [False, True, False]
    assert (row[1].view(np.uint32) == 0x7FFFFFFF).all()
    assert np.isfinite(row[[0, 2]]).all()


def test_order_is_kept():
    rng = np.random.default_rng(42)
    parts = [some(rng, 64) for _ in range(4)]
    assert not same(
        merge(parts, np.array(1, np.float32), SM90),
        merge(parts[::-1], np.array(1, np.float32), SM90),
    )


def test_ideal_merge_is_the_weighted_mean():
    rng = np.random.default_rng(43)
    parts = [Partial(*(x.astype(np.float64) for x in some(rng))) for _ in range(3)]
    weights = np.array([np.exp2(p.max) for p in parts])
    total = sum(w * p.sum for w, p in zip(weights, parts, strict=True))
    row = sum(w[:, None] * p.acc for w, p in zip(weights, parts, strict=True)) / total[:, None]
    got = merge(parts, np.array(2, np.float64), IDEAL)
    np.testing.assert_allclose(got.row, 2 * row, rtol=1e-12)
    np.testing.assert_allclose(got.lse2, np.log2(total / 448), rtol=1e-12)


def states(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    values = rng.standard_normal((count, 3, 16)).astype(np.float32)
    return values, rng.uniform(-9, 9, (count, 3)).astype(np.float32)


@pytest.mark.parametrize("base", ["2", "e"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_merge_states_is_the_weighted_mean(base, count):
    values, lses = states(np.random.default_rng(44), count)
    weights = (np.exp2 if base == "2" else np.exp)(lses.astype(np.float64))
    total = weights.sum(axis=0)
    mean = (weights[..., None] * values).sum(axis=0) / total[:, None]
    log = np.log2(total) if base == "2" else np.log(total)
    value, lse = merge_states(values, lses, base=base)
    assert value.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, log, rtol=1e-6)
    ideal = merge_states(values.astype(float), lses.astype(float), base=base, machine=IDEAL)
    np.testing.assert_allclose(ideal[0], mean, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(ideal[1], log, rtol=1e-12)


def test_lses_of_the_wrong_base_give_another_answer():
    """The fault that users report: base 2 merged as natural is off by far more than rounding."""
    values, lses = states(np.random.default_rng(45), 2)
    right, _ = merge_states(values, lses, base="2")
    wrong, _ = merge_states(values, lses, base="e")
    assert np.abs(right - wrong).max() > 0.01


@pytest.mark.parametrize("base", ["2", "e"])
def test_empty_states_with_empty_states_are_empty(base):
    value, lse = merge_states(
        np.full((3, 2, 4), np.nan, np.float32), np.full((3, 2), -np.inf, np.float32), base=base
    )
    assert (value.view(np.uint32) == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_lse_shows(bad):
    values, lses = states(np.random.default_rng(46), 3)
    lses[1, 2] = bad
    value, lse = merge_states(values, lses, base="2")
    assert np.isnan(lse).tolist() == [False, False, True]
    assert np.isnan(value).all(axis=1).tolist() == [False, False, True]


def test_merge_states_in_base_2_is_the_owner_merge():
    rng = np.random.default_rng(47)
    values = rng.standard_normal((8, 96, 512)).astype(ml_dtypes.bfloat16)
    lses = rng.uniform(-9, 9, (8, 96)).astype(np.float32)
    value, _ = merge_states(values, lses, base="2")
    latent, _ = owner_merge(values, lses)
    np.testing.assert_array_equal(SM90.round_out(value).view(np.uint16), latent.view(np.uint16))


def test_states_of_one_head_need_no_axis():
    values, lses = states(np.random.default_rng(49), 3)
    value, lse = merge_states(values[:, 0], lses[:, 0], base="2")
    together = merge_states(values, lses, base="2")
    assert same((value, lse), (together[0][0], together[1][0]))


def test_wrong_states_are_named():
    values, lses = states(np.random.default_rng(48), 2)
    with pytest.raises(ValueError, match="base must be '2' or 'e', got '10'"):
        merge_states(values, lses, base="10")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"machine must be a Machine of .*, got str"):
        merge_states(values, lses, base="2", machine="SM90")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lses must be float32, got float64"):
        merge_states(values, lses.astype(np.float64), base="2")
    with pytest.raises(ValueError, match=r"values must be \[S, ..., D\].*S of 1 or more"):
        merge_states(values[:0], lses[:0], base="2")
    with pytest.raises(ValueError, match=r"got \[2, 3, 16\] and \[2, 2\]"):
        merge_states(values, lses[:, :2], base="2")
