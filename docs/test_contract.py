"""The contract's steps are the steps of the code, by the marks where they happen."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "contract_marks", Path(__file__).parent / "contract_marks.py"
)
assert _spec is not None
assert _spec.loader is not None
contract_marks = importlib.util.module_from_spec(_spec)
sys.modules["contract_marks"] = contract_marks
_spec.loader.exec_module(contract_marks)

STEPS = contract_marks.steps()
R = [step for step in STEPS if step.startswith("R")]
O = [step for step in STEPS if step.startswith("O")]  # noqa: E741 (the steps' own letter)
DECODES = {"reference": contract_marks.REFERENCE, **contract_marks.KERNELS}


def test_the_contract_numbers_its_steps_without_a_gap():
    assert [f"R{k}" for k in range(1, 16)] == R
    assert [f"O{k}" for k in range(1, 8)] == O


@pytest.mark.parametrize("name", DECODES)
def test_every_step_is_marked_in_every_decode(name):
    missing = [step for step in R if not contract_marks.marks(DECODES[name])[step]]
    assert missing == []


@pytest.mark.parametrize("place", [contract_marks.REFERENCE, contract_marks.OWNER_MERGE])
def test_every_step_of_the_owner_merge_is_marked(place):
    assert [step for step in O if not contract_marks.marks(place)[step]] == []


@pytest.mark.parametrize("package", [contract_marks.REFERENCE, contract_marks.KERNEL])
def test_every_mark_is_a_step_of_the_contract(package):
    marked = contract_marks.marks(package)
    assert marked.keys() <= set(STEPS)
    outside = [place for places in marked.values() for place in places if not place.function]
    assert outside == []


@pytest.mark.parametrize("prefix", ["R", "O"])
def test_a_step_is_marked_where_the_page_looks(prefix):
    """Elsewhere in the kernel's package a mark would stand on no page."""
    for step, places in contract_marks.marks(contract_marks.KERNEL).items():
        if step.startswith(prefix):
            rooms = contract_marks.MARKED[prefix]
            known = [p for p in places if any(r == p.path or r in p.path.parents for r in rooms)]
            assert places == known, step


def test_the_page_shows_the_marks():
    text = contract_marks.PAGE.read_text(encoding="utf-8")
    assert text == contract_marks.page(text), "run python docs/contract_marks.py"


def test_a_mark_is_a_comment_that_begins_with_the_number(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(
        "def outer():\n"
        '    text = "# R1"\n'
        "    a = 1  # R2: first\n"
        "    a += 1  # R2: second\n"
        "    # R3, R4\n"
        "    def inner():\n"
        "        b = 2  # the step R5\n"
        "        c = 3  # R6\n"
        "d = 4  # R7\n"
    )
    found = contract_marks.marks(file)
    places = {step: [place.function for place in where] for step, where in found.items()}
    assert places == {
        "R2": ["outer", "outer"],
        "R3": ["outer"],
        "R4": ["outer"],
        "R6": ["inner"],
        "R7": [""],
    }
