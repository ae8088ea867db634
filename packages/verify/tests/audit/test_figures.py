from dataclasses import replace

import pytest

from sparse_mla_verify.__main__ import main
from sparse_mla_verify.evidence import recordings


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
