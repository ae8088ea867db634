"""The recording that comes with the package, on a computer without a GPU."""

from pathlib import Path

import numpy as np
import pytest

from sparse_mla_verify.audit.audit_report import apart_markdown, claims_markdown, figures_markdown
from sparse_mla_verify.audit.claims import GPU_CHECKS
from sparse_mla_verify.audit.collect import cross_compiled, dsl_version
from sparse_mla_verify.audit.figures import recorded_apart
from sparse_mla_verify.evidence.evidence import recorded_case, split_stale
from sparse_mla_verify.evidence.recordings import KERNEL, load, shipped
from sparse_mla_verify.gpu_runs.launch_checks import LAUNCH_CHECKS
from sparse_mla_verify.inputs.cases import FAMILIES, all_cases
from sparse_mla_verify.inputs.schedules import BASE, LOW_LATENCY, REFERENCE
from sparse_mla_verify.measure.predict import assess

RECORDED_FAMILIES = [name for name, family in FAMILIES.items() if not family.pending]


@pytest.fixture(scope="module", params=REFERENCE)
def schedule(request):
    return request.param


@pytest.fixture(scope="module")
def cases(schedule):
    return {case.name: case for case in all_cases([], schedule)}


@pytest.fixture(scope="module")
def recording(schedule):
    path = shipped(schedule)
    assert path is not None, f"the package ships no recording of the {schedule} schedule"
    return load(path)


def test_it_is_a_gpu_run_of_everything(recording, cases):
    assert recording.source == KERNEL
    assert recording.host.gpu_count >= 1
    paired, stale = split_stale(list(cases.values()), recording)
    assert stale == ()
    assert {case.family for case, _ in paired} == FAMILIES.keys()
    assert sum(case.tiles for case, _ in paired) >= 2000
    assert {check.name for check in recording.checks} == LAUNCH_CHECKS.keys()
    assert {case.signature.key for case, _ in paired} == recording.machine_code.keys()


def test_it_holds_no_fault(recording):
    assert [c.name for c in recording.cases if c.unwritten or c.strayed or c.rerun_differing] == []
    assert [check.name for check in recording.checks if not check.same] == []


def test_every_claim_that_the_gpu_decides_held_there(recording):
    decided = [o for o in recording.outcomes if o.kind != "structural"]
    assert len(decided) > 10
    assert [o.name for o in decided if o.status != "pass"] == []


def test_the_readme_shows_the_recorded_figures():
    path = shipped()
    assert path is not None
    recording = load(path)
    readme = Path(__file__).parents[4] / "README.md"
    text = figures_markdown(recording)
    assert text in readme.read_text()
    assert f"{len(recording.outcomes)} of {len(recording.outcomes)} claims passed" in text


# One chunk a CTA and several; one and two tiles of 16 heads a CTA.
COMPILED = ("normal/checkpoint", "counts/edges", "many-keys/chunks")
PARTS = 6


def compiled_as_recorded(recording, signatures):
    assert dsl_version() == recording.host.dsl
    found = {s.key: cross_compiled(s, f"{recording.host.arch}a").code_sha256 for s in signatures}
    return found == {s.key: recording.machine_code[s.key] for s in signatures}


def test_the_page_of_claims_shows_every_recorded_one():
    page = Path(__file__).parents[4] / "docs" / "claims.md"
    shown = {name: load(path) for name in REFERENCE if (path := shipped(name))}
    text = page.read_text()
    assert claims_markdown(shown) in text
    apart = recorded_apart(shown)
    assert apart_markdown(apart) in text
    assert all(o.status == "pass" for *_, outcomes in apart for o in outcomes)
    assert all(o.status == "pass" for recording in shown.values() for o in recording.outcomes)


@pytest.mark.compiler
def test_todays_source_compiles_to_recorded_cubins(recording, cases, schedule):
    """One of the base schedule, as `nox -s audit` does all; one of each kind of the others."""
    chosen = COMPILED[:1] if schedule == BASE else COMPILED
    assert compiled_as_recorded(recording, [cases[name].signature for name in chosen])


@pytest.mark.compiler
@pytest.mark.parametrize("part", range(PARTS))
def test_todays_source_compiles_to_every_low_latency_cubin(part):
    """In parts, so that the processes of a test run can share them."""
    path = shipped(LOW_LATENCY)
    assert path is not None
    recording = load(path)
    signatures = recording.signatures()[part::PARTS]
    assert signatures
    assert compiled_as_recorded(recording, signatures)


def test_the_gpu_s_checks_compared_what_they_have_to(recording):
    assert {check.name: check.elements for check in recording.checks} == {
        name: asked.compared for name, asked in GPU_CHECKS.items()
    }


@pytest.mark.compiler
@pytest.mark.slow
def test_todays_source_compiles_to_every_recorded_cubin(recording):
    assert compiled_as_recorded(recording, recording.signatures())


@pytest.mark.parametrize("family", RECORDED_FAMILIES)
def test_the_reference_reproduces_a_case_of_each_family(recording, cases, family):
    """The cheapest case of each; the audit does them all."""
    case = min((c for c in cases.values() if c.family == family), key=lambda c: c.counts.sum())
    record = next(r for r in recording.cases if r.name == case.name)
    found = recorded_case(case, record, recording.arrays, assess(case))
    assert (found.tiles_differing, found.lse_differing) == (0, 0), found.details
    assert found.assessment.bounds.outside == 0


def test_a_flipped_bit_would_be_seen(recording, cases):
    case = cases["head-counts/16"]
    record = next(r for r in recording.cases if r.name == case.name)
    for output in ("latent", "lse"):
        assessment = assess(case)
        getattr(assessment, output)[-1, -1] ^= np.uint16(1)
        found = recorded_case(case, record, recording.arrays, assessment)
        assert found.tiles_differing + found.lse_differing >= 1
