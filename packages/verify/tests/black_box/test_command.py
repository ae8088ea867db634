import functools
import json

from sparse_mla_verify.__main__ import main
from sparse_mla_verify.black_box import command, identify


def test_identify_prints_answers_and_evidence(capsys, monkeypatch):
    few = functools.partial(identify.identify, questions=(identify.lse_base, identify.logits))
    monkeypatch.setattr(command, "identify", few)
    assert main(["identify", "--kernel", "counterfactual:lse-base-2", "--json"]) == 0
    found = {f["question"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["LSE base"]["answer"] == "base 2"
    assert found["LSE base"]["evidence"]
    assert main(["identify", "--kernel", "counterfactual:nothing"]) == 2
