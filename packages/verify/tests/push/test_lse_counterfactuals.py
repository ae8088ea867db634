"""The base of pushed LSEs: the models decode as the step does, and differ in what they say."""

from dataclasses import replace

import numpy as np
import pytest

from sparse_mla_reference import owner_merge
from sparse_mla_verify.audit import claims
from sparse_mla_verify.evidence.evidence import COMPILED, Evidence, Pushed
from sparse_mla_verify.evidence.push_recordings import load
from sparse_mla_verify.evidence.recordings import FOLDER
from sparse_mla_verify.push import lse_counterfactuals as f
from sparse_mla_verify.push.step_inputs import (
    drawn,
    joined,
    predict_step,
    special,
    step_digest,
)

NAMES = ("negative-zeros", "nan-in-a-key", "all-empty", "ranks-far-apart", "negative-nan-words")


@pytest.fixture(scope="module")
def recordings():
    return {name: load(FOLDER / name) for name in f.RECORDINGS}


@pytest.fixture
def small(monkeypatch, recordings):
    """One step of one rank pair, as a recording that says what it was compared with."""
    case = drawn("small", 2, 2, most=4)
    steps = f.Steps(f.ONE_GPU, "special/D=2 x 48 heads", 2, 2, 1, lambda d, h: [case])
    monkeypatch.setattr(f, "STEPS", (steps,))
    known = {f.ONE_GPU: recordings[f.ONE_GPU]}
    expected = joined([step_digest(predict_step(case))])
    return with_check(known, expected=expected, elements=steps.elements), case


def with_check(recordings, **changes):
    """The recordings with another check of the special steps."""
    recording = recordings[f.ONE_GPU]
    first, *rest = recording.checks
    assert first.name == f.STEPS[0].check
    checks = (replace(first, **changes), *rest)
    return {**recordings, f.ONE_GPU: replace(recording, checks=checks)}


def verdict(recordings):
    pushed = Pushed(recordings, {}, f.try_all(recordings, workers=1))
    evidence = Evidence(COMPILED, None, (), {}, {}, push=pushed)
    claim = next(c for c in claims.all_claims() if c.name == f.CLAIM)
    assert {c.name for c in claim.counterfactuals} == set(f.COUNTERFACTUALS)
    return claim.decide(evidence)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_pushed_merges_to_the_simulated_step(name):
    case = next(c for c in special(2, 8) if c.name == name)
    ours = f.merged(owner_merge, case, f.pushed(case))
    assert step_digest(ours) == step_digest(predict_step(case))


def test_every_model_tells_where_a_row_has_keys_on_two_ranks():
    found = f.told(drawn("told", 2, 2, empty=0.0))
    assert set(found.telling) == set(f.COUNTERFACTUALS)
    for name, count in found.telling.items():
        assert 0 < count < found.elements, name
    assert found.telling["push-natural"] > found.telling["push-and-owner-natural"]


def test_no_model_tells_where_no_row_has_keys():
    empty = next(c for c in special(2, 8) if c.name == "all-empty")
    found = f.told(empty)
    assert set(found.telling.values()) == {0}
    assert set(found.same_rows.values()) == {found.rows}


def test_the_recordings_hold_the_steps_that_decide(recordings):
    for steps in f.STEPS:
        (check,) = (c for c in recordings[steps.recording].checks if c.name == steps.check)
        assert check.elements == steps.elements
        if not steps.whole:
            continue
        per_run = sum(
            len(case.query) * case.query[0].shape[0] * case.query[0].shape[1] * 513
            for case in steps.made()
        )
        assert check.elements % per_run == 0


def test_a_step_that_was_compared_decides(small):
    recordings, _ = small
    found = verdict(recordings)
    assert found.status is claims.Status.PASS
    assert found.figures.count("elements reject ") == len(f.COUNTERFACTUALS)


@pytest.mark.parametrize("changes", [{"expected": "0" * 64}, {"differing": 1}, {"elements": 7}])
def test_a_step_that_was_not_decides_nothing(small, changes):
    recordings, _ = small
    assert verdict(with_check(recordings, **changes)).status is claims.Status.UNDECIDED
    assert verdict({}).status is claims.Status.UNDECIDED


@pytest.mark.parametrize("name", f.COUNTERFACTUALS)
def test_a_kernel_that_is_the_model_is_not_taken_for_the_contract(small, name):
    recordings, case = small
    theirs = f.merged(f.COUNTERFACTUALS[name][1], case, f.pushed(case))
    recorded = with_check(recordings, expected=joined([step_digest(theirs)]))
    assert verdict(recorded).status is not claims.Status.PASS


def test_counts_alone_decide_nothing_of_whole_steps(small):
    recordings, _ = small
    assert verdict(with_check(recordings, expected="")).status is claims.Status.UNDECIDED


def test_digests_depend_on_every_bit_and_on_the_order():
    case = drawn("digest", 2, 2, batch=1, width=2)
    bits = predict_step(case)
    latent = bits.latent.copy()
    latent[-1, -1, -1, -1] ^= np.uint16(1)
    one, other = step_digest(bits), step_digest(replace(bits, latent=latent))
    assert one != other
    assert joined([one, other]) != joined([other, one])
