from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from sparse_mla_verify.attribution import attribute as at
from sparse_mla_verify.evidence.recordings import load, shipped
from sparse_mla_verify.inputs.cases import FAMILIES
from sparse_mla_verify.models.altered_reference import STAGES
from sparse_mla_verify.models.counterfactuals import BY_NAME


@pytest.fixture(scope="module")
def recording():
    path = shipped()
    assert path is not None
    return load(path)


@pytest.fixture(scope="module")
def normal(recording):
    (case,) = at.cases_of(["normal"])
    return at.attribute(case, recording=recording)


def test_steps_go_from_the_exact_answer_to_the_recorded_bits(normal):
    assert [s.stage for s in normal.steps] == list(STAGES)
    assert normal.tiles == 2
    assert normal.tiles_differing == 0
    assert normal.elements == 32 * 512


def test_quantising_p_is_what_it_costs(normal):
    by_stage = {s.stage: s for s in normal.steps}
    quantise = by_stage["quantise"]
    assert quantise.change.ulp > 10 * max(
        s.change.ulp for s in normal.steps if s.stage != "quantise"
    )
    assert 0 < by_stage["out"].alone.ulp <= by_stage["out"].alone.worst_ulp <= 0.5
    assert by_stage["lse"].change.ulp == 0 < by_stage["lse"].alone.lse


def test_costs_are_ordered_as_the_formats_are(normal):
    costs = {c.name: c.error.ulp for c in normal.costs}
    assert costs["p-fp32"] < costs["p-bf16"] < normal.error.ulp < costs["p-e5m2"]
    assert normal.error.ulp < costs["p-stochastic"] < costs["p-rz"]
    assert set(at.COSTS) <= BY_NAME.keys()


def test_a_size_is_in_units_of_the_rows_largest_latent():
    exact = (np.full((1, 16, 512), 0.25), np.zeros((1, 16)))
    exact[0][0, :, 7] = 1.5
    other = (exact[0] + 2.0**-8, exact[1] - 3.0)
    found = at.size(other, exact, exact)
    assert found.ulp == found.worst_ulp == 0.5  # the ULP of BF16 in [1, 2) is 2^-7
    assert found.lse == 3.0
    assert found.relative == pytest.approx(2.0**-8 / np.sqrt(np.mean(exact[0] ** 2)))


def test_other_bits_in_the_recording_are_a_residual(recording):
    (case,) = at.cases_of(["hugely-negative"])
    record = next(r for r in recording.cases if r.name == case.name)
    first, *rows = record.digests
    wrong = replace(record, digests=(("0" * 32, *first[1:]), *rows))
    assert at.attribute(case, recording=replace(recording, cases=(wrong,))).tiles_differing == 1
    assert at.attribute(case, recording=replace(recording, cases=())).tiles_differing is None


def test_each_family_has_at_most_one_case():
    found = [case.family for case in at.cases_of()]
    assert len(set(found)) == len(found) == len(set(found) & FAMILIES.keys()) >= 10


def test_the_worst_element_is_shown_with_its_inputs(normal):
    (case,) = at.cases_of(["normal"])
    worst = normal.worst
    assert worst.error_ulp == pytest.approx(normal.error.worst_ulp)
    assert bytes.fromhex(worst.query) == case.query[worst.row, worst.head].tobytes()
    assert bytes.fromhex(worst.key) == case.kv[worst.key_id].tobytes()
    assert 0 < worst.key_weight < 1
    got = np.uint16(int(worst.bits, 16)).view(ml_dtypes.bfloat16).astype(float)
    assert abs(got - worst.exact) > 0
