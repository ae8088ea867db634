"""The page of what was identified: its tables, from records; those that ship are what it shows."""

import json
from pathlib import Path

import pytest

from sparse_mla_verify.evidence.recordings import FOLDER
from sparse_mla_verify.planted import identified_page
from sparse_mla_verify.planted.variants import VARIANTS
from sparse_mla_verify.terminal.page_figures import between_marks

PAGE = Path(__file__).parents[4] / "docs" / "identified.md"
MACHINE = {"gpu": "a GPU", "driver": "1", "date": "2000-01-01"}


@pytest.fixture
def folder(tmp_path):
    for name in identified_page.KERNELS:
        findings = [{"question": "LSE base", "answer": f"base of {name}", "evidence": []}]
        if name == "flashmla":
            findings.append({"question": "id N", "answer": "raises | faults", "evidence": []})
        record = {"kernel": name, "machine": MACHINE, "findings": findings}
        (tmp_path / f"identify-{name}.json").write_text(json.dumps(record))
    variants = [
        {
            "variant": {"name": "P to 447", "finding": ["P's scale", "447"]},
            "failed": ["latent-bits", "p-scale-is-448"],
            "findings": {"P's scale": "447"},
        },
        {"variant": {"name": "another", "finding": ["x", "y"]}, "error": "a\nno compiler"},
    ]
    record = {"machine": MACHINE, "variants": variants}
    (tmp_path / "variants.json").write_text(json.dumps(record))
    return tmp_path


def test_the_tables_say_what_the_records_say(folder):
    lines = identified_page.page(folder).splitlines()
    assert lines[0] == "a GPU, driver 1, 2000-01-01."
    bases = " | ".join(f"base of {name}" for name in identified_page.KERNELS)
    assert f"| LSE base | {bases} |" in lines
    assert r"| id N | not asked | not asked | raises \| faults | not asked |" in lines
    assert "| P to 447 | latent-bits, p-scale-is-448 | P's scale: 447 |" in lines
    assert "| another | did not run | no compiler |" in lines


def test_a_missing_record_is_named(folder, capsys):
    (folder / "variants.json").unlink()
    assert identified_page.main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert "must be a record of" in said
    assert "variants.json" in said


def test_the_page_shows_the_shipped_records():
    text = PAGE.read_text()
    assert between_marks(text, identified_page.page(FOLDER)) == text
    record = json.loads((FOLDER / "variants.json").read_text())
    assert {r["variant"]["name"] for r in record["variants"]} == {v.name for v in VARIANTS}
    assert all(r["caught"] and r["named"] for r in record["variants"])
