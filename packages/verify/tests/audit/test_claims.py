from dataclasses import replace

import numpy as np
import pytest

from sparse_mla_verify.audit import claims as c
from sparse_mla_verify.evidence.evidence import (
    LIVE,
    Evidence,
    Pushed,
    Trial,
    live_case,
)
from sparse_mla_verify.evidence.guarded_recordings import load, shipped
from sparse_mla_verify.evidence.instruction_checks import CODE_CHECKS as STRUCTURE
from sparse_mla_verify.evidence.instruction_checks import CodeFinding
from sparse_mla_verify.evidence.push_recordings import PushRecording
from sparse_mla_verify.evidence.recordings import Check, Host
from sparse_mla_verify.inputs.schedules import BASE
from sparse_mla_verify.measure.poisoned import GUARD_ROWS, run_poisoned
from sparse_mla_verify.measure.predict import assess
from sparse_mla_verify.models.counterfactuals import CATALOGUE
from sparse_mla_verify.push.lse_counterfactuals import CLAIM as PUSHED_LSE
from sparse_mla_verify.push.lse_counterfactuals import COUNTERFACTUALS as PUSH_CATALOGUE
from sparse_mla_verify.push.lse_counterfactuals import RECORDINGS

HOST = Host("2000-01-01", "GPU", 1, "sm_90", "x", "x", "x", "4", "x", "x", "x")
PUSHED = PushRecording(
    replace(HOST, dsl="4"), {"decode-b1": "aa"}, (Check("steps", "", 10, 0),), ()
)
GUARDED = replace(load(shipped()).of(BASE), host=replace(HOST, dsl="4"))
GPU_CHECKS = ("batch-independence", "graph-replay", "runs-agree", "far-rows", "dependent-launches")


def evidence_of(few, stand_in, fault=lambda latent, lse: None):
    outputs = [run_poisoned(stand_in(fault), case) for case in few]
    assessed = [assess(case, (o.latent, o.lse)) for case, o in zip(few, outputs, strict=True)]
    return Evidence(
        source=LIVE,
        host=replace(HOST, dsl="4"),
        cases=tuple(map(live_case, few, outputs, assessed)),
        checks={name: Check(name, name, c.GPU_CHECKS[name].compared, 0) for name in GPU_CHECKS},
        machine_code={"b1": "aa"},
        compiled={"b1": "aa", **GUARDED.machine_code},
        compiler="4",
        findings={"b1": {name: CodeFinding(True, "found") for name in STRUCTURE}},
        trials={c.name: TOLD.of(c.name) for c in CATALOGUE},
        push=Pushed(
            dict.fromkeys(RECORDINGS, PUSHED),
            {"decode-b1": "aa"},
            {name: TOLD.of(name) for name in PUSH_CATALOGUE},
        ),
        guarded=GUARDED,
    )


class TrialOf:
    """What a trial found, of any counterfactual: tiles, contract's, counterfactual's, telling."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def of(self, name: str) -> Trial:
        tiles, contract, counterfactual, telling = self.counts
        return Trial(name, ("case",), tiles, contract, counterfactual, 100, telling)


TOLD = TrialOf(4, 4, 0, 7)


@pytest.fixture(scope="module")
def good(few, stand_in):
    return evidence_of(few, stand_in)


def verdicts(evidence):
    return {claim.name: claim.decide(evidence) for claim in c.all_claims()}


def failing(evidence):
    return {name for name, v in verdicts(evidence).items() if v.status is c.Status.FAIL}


def test_all_claims_hold_on_good_evidence(good):
    found = verdicts(good)
    assert {name: v for name, v in found.items() if v.status is not c.Status.PASS} == {}
    assert c.exit_status(found.values()) == 0


def test_claims_have_names_statements_and_stages():
    made = c.all_claims()
    assert len({claim.name for claim in made}) == len(made)
    assert all(claim.statement.endswith(".") and claim.stage and claim.kind for claim in made)


def flip_latent(latent, lse):
    latent[1, 1, 1] ^= 1


def flip_lse(latent, lse):
    lse[1, 1] ^= 1


def half_a_binade(latent, lse):
    latent[1, 1] += 0x40


def drop_nan(latent, lse):
    latent[latent == 0x7FFF] = 0


def empty_as_zero(latent, lse):
    lse[lse == 0xFF800000] = 0


def stray(latent, lse):
    latent[-1, 0, 0] = 0


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        (flip_latent, "latent-bits"),
        (flip_lse, "lse-bits"),
        (half_a_binade, "error-bounds"),
        (drop_nan, "nan-reach"),
        (drop_nan, "latent-bits"),
        (drop_nan, "error-bounds"),
        (empty_as_zero, "empty-rows"),
        (stray, "nothing-else-written"),
    ],
)
def test_a_planted_fault_fails_its_claim(few, stand_in, fault, claim):
    evidence = evidence_of(few, stand_in, fault)
    assert claim in failing(evidence)
    assert c.exit_status(verdicts(evidence).values()) == 1


def test_a_flipped_bit_fails_only_the_bitwise_claim(few, stand_in):
    assert failing(evidence_of(few[:1], stand_in, flip_latent)) == {"latent-bits"}
    assert failing(evidence_of(few[:1], stand_in, flip_lse)) == {"lse-bits"}


def test_a_claim_on_elements_that_no_case_has_is_undecided(few, stand_in):
    found = verdicts(evidence_of(few[:1], stand_in))
    assert found["empty-rows"].status is c.Status.UNDECIDED


def test_unwritten_elements_and_differing_runs_fail(good):
    first, *rest = good.cases
    assert "all-written" in failing(replace(good, cases=(replace(first, unwritten=1), *rest)))
    assert "run-to-run" in failing(replace(good, cases=(replace(first, rerun_differing=1), *rest)))


@pytest.mark.parametrize("name", GPU_CHECKS)
def test_a_differing_check_fails_and_a_missing_one_is_undecided(good, name):
    wrong = {**good.checks, name: Check(name, name, 10, 1, "[0]: expected")}
    assert failing(replace(good, checks=wrong)) == {name}
    empty = {**good.checks, name: Check(name, name, 0, 0)}
    assert failing(replace(good, checks=empty)) == {name}
    missing = {k: v for k, v in good.checks.items() if k != name}
    assert verdicts(replace(good, checks=missing))[name].status is c.Status.UNDECIDED


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_structural_finding_fails_its_claim(good, name):
    findings = {"b1": dict(good.findings["b1"]), "b2": dict(good.findings["b1"])}
    findings["b2"][name] = CodeFinding(False, "it is gone")
    evidence = replace(good, findings=findings)
    assert failing(evidence) == {name}
    assert verdicts(evidence)[name].details == ("b2: it is gone",)


def test_another_cubin_fails_and_another_compiler_decides_nothing(good):
    assert failing(replace(good, compiled={"b1": "bb", **GUARDED.machine_code})) == {"same-code"}
    assert failing(replace(good, compiled={"b2": "aa"})) == {"same-code"}
    assert verdicts(replace(good, compiled={"b2": "aa"}))[c.UNREAD].status is c.Status.UNDECIDED
    other = replace(good, compiled={"b1": "bb"}, compiler="5")
    assert verdicts(other)["same-code"].status is c.Status.UNDECIDED


def test_a_stale_recording_decides_nothing_but_a_failure(good, few, stand_in):
    stale = verdicts(replace(good, stale=("normal/short",)))
    assert stale["latent-bits"].status is c.Status.UNDECIDED
    assert "normal/short" in stale["latent-bits"].figures
    wrong = replace(evidence_of(few, stand_in, flip_latent), stale=("normal/short",))
    assert verdicts(wrong)["latent-bits"].status is c.Status.FAIL


def with_push(good, **changes):
    return replace(good, push=replace(good.push, **changes))


def recorded_with(good, **changes):
    one, two = RECORDINGS
    return with_push(good, recordings={one: PUSHED, two: replace(PUSHED, **changes)})


def test_push_claims_rest_on_their_own_recordings(good):
    wrong = (Check("steps", "", 10, 0), Check("graph/1", "", 10, 1, "row 0"))
    assert failing(recorded_with(good, checks=wrong)) == {"pushed-steps"}
    assert failing(recorded_with(good, checks=(Check("steps", "", 0, 0),))) == {"pushed-steps"}
    # A timing that is off is no bit that differs.
    assert failing(recorded_with(good, checks=(Check("lost peer", "", 8, 1),))) == set()
    assert failing(recorded_with(good, machine_code={"decode-b1": "bb"})) == {"same-push-code"}
    older = recorded_with(good, host=replace(HOST, dsl="3"))
    assert verdicts(older)["same-push-code"].status is c.Status.UNDECIDED
    assert failing(with_push(good, compiled={"decode-b2": "aa"})) == {"same-push-code"}
    trials = {**good.push.trials, "push-natural": TrialOf(4, 0, 4, 7).of("push-natural")}
    assert failing(with_push(good, trials=trials)) == {PUSHED_LSE}
    # Nor does what this run gave decide them, or a stand-in's results.
    found = verdicts(replace(good, source="stand-in"))
    assert found["pushed-steps"].status is found[PUSHED_LSE].status is c.Status.PASS
    missing = verdicts(replace(good, push=None))
    names = ("pushed-steps", "same-push-code", PUSHED_LSE)
    assert {missing[name].status for name in names} == {c.Status.UNDECIDED}


def test_no_evidence_decides_nothing():
    found = verdicts(Evidence(LIVE, None, (), {}, {}))
    assert {v.status for v in found.values()} == {c.Status.UNDECIDED}
    assert c.exit_status(found.values()) == 2


def test_the_exit_status_is_that_of_the_worst():
    ok, bad, open_ = (c.Verdict(s, "") for s in (c.Status.PASS, c.Status.FAIL, c.Status.UNDECIDED))
    assert c.exit_status([ok]) == 0
    assert c.exit_status([ok, open_]) == 2
    assert c.exit_status([open_, bad, ok]) == 1
    assert c.exit_status([]) == 2


def test_figures_count_what_was_compared(good):
    found = verdicts(good)
    tiles = sum(x.case.tiles for x in good.cases)
    assert found["latent-bits"].figures.startswith(f"0 of {tiles} ")
    empty = sum(int(np.sum(x.case.counts == 0)) for x in good.cases)
    assert empty > 0
    assert found["empty-rows"].figures.startswith(f"0 of {empty * 16 * 513:,} ")
    past = sum((x.case.batch + GUARD_ROWS) * x.case.padded for x in good.cases)
    past -= sum(x.case.batch * x.case.heads for x in good.cases)
    written = found["nothing-else-written"].figures
    assert written.startswith(f"0 of {2 * past * 513:,} ")  # over two poisons


@pytest.mark.parametrize(
    ("found", "status", "figures"),
    [
        (TOLD, c.Status.PASS, "7 of 100 elements reject p-rz"),
        (TrialOf(4, 4, 4, 0), c.Status.UNDECIDED, "no element of these cases rejects p-rz"),
        (TrialOf(4, 0, 4, 7), c.Status.FAIL, "p-rz"),
        (TrialOf(4, 1, 4, 7), c.Status.FAIL, "p-rz"),
        (TrialOf(4, 1, 3, 7), c.Status.UNDECIDED, "3 of 4 tiles"),
        (TrialOf(0, 0, 0, 0), c.Status.UNDECIDED, ""),
    ],
)
def test_a_contract_claim_holds_if_its_counterfactuals_do_not(good, found, status, figures):
    trials = {**good.trials, "p-rz": found.of("p-rz")}
    verdict = verdicts(replace(good, trials=trials))["p-rounds-to-nearest"]
    assert verdict.status is status
    assert figures in verdict.figures


def test_a_contract_claim_needs_all_its_trials(good):
    trials = {k: v for k, v in good.trials.items() if k != "p-rz"}
    found = verdicts(replace(good, trials=trials))
    assert found["p-rounds-to-nearest"].status is c.Status.UNDECIDED
    assert found["p-is-e4m3"].status is c.Status.PASS


@pytest.mark.parametrize("name", GPU_CHECKS)
def test_a_check_that_compared_too_little_decides_nothing(good, name):
    short = replace(good.checks[name], elements=c.GPU_CHECKS[name].compared - 1)
    found = verdicts(replace(good, checks=good.checks | {name: short}))[name]
    assert found.status is c.Status.UNDECIDED
    assert f"{c.GPU_CHECKS[name].compared:,} have to be compared" in found.figures
    wrong = replace(short, differing=1)
    assert failing(replace(good, checks=good.checks | {name: wrong})) == {name}


def test_a_check_on_a_gpu_decides_if_it_compared_all_of_these_outputs():
    batch, checkpoint = 1_050_624, 246_240  # 64 rows x 32 heads, 5 rows x 96 heads, x 513
    assert {name: check.compared for name, check in c.GPU_CHECKS.items()} == {
        "batch-independence": batch,
        "graph-replay": 100 * batch + 100 * checkpoint,
        "runs-agree": 99 * batch,
        "far-rows": checkpoint,
        "dependent-launches": 100 * checkpoint,
    }
