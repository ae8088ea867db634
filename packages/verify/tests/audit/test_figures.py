from dataclasses import replace

import pytest

from sparse_mla_verify.__main__ import main
from sparse_mla_verify.audit.audit_report import apart_markdown
from sparse_mla_verify.evidence import recordings
from sparse_mla_verify.evidence.evidence import Trial
from sparse_mla_verify.evidence.recordings import Host, Outcome

HOST = Host("2000-01-01", "a GPU", 1, "sm_90", "1", "", "", "", "", "", "")


def test_figures_are_taken_from_kernels_alone(tmp_path, synthetic, capsys):
    path = tmp_path / "synthetic.json"
    synthetic.save(path)
    assert main(["figures", "--recording", str(path)]) == 2
    assert "recording must be of a kernel" in capsys.readouterr().err


def test_figures_are_those_of_the_recorded_run(tmp_path, synthetic, capsys):
    path = tmp_path / "kernel.json"
    replace(synthetic, source=recordings.KERNEL).save(path)
    assert main(["figures", "--recording", str(path)]) == 0
    table = capsys.readouterr().out
    elements = sum(case.elements for case in synthetic.cases)
    assert "1 of 1 claims passed" in table
    assert f"{elements:,} outputs were" in table
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- figures: by a command -->\nold\n<!-- /figures -->\nb\n")
    for _ in range(2):
        assert main(["figures", "--recording", str(path), "--into", str(page)]) == 0
        assert page.read_text() == (
            f"a\n<!-- figures: by a command -->\n\n{table}\n<!-- /figures -->\nb\n"
        )


@pytest.mark.parametrize("word", ["figures", "attribute"])
def test_a_recording_or_a_page_that_is_none_ends_with_2(word, tmp_path, capsys):
    junk = tmp_path / "junk.json"
    junk.write_text("[]")
    for path in (junk, tmp_path / "none.json"):
        assert main([word, "--recording", str(path)]) == 2
    assert main([word, "--into", str(tmp_path / "none.md")]) == 2
    said = "".join(capsys.readouterr())
    assert said.count("recording: path must be a recording, got ") == 2
    assert "into must be a file, got " in said


OLDER = [
    ("counterfactual", "p-rz: 7 of 100 elements tell it apart", "7 of 100 elements reject p-rz"),
    (
        "bounded",
        "0 of 9 elements outside; the worst uses 0.5000 of its bound; 1,234 have none",
        "0 of 9 elements outside; the largest error is 0.5000 of its bound; "
        "1,234 have no finite bound",
    ),
    (
        "bit-exact",
        "0 of 2 (row, 16 heads) tiles differ; 16,384 BF16 elements",
        "0 of 2 tiles (16 heads of a row) differ; they hold 16,384 BF16 elements",
    ),
    ("structural", "18 of 18: 10 ex2", "18 of 18 kernels; the first: 10 ex2"),
    ("structural", "18 of 18; of the first, 10 ex2", "18 of 18 kernels; the first: 10 ex2"),
    ("bit-exact", "0 of 9 elements differ", "0 of 9 elements differ"),
]


@pytest.mark.parametrize(("kind", "older", "today"), OLDER)
def test_a_page_shows_older_figures_in_todays_words(kind, older, today):
    outcome = Outcome("far-rows", "An older statement.", kind, "pass", older)
    page = apart_markdown([("Head", HOST, [outcome])])
    assert (
        f"| `far-rows` | Cache offsets above 2^31 bytes are addressed correctly. | {kind} " in page
    )
    assert f"| pass | {today} |" in page


def test_a_page_keeps_the_statement_of_a_claim_that_is_no_longer_made():
    outcome = Outcome("no-such-claim", "An older statement.", "bit-exact", "pass", "0 of 1")
    page = apart_markdown([("Head", HOST, [outcome])])
    assert "| `no-such-claim` | An older statement. | bit-exact | pass | 0 of 1 |" in page


def test_todays_words_are_those_of_the_claims():
    assert str(Trial("p-rz", (), elements=100, telling=7)) == OLDER[0][2]
