from sparse_mla_verify.__main__ import main
from sparse_mla_verify.audit import claims
from sparse_mla_verify.inputs.cases import FAMILIES


def test_list_names_every_claim_and_family(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in FAMILIES)
    assert "latent-bits" in printed


def test_explain_says_what_would_refute_a_claim(capsys):
    assert main(["explain", "p-rounds-to-nearest"]) == 0
    printed = capsys.readouterr().out
    assert "ties to even" in printed
    assert "truncates P  [p-rz; on normal/checkpoint" in printed
    assert main(["explain", "all-written"]) == 0
    assert main(["explain", claims.UNREAD]) == 0
    assert "no decode faults, but a kernel does fault that" in capsys.readouterr().out
    assert main(["explain", "nothing"]) == 2
    assert "claim must be one of latent-bits, " in capsys.readouterr().err
