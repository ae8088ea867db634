"""The floor plan in architecture.md is the one of the packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAN = (Path(__file__).parent / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("reference", "kernel", "verify")
#: What every package has, and what is no room.
FACES = {"__init__.py", "py.typed", "__pycache__"}


def source(package: str) -> Path:
    return ROOT / "packages" / package / "src" / f"sparse_mla_{package}"


def planned(package: str) -> list[str]:
    """The rooms that the plan lists, from the top."""
    block = re.search(rf"^sparse_mla_{package}/.*?(?=^\S)", PLAN, flags=re.DOTALL | re.MULTILINE)
    assert block is not None
    return re.findall(r"^  (\S+) {2,}\S", block[0], flags=re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_plan_lists_every_room_once(package):
    rooms = {f"{p.name}/" if p.is_dir() else p.name for p in source(package).iterdir()}
    rooms -= FACES | {f"{name}/" for name in FACES}
    assert sorted(planned(package)) == sorted(rooms)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_imports_only_rooms_below_it(package):
    rooms = [room.removesuffix("/").removesuffix(".py") for room in planned(package)]
    for number, room in enumerate(rooms):
        place = source(package) / room
        files = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        name = rf"sparse_mla_{package}"
        used = set(re.findall(rf"^\s*(?:from|import) {name}\.(\w+)", text, flags=re.MULTILINE))
        used |= {
            word
            for names in re.findall(rf"^\s*from {name} import ([\w, ]+)", text, flags=re.MULTILINE)
            for word in re.split(r"[, ]+", names)
        }
        above = used & set(rooms[:number])
        assert not above, f"{room} imports {sorted(above)}, which the plan puts above it"
