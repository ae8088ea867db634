from dataclasses import replace

import numpy as np
import pytest

from sparse_mla_reference import IDEAL, SM90, Schedule, e4m3
from sparse_mla_verify.inputs.cases import all_cases
from sparse_mla_verify.inputs.schedules import REFERENCE
from sparse_mla_verify.measure.predict import exact, predict
from sparse_mla_verify.models.altered_reference import (
    ALL_STAGES,
    Alteration,
    Altered,
    PFormat,
    _stochastic,
)

TOLD_APART = ("normal/checkpoint", "uniform-bytes/checkpoint", "nan-used/keys-and-query")


def rows(case, *wanted):
    at = list(wanted)
    return replace(case, query=case.query[at], rows=case.rows[at], valid=case.valid[at])


@pytest.mark.parametrize("schedule", REFERENCE)
@pytest.mark.parametrize("name", [*TOLD_APART, "rising-max/every-chunk", "counts/short"])
def test_nothing_altered_is_the_reference(cases, schedule, name):
    case = replace(rows(cases[name], 0, 1, 2), schedule=schedule)
    latent, lse = Altered(REFERENCE[schedule], SM90).bits(case)
    assert np.array_equal(latent, predict(case)[0])
    assert np.array_equal(lse, predict(case)[1])


@pytest.mark.parametrize("name", [*TOLD_APART, "invalid-ids/places"])
def test_no_stage_at_all_is_exact(cases, name):
    case = rows(cases[name], 0, 2)
    found = Altered(REFERENCE["base"], SM90, stages=frozenset()).decode(case)
    for got, want in zip(found, exact(case), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_each_stage_alone_rounds_something(cases):
    case = rows(cases["normal/long"], 2)
    want = exact(case)
    for stage in ALL_STAGES - {"qk"}:  # whose sums of so few bits are exact
        found = Altered(REFERENCE["base"], SM90, stages=frozenset({stage})).decode(case)
        assert any(np.any(a.astype(float) != b) for a, b in zip(found, want, strict=True)), stage


def test_the_product_of_the_logits_rounds_something(cases):
    case = rows(cases["uniform-bytes/checkpoint"], 0)
    found = Altered(REFERENCE["base"], SM90, stages=frozenset({"qk"})).decode(case)
    assert np.any(found[1] != exact(case)[1])


def test_an_unknown_stage_and_a_machine_that_rounds_nothing_are_refused():
    with pytest.raises(ValueError, match="softmax"):
        Altered(REFERENCE["base"], SM90, stages=frozenset({"softmax"}))
    with pytest.raises(TypeError, match="IDEAL"):
        Altered(REFERENCE["base"], IDEAL)


def test_a_format_of_p_is_what_its_name_says(cases):
    """One key of two at 1 and 2^-t: the latents show P's rounding alone."""
    from sparse_mla_verify.inputs.cases import (
        COLUMNS,
        _case,
        _rope_keys,
        _rope_query,
        e4m3_bytes,
    )

    latent = np.zeros((2, 512))
    latent[1] = 1.0
    keys = _rope_keys(e4m3_bytes(latent), np.array([0.0, -1.375]))
    assert keys.shape == (2, COLUMNS)
    case = _case("p", "", _rope_query(1, 16, [1.0]), [keys], width=64, scale_log2=1.0)
    p = 448 * 2**-1.375
    want: dict[PFormat, float] = {
        "fp32": p,
        "bf16": 173.0,
        "e4m3": 176.0,
        "e5m2": 160.0,
        "fp16": float(np.float16(p)),
    }
    for form, value in want.items():
        altered = Altered(
            Schedule(split=1), SM90, Alteration(p_format=form), frozenset({"quantise"})
        )
        found = altered.decode(case)[0][0, 0, 0] * (448 + p)
        assert abs(found - value) < 1e-5, form


def test_stochastic_rounding_goes_to_a_neighbour():
    p = np.random.default_rng(0).uniform(0, 448, (50, 50)).astype(np.float32)
    found = e4m3.decode(_stochastic(p))
    low = e4m3.decode(e4m3.encode(p, rounding="rz"))
    up = found > low
    assert np.all(found[up] > p[up])
    assert 0.3 < up.mean() < 0.7
    whole = np.array([448.0, 2.0, 0.0], np.float32)
    assert np.array_equal(e4m3.decode(_stochastic(whole)), whole)


def test_all_cases_are_decoded_the_same_alone(cases):
    """A row's bits don't depend on the rows beside it."""
    case = cases["counts/short"]
    altered = Altered(REFERENCE["base"], SM90, Alteration(p_format="bf16"))
    alone = altered.bits(rows(case, 9))
    together = altered.bits(rows(case, 8, 9, 10))
    assert np.array_equal(alone[0][0], together[0][1])
    assert len(all_cases()) == len(cases)
