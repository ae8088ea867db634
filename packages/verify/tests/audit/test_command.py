import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sparse_mla_verify.__main__ import main
from sparse_mla_verify.audit import (
    claims,
    collect,
    command,
    decide,
)
from sparse_mla_verify.evidence import recordings
from sparse_mla_verify.evidence.evidence import LIVE, Pushed
from sparse_mla_verify.evidence.recordings import shipped
from sparse_mla_verify.gpu_runs import present
from sparse_mla_verify.inputs.cases import Signature
from sparse_mla_verify.inputs.schedules import LOW_LATENCY, REFERENCE
from sparse_mla_verify.models import counterfactuals

_KNOWN: dict[tuple[object, ...], object] = {}


def known(counterfactual, case, machine, decoded=counterfactuals.decoded):
    key = counterfactual.name, case.digest(), case.schedule, machine
    if key not in _KNOWN:
        _KNOWN[key] = decoded(counterfactual, case, machine)
    return _KNOWN[key]


@pytest.fixture
def offline(monkeypatch, few):
    """Three cases, no compiler: the audit's path over a recording, in seconds.

    What a counterfactual gives for a case is worked out once for all tests.
    """
    monkeypatch.setattr(counterfactuals, "decoded", known)
    monkeypatch.setattr(command, "all_cases", lambda *_, **__: tuple(few))
    monkeypatch.setattr(command, "gpu_name", lambda: None)
    monkeypatch.setattr(present, "gpu_name", lambda: None)
    nothing = Pushed({}, {}, {}, ("not in this test",))
    monkeypatch.setattr(collect, "pushed", lambda *_, **__: nothing)


def run(tmp_path, recording, *more):
    path = tmp_path / "synthetic.json"
    recording.save(path)
    report = tmp_path / "report"
    status = main(
        ["run", "--recording", str(path), "--report", str(report), "--workers", "1", *more]
    )
    return status, json.loads((report / "report.json").read_text()), report


def claims_of(plain):
    return {claim["name"]: claim["status"] for claim in plain["claims"]}


def as_if_recorded(recording):
    return replace(recording, source=recordings.KERNEL)


def test_an_audit_of_a_recording_decides_what_it_can(offline, tmp_path, synthetic, capsys):
    status, plain, report = run(tmp_path, as_if_recorded(synthetic))
    found = claims_of(plain)
    assert found["latent-bits"] == found["lse-bits"] == found["error-bounds"] == "pass"
    assert found["far-rows"] == found["same-code"] == "undecided"
    assert status == plain["exit_status"] == 2
    printed = capsys.readouterr().out
    assert "latent-bits" in printed
    assert "recorded on 2000-01-01: no GPU: synthetic" in " ".join(printed.split())
    page = (report / "report.html").read_text()
    assert "data:image/svg+xml;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    assert all(claim in page for claim in found)


def test_a_stand_ins_results_pass_no_claim_on_a_kernel(offline, tmp_path, synthetic):
    status, plain, _ = run(tmp_path, synthetic)
    found = claims_of(plain)
    assert status == 2
    assert "pass" not in (found["latent-bits"], found["nan-reach"], found["graph-replay"])


def test_a_flipped_digest_fails_the_audit(offline, tmp_path, synthetic):
    first, *rest = synthetic.cases
    digits = first.digests[0][0]
    flipped = f"{int(digits, 16) ^ 1:032x}"
    rows = ((flipped, *first.digests[0][1:]), *first.digests[1:])
    wrong = replace(synthetic, cases=(replace(first, digests=rows), *rest))
    status, plain, _ = run(tmp_path, wrong)
    assert status == 1
    assert claims_of(plain)["latent-bits"] == "fail"
    details = next(c for c in plain["claims"] if c["name"] == "latent-bits")["details"]
    assert f"{first.name} row 0, tile 0" in details[0]


def test_a_flipped_lse_bit_fails_the_audit(offline, tmp_path, synthetic, few):
    name = f"{few[0].name}/lse"
    lse = synthetic.arrays[name].copy()
    lse[0, 0] ^= 1
    status, plain, _ = run(tmp_path, replace(synthetic, arrays={**synthetic.arrays, name: lse}))
    assert status == 1
    assert claims_of(plain)["lse-bits"] == "fail"


def test_json_is_all_that_json_prints(offline, tmp_path, synthetic, capsys):
    _, plain, _ = run(tmp_path, synthetic, "--json")
    assert json.loads(capsys.readouterr().out) == plain


def test_record_needs_a_gpu(offline, tmp_path, capsys):
    assert main(["record", str(tmp_path / "x.json")]) == 2
    assert "record needs an NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_an_unknown_family_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--families", "normal,abnormal"])
    assert "abnormal" in capsys.readouterr().err


@pytest.mark.compiler
def test_without_gpu_and_recording_the_code_alone_is_checked(offline, tmp_path, monkeypatch, few):
    monkeypatch.setattr(recordings, "shipped", lambda schedule="base": None)
    monkeypatch.setattr(command, "all_cases", lambda *_, **__: (few[0],))
    report = tmp_path / "report"
    assert main(["--report", str(report), "--workers", "1"]) == 2
    found = claims_of(json.loads((report / "report.json").read_text()))
    assert found["latent-bits"] == "undecided"
    assert found["waits-before-reads"] == "pass"


def test_a_seed_needs_a_gpu(offline, capsys):
    assert main(["--seed", "7"]) == 2
    assert "seed must be 2026 without a GPU, got 7" in capsys.readouterr().out


def test_a_recording_of_another_schedule_is_refused(tmp_path, capsys):
    recorded = shipped(LOW_LATENCY)
    assert main(["--recording", str(recorded), "--report", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert f"schedule must be {LOW_LATENCY}, got base" in said
    assert not list(tmp_path.iterdir())


def test_a_recording_without_a_cases_arrays_ends_with_2(offline, tmp_path, synthetic, capsys):
    path = tmp_path / "r.json"
    replace(synthetic, arrays={}).save(path)
    assert main(["--recording", str(path), "--report", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "path must be a recording, got" in said
    assert "the recording must be whole" in said
    assert "/lse is none" in said


def test_workers_are_one_or_more(capsys):
    with pytest.raises(SystemExit):
        main(["--workers", "-1"])
    assert "must be 1 or more, got -1" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "soon"])
def test_a_time_budget_is_positive(seconds, capsys):
    with pytest.raises(SystemExit):
        main(["--time-budget", seconds])
    assert "--time-budget" in capsys.readouterr().err


def test_a_time_budget_leaves_out_the_dearest(offline, tmp_path, synthetic, few):
    kept, left = command.within_budget(few, 1e-6)
    assert len(kept) == 1
    assert len(left) == len(few) - 1
    assert command.within_budget(few, 1e6) == (few, ())
    assert command.within_budget(few, None) == (few, ())
    _, plain, _ = run(tmp_path, synthetic, "--time-budget", "0.000001")
    said = next(note for note in plain["notes"] if "time budget" in note)
    assert all(name in said for name in left)
    assert any(note.startswith("left out: pushed-steps") for note in plain["notes"])


@pytest.mark.compiler
def test_the_report_shows_attributions_and_trials(tmp_path, monkeypatch, capsys, cases):
    case = cases["hugely-negative/around"]
    monkeypatch.setattr(command, "gpu_name", lambda: None)
    monkeypatch.setattr(command, "all_cases", lambda *_, **__: (case,))
    report = tmp_path / "report"
    arguments = ["--families", "hugely-negative", "--report", str(report), "--workers", "1"]
    main(arguments)
    plain = json.loads((report / "report.json").read_text())
    assert [a["family"] for a in plain["attribution"]] == ["hugely-negative"]
    assert {t["name"] for t in plain["trials"]} >= {"p-rz", "p-bf16"}
    page = (report / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 4
    assert plain["attribution"][0]["worst"]["query"] in page


NO_PUSH = Pushed({}, {}, {})


def evidence(source, *families, push=NO_PUSH, guarded="gathered"):
    held = tuple(SimpleNamespace(case=SimpleNamespace(family=f)) for f in families)
    return SimpleNamespace(source=source, cases=held, push=push, guarded=guarded)


def test_push_claims_are_left_out_where_push_was_not_looked_at(
    offline, tmp_path, synthetic, capsys
):
    assert list(decide.left_out(evidence(LIVE, "normal", push=None))) == list(decide.PUSH)
    names = {claim.name for claim in claims.all_claims()}
    assert names >= {*decide.PUSH, *decide.NEEDS}
    _, plain, _ = run(tmp_path, synthetic)
    assert claims_of(plain).keys() >= set(decide.PUSH)
    _, plain, _ = run(tmp_path, synthetic, "--families", "normal")
    assert not claims_of(plain).keys() & set(decide.PUSH)
    assert "left out: same-push-code" in capsys.readouterr().out


def test_the_claim_on_guarded_caches_is_left_out_of_an_audit_of_some_families(
    offline, tmp_path, synthetic, capsys
):
    left = decide.left_out(evidence(LIVE, "normal", guarded=None))
    assert left == {claims.UNREAD: "for an audit of all families"}
    _, plain, _ = run(tmp_path, synthetic)
    assert claims.UNREAD in claims_of(plain)
    _, plain, _ = run(tmp_path, synthetic, "--families", "normal")
    assert claims.UNREAD not in claims_of(plain)
    assert f"left out: {claims.UNREAD}, for" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", REFERENCE)
def test_guarded_caches_are_looked_at_on_every_schedule(
    offline, tmp_path, synthetic, monkeypatch, schedule
):
    asked = []
    monkeypatch.setattr(collect, "guarded_caches", lambda name: asked.append(name))
    machine_code = {Signature(1, 16, 16, 1, 1, schedule).key: "aa"}
    run(tmp_path, replace(synthetic, machine_code=machine_code), "--schedule", schedule)
    run(tmp_path, synthetic, "--schedule", schedule, "--families", "normal")
    assert asked == [schedule]
