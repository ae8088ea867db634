from dataclasses import replace

import numpy as np
import pytest

from sparse_mla_reference import SM90
from sparse_mla_verify.audit import claims
from sparse_mla_verify.evidence.evidence import LIVE, Evidence, Trial, recorded_case
from sparse_mla_verify.evidence.recordings import digests_of, load, shipped
from sparse_mla_verify.inputs.cases import all_cases
from sparse_mla_verify.inputs.schedules import REFERENCE
from sparse_mla_verify.measure.predict import assess
from sparse_mla_verify.models import counterfactuals as cf
from sparse_mla_verify.models.altered_reference import CONTRACT, Altered

# Where the cases that a counterfactual names are long, shorter ones that tell it apart too.
CHEAPER = {
    "normal/checkpoint": 1,
    "heavy-tailed/checkpoint": 1,
    "uniform-bytes/checkpoint": 2,
    "counts/short": 16,
}
NOT_RECORDED = {"p-unsaturated"}


def first_rows(case):
    count = CHEAPER.get(case.name, case.batch)
    return replace(case, query=case.query[:count], rows=case.rows[:count], valid=case.valid[:count])


@pytest.fixture(scope="module")
def recorded(cases):
    """Some recorded cases, some only in their first rows, as an audit sees them."""
    path = shipped()
    assert path is not None
    recording = load(path)
    records = {record.name: record for record in recording.cases}
    wanted = {n for c in cf.CATALOGUE for n in c.data} & cases.keys() - {"normal/long"}
    found = []
    for name in sorted(wanted):
        case, record = first_rows(cases[name]), records[name]
        part = replace(record, digests=record.digests[: case.batch])
        arrays = {
            key: value[: case.batch]
            for key, value in recording.arrays.items()
            if key.startswith(f"{name}/")
        }
        found.append(recorded_case(case, part, arrays, assess(case)))
    return found


@pytest.fixture(scope="module")
def trials(recorded):
    return cf.try_all(recorded, "SM90", workers=1)


def verdicts_of(trials):
    evidence = Evidence(LIVE, None, (), {}, {}, trials=trials)
    return {c.name: c.decide(evidence) for c in claims.all_claims() if c.name in cf.CLAIMS}


def test_every_claim_on_the_contract_has_a_counterfactual_and_every_one_a_claim():
    assert {c.claim for c in cf.CATALOGUE} == cf.CLAIMS.keys()
    assert len(cf.BY_NAME) == len(cf.CATALOGUE) >= 20
    assert {c.schedule for c in cf.CATALOGUE} == {"", *cf.OTHER_SCHEDULES}


def test_every_counterfactual_changes_something():
    for c in cf.CATALOGUE:
        assert c.schedule or c.alteration != CONTRACT, c.name


@pytest.mark.parametrize("name", [c.name for c in cf.CATALOGUE if c.name not in NOT_RECORDED])
def test_the_recorded_run_rejects(trials, name):
    trial = trials[name]
    assert trial.contract_holds
    assert not trial.counterfactual_holds
    assert trial.telling > 0


def test_the_recorded_run_decides_the_claims(trials):
    found = verdicts_of(trials)
    open_ = {name for name, v in found.items() if v.status is not claims.Status.PASS}
    assert open_ <= {cf.BY_NAME[name].claim for name in NOT_RECORDED}


@pytest.mark.parametrize("name", [c.name for c in cf.CATALOGUE if c.name not in NOT_RECORDED])
def test_a_kernel_that_is_the_counterfactual_fails_its_claim(recorded, name):
    """What the counterfactual gives, in the place of the kernel's results."""
    counterfactual = cf.BY_NAME[name]
    mine = [c for c in cf.CATALOGUE if c.claim == counterfactual.claim]
    trials: dict[str, Trial] = {}
    for e in cf.chosen(counterfactual, recorded):
        latent, lse = cf.decoded(counterfactual, e.case, "SM90")
        other = replace(e, latent=latent, lse=lse, digests=digests_of(latent))
        for each in mine:
            one = cf.trial(each.name, other, cf.decoded(each, e.case, "SM90"))
            trials[each.name] = trials[each.name] + one if each.name in trials else one
    verdict = verdicts_of(trials)[counterfactual.claim]
    assert verdict.status is claims.Status.FAIL
    assert name in verdict.details[0]


def test_saturation_shows_in_huge_logits(recorded):
    """No recording that ships holds these cases yet; the reference stands in for the kernel."""
    whole = next(c for c in all_cases(["huge-logits"]) if c.name == "huge-logits/equal")
    case = replace(whole, query=whole.query[:1], rows=whole.rows[:1], valid=whole.valid[:1])
    assessment, other = assess(case), cf.decoded(cf.BY_NAME["p-unsaturated"], case, "SM90")
    stand_in = replace(
        recorded[0],
        case=case,
        assessment=assessment,
        latent=assessment.latent,
        lse=assessment.lse,
        digests=None,
    )
    assert cf.chosen(cf.BY_NAME["p-unsaturated"], [stand_in]) == [stand_in]
    found = verdicts_of({"p-unsaturated": cf.trial("p-unsaturated", stand_in, other)})
    assert found["p-saturates"].status is claims.Status.PASS
    wrong = replace(stand_in, latent=other[0], lse=other[1])
    found = verdicts_of({"p-unsaturated": cf.trial("p-unsaturated", wrong, other)})
    assert found["p-saturates"].status is claims.Status.FAIL


@pytest.mark.parametrize("schedule", REFERENCE)
def test_schedules_other_than_the_cases_own_are_made_of_it(cases, schedule):
    case = replace(cases["head-counts/16"], schedule=schedule)
    for name, other in cf.OTHER_SCHEDULES.items():
        Altered(other(REFERENCE[schedule], case), SM90).bits(first_rows(case))
        data = {d for c in cf.CATALOGUE if c.schedule == name for d in c.data}
        differ = [other(REFERENCE[schedule], cases[d]) != REFERENCE[schedule] for d in data]
        # What fills the GPU is some batch's own split too; not that of all that decide the claim.
        assert any(differ) if name == "filling" else all(differ), name


def test_a_recorded_digest_that_is_not_the_contracts_is_known_no_more(recorded):
    one = next(e for e in recorded if e.case.name == "normal/checkpoint")
    other = cf.decoded(cf.BY_NAME["p-rz"], one.case, "SM90")
    whole = cf.trial("p-rz", one, other)
    (first, *rest), *rows = one.digests
    wrong = replace(one, digests=((f"{int(first, 16) ^ 1:032x}", *rest), *rows))
    part = cf.trial("p-rz", wrong, other)
    assert part.tiles_of_contract == whole.tiles_of_contract - 1
    lost = np.sum(one.latent[0, :16] != other[0][0, :16])
    assert 0 < lost == whole.telling - part.telling


def test_without_the_cases_it_names_it_takes_the_cheapest(recorded):
    few = [e for e in recorded if e.case.name in ("padded-heads/mailbox", "counts/short")]
    names = [e.case.name for e in cf.chosen(cf.BY_NAME["p-rz"], few)]
    assert set(names) == {"padded-heads/mailbox", "counts/short"}
    assert cf.chosen(cf.BY_NAME["p-rz"], []) == []
    assert cf.try_all([], "SM90", workers=1) == {}
