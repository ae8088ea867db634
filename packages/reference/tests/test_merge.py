"""The cluster merge."""

import numpy as np

from sparse_mla_reference import IDEAL, SM90
from sparse_mla_reference.merge import merge
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
    scale = np.float32(0.75)
    base = merge([a, b], scale, SM90)
    for order in ([none, a, b], [a, none, b], [a, b, none]):
        assert same(base, merge(order, scale, SM90))


def test_nothing_is_zero_and_lowest():
    row, lse2 = merge([empty_partial(2, SM90)] * 4, np.float32(1), SM90)
    assert (row.view(np.uint32) == 0).all()
    assert np.isneginf(lse2).all()


def test_a_nan_sum_is_not_empty():
    a, b = some(np.random.default_rng(41)), empty_partial(3, SM90)
    b.sum[1] = np.nan
    row, lse2 = merge([a, b], np.float32(1), SM90)
    assert np.isnan(lse2).tolist() == [False, True, False]
    assert (row[1].view(np.uint32) == 0x7FFFFFFF).all()
    assert np.isfinite(row[[0, 2]]).all()


def test_order_is_kept():
    rng = np.random.default_rng(42)
    parts = [some(rng, 64) for _ in range(4)]
    assert not same(merge(parts, np.float32(1), SM90), merge(parts[::-1], np.float32(1), SM90))


def test_ideal_merge_is_the_weighted_mean():
    rng = np.random.default_rng(43)
    parts = [Partial(*(x.astype(np.float64) for x in some(rng))) for _ in range(3)]
    weights = np.array([np.exp2(p.max) for p in parts])
    total = sum(w * p.sum for w, p in zip(weights, parts, strict=True))
    row = sum(w[:, None] * p.acc for w, p in zip(weights, parts, strict=True)) / total[:, None]
    got = merge(parts, np.float64(2), IDEAL)
    np.testing.assert_allclose(got.row, 2 * row, rtol=1e-12)
    np.testing.assert_allclose(got.lse2, np.log2(total / 448), rtol=1e-12)
