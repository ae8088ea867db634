"""The algebra that users may rely on, on generated inputs."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparse_mla_reference import (
    BASE,
    IDEAL,
    SM90,
    Schedule,
    bounds,
    decode,
    e4m3,
    merge_states,
    minifloat,
    ulp,
)  # fmt: skip
from sparse_mla_reference.bounds import EX2_ERROR
from sparse_mla_reference.instructions.libdevice import log2f
from sparse_mla_reference.instructions.mufu import ex2
from sparse_mla_reference.instructions.tensor_core import MODELS, mma

FORMATS = st.sampled_from([minifloat.E4M3, minifloat.E5M2, minifloat.FP16, minifloat.BF16])
ROUNDINGS = st.sampled_from(["rn", "rz"])
REALS = st.floats(allow_nan=False, allow_infinity=True)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
BYTES = st.integers(0, 255).filter(lambda b: b & 0x7F != 0x7F)
MODERATE = settings(max_examples=25, deadline=None, derandomize=True)
MANY = settings(max_examples=150, deadline=None, derandomize=True)


@MANY
@given(FORMATS, ROUNDINGS, st.booleans(), st.data())
def test_encode_of_decode_is_identity(form, rounding, saturate, data):
    magnitude = data.draw(st.integers(0, form.max_finite))
    sign = data.draw(st.integers(0, 1)) << (form.bits - 1)
    code = np.array([magnitude | sign], form.dtype)
    value = minifloat.decode(code, form)
    assert minifloat.encode(value, form, rounding=rounding, saturate=saturate) == code


@MANY
@given(FORMATS, ROUNDINGS, REALS, REALS)
def test_conversions_are_monotone(form, rounding, x, y):
    low, high = sorted((x, y))
    codes = minifloat.encode(np.array([low, high]), form, rounding=rounding, saturate=True)
    a, b = minifloat.decode(codes, form)
    assert a <= b


@MANY
@given(FORMATS, ROUNDINGS, REALS)
def test_conversions_are_odd(form, rounding, x):
    a, b = minifloat.encode(np.array([x, -x]), form, rounding=rounding, saturate=True)
    assert int(a) ^ int(b) == 1 << (form.bits - 1)


@MANY
@given(FORMATS, st.floats(-1e38, 1e38))
def test_toward_zero_is_never_further_out_than_nearest(form, x):
    nearest, cut = (
        abs(float(minifloat.decode(minifloat.encode(np.array([x]), form, rounding=r,
                                                    saturate=True), form)[0]))
        for r in ("rn", "rz")
    )  # fmt: skip
    assert cut <= nearest
    assert cut <= abs(x)


@MANY
@given(FLOATS, FLOATS)
def test_ulp_distance_is_a_metric_on_a_line(x, y):
    a, b, zero = np.array([x], np.float32), np.array([y], np.float32), np.array([0], np.float32)
    between = ulp.distance(a, b)[0]
    assert between == ulp.distance(b, a)[0]
    assert (between == 0) == bool(ulp.same_bits(a, b)[0])
    assert between <= ulp.distance(a, zero)[0] + ulp.distance(zero, b)[0]


@MANY
@given(st.floats(width=32, min_value=-200, max_value=200), st.floats(width=32, min_value=0))
def test_ex2_grows_and_log2f_grows_to_an_ulp(x, step):
    pair = np.array([x, np.float32(x) + np.float32(step)], np.float32)
    low, high = powers = ex2(pair)
    assert low <= high
    with np.errstate(over="ignore"):
        exact = np.exp2(pair.astype(np.float64))
    normal = (exact >= 2.0**-126) & (exact < 2.0**128 * (1 - EX2_ERROR))
    assert np.all(np.abs(powers[normal] - exact[normal]) <= EX2_ERROR * exact[normal])
    positive = np.sort(np.abs(pair))
    a, b = logarithms = log2f(positive)
    assert a <= b or ulp.distance(np.array([a], np.float32), np.array([b], np.float32))[0] <= 1
    with np.errstate(divide="ignore"):
        nearest = np.log2(positive.astype(np.float64)).astype(np.float32)
    assert np.all(ulp.distance(logarithms, nearest) <= 1)


@MODERATE
@given(st.sampled_from([m for m in MODELS.values() if m.operands is minifloat.E4M3]), st.data())
def test_mma_turns_with_its_operands(model, data):
    """Transposed, and with both signs flipped, the product is the same; with one, the negative."""
    a = data.draw(arrays(np.uint8, (3, model.step), elements=BYTES))
    b = data.draw(arrays(np.uint8, (model.step, 2), elements=BYTES))
    zero = np.zeros((3, 2), np.float32)
    d = mma(a, b, zero, model=model)
    np.testing.assert_array_equal(d, mma(b.T, a.T, zero.T, model=model).T)
    np.testing.assert_array_equal(d, mma(a ^ 0x80, b ^ 0x80, zero, model=model))
    np.testing.assert_array_equal(d, -mma(a ^ 0x80, b, zero, model=model))


@MODERATE
@given(arrays(np.float32, (1, 2, 5), elements=FLOATS), arrays(np.float32, (1, 2), elements=FLOATS),
       st.sampled_from(["2", "e"]))  # fmt: skip
def test_merging_one_state_is_that_state(values, lses, base):
    value, lse = merge_states(values, lses, base=base)
    assert ulp.same_bits(value, values[0]).all()
    assert ulp.same_bits(lse, lses[0] + np.float32(0)).all()  # an LSE of -0 becomes +0


@MODERATE
@given(
    arrays(np.float32, (3, 2, 5), elements=FLOATS),
    arrays(np.float32, (3, 2), elements=FLOATS),
    st.sampled_from(["2", "e"]),
    st.integers(0, 3),
    st.sampled_from([0.0, np.nan, np.inf]),
)
def test_merging_an_empty_state_changes_no_bit(values, lses, base, place, held):
    value, lse = merge_states(values, lses, base=base)
    more_values = np.insert(values, place, np.float32(held), axis=0)
    more_lses = np.insert(lses, place, np.float32(-np.inf), axis=0)
    more_value, more_lse = merge_states(more_values, more_lses, base=base)
    assert ulp.same_bits(value, more_value).all()
    assert ulp.same_bits(lse, more_lse).all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 140), st.sampled_from([1e-3, 0.06, 1.0]),
       st.builds(Schedule, split=st.integers(1, 6), chunk=st.sampled_from([32, 64]),
                 qk_chains=st.integers(1, 4)))  # fmt: skip
def test_split_and_order_only_move_the_result_within_the_bound(seed, count, scale, schedule):
    rng = np.random.default_rng(seed)
    query, kv = (e4m3.encode(rng.standard_normal(s)) for s in ((1, 4, 576), (count, 576)))
    order = rng.permutation(count).astype(np.int32)
    valid = np.array([count], np.int32)
    scales: dict[str, Any] = {"scale_log2": scale, "out_scale": 1.0}
    plain = (query, kv, np.arange(count, dtype=np.int32)[None], valid)
    shuffled = (query, kv, order[None], valid)
    exact, exact_lse = decode(*plain, **scales, machine=IDEAL)
    for arguments, plan in ((plain, BASE), (shuffled, schedule)):
        latent, lse = decode(*arguments, **scales, schedule=plan, machine=SM90)
        limit = bounds(*arguments, **scales, schedule=plan)
        assert (np.abs(latent.astype(np.float64) - exact) <= limit.latent).all()
        assert (np.abs(lse - exact_lse) <= limit.lse).all()


@MODERATE
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_a_row_doesn_t_depend_on_its_batch(seed, count):
    rng = np.random.default_rng(seed)
    query, kv = (e4m3.encode(rng.standard_normal(s)) for s in ((3, 2, 576), (50, 576)))
    rows = rng.integers(-5, 55, (3, count)).astype(np.int32)
    valid = rng.integers(0, count + 3, 3).astype(np.int32)
    scales: dict[str, Any] = {"scale_log2": 0.06, "out_scale": 1.0}
    latent, lse = decode(query, kv, rows, valid, **scales)
    one, one_lse = decode(query[1:2], kv, rows[1:2], valid[1:2], **scales)
    assert ulp.same_bits(latent[1:2], one).all()
    assert ulp.same_bits(lse[1:2], one_lse).all()
