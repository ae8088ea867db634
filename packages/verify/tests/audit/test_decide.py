from dataclasses import replace
from types import SimpleNamespace

from sparse_mla_verify.audit import decide
from sparse_mla_verify.evidence.evidence import LIVE, RECORDED, Pushed
from sparse_mla_verify.inputs.cases import FAMILIES

NO_PUSH = Pushed({}, {}, {})


def evidence(source, *families, push=NO_PUSH, guarded="gathered"):
    held = tuple(SimpleNamespace(case=SimpleNamespace(family=f)) for f in families)
    return SimpleNamespace(source=source, cases=held, push=push, guarded=guarded)


def test_a_claim_that_awaits_its_family_is_left_out_of_a_recording_alone(monkeypatch):
    assert decide.left_out(evidence(RECORDED, "normal")) == {}
    waiting = {"huge-logits": replace(FAMILIES["huge-logits"], pending=True)}
    monkeypatch.setattr(decide, "FAMILIES", {**FAMILIES, **waiting})
    assert list(decide.left_out(evidence(RECORDED, "normal"))) == ["p-saturates"]
    assert decide.left_out(evidence(RECORDED, "normal", "huge-logits")) == {}
    assert decide.left_out(evidence(LIVE, "normal")) == {}
