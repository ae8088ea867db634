"""The floor plan in architecture.md is the one of the packages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAN = (Path(__file__).parent / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("reference", "kernel", "verify")
#: What every package has, and what is no room.
FACES = {"__init__.py", "py.typed"}


def source(package: str) -> Path:
    return ROOT / "packages" / package / "src" / f"sparse_mla_{package}"


def holds(place: Path) -> bool:
    """Whether there is a file, or a folder with more than what Python caches."""
    files = [place] if place.is_file() else [f for f in place.rglob("*") if f.is_file()]
    return any("__pycache__" not in file.parts for file in files)


def planned(package: str) -> list[str]:
    """The rooms that the plan lists, from the top."""
    block = re.search(rf"^sparse_mla_{package}/.*?(?=^\S)", PLAN, flags=re.DOTALL | re.MULTILINE)
    assert block is not None
    return re.findall(r"^  (\S+) {2,}\S", block[0], flags=re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_plan_lists_every_room_once(package):
    rooms = {f"{p.name}/" if p.is_dir() else p.name for p in source(package).iterdir() if holds(p)}
    rooms -= FACES
    assert sorted(planned(package)) == sorted(rooms)


def imported(file: Path, package: str) -> set[str]:
    """The modules of its own package that a file imports, from the package's root: ``io.rows``.

    The package itself is ``""``: what its face offers, a room may not use. A name that is imported
    from a module counts as a module of its own where there is one.
    """
    top = f"sparse_mla_{package}"
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = [top, *file.relative_to(source(package)).parts[:-1]]
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if is_module(inner, package) else module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0] if node.args else None
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                found.add(str(first.value))
    own = {name for name in found if name == top or name.startswith(f"{top}.")}
    return {name.removeprefix(top).removeprefix(".") for name in own}


def is_module(name: str, package: str) -> bool:
    place = source(package).joinpath(*name.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


def files_of(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_imports_only_rooms_below_it(package):
    rooms = [room.removesuffix("/").removesuffix(".py") for room in planned(package)]
    for number, room in enumerate(rooms):
        for file in files_of(source(package) / room):
            used = {name.partition(".")[0] for name in imported(file, package)}
            above = used & set(rooms[:number])
            assert not above, f"{file} imports {sorted(above)}, which the plan puts above it"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_imports_itself_by_way_of_others(package):
    root = source(package)
    arrows = {}
    for file in sorted(root.rglob("*.py")):
        if file.name != "__init__.py":
            name = ".".join(file.relative_to(root).with_suffix("").parts)
            arrows[name] = imported(file, package)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path, name))}"
        if name in arrows and name not in done:
            for other in sorted(arrows[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in arrows:
        visit(name, ())


@pytest.mark.parametrize(
    "line",
    [
        "from sparse_mla_kernel.dcp import step",
        "from sparse_mla_kernel import (\n    dcp,\n)",
        "from ..dcp import step",
        "from ..dcp.step import DcpStep",
        "import numpy, sparse_mla_kernel.dcp.step",
        'importlib.import_module("sparse_mla_kernel.dcp.step")',
    ],
)
def test_every_form_of_an_import_is_seen(line, monkeypatch):
    file = source("kernel") / "io" / "rows.py"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: line)
    assert {name.partition(".")[0] for name in imported(file, "kernel")} == {"dcp"}


def test_the_face_of_a_package_is_seen(monkeypatch):
    file = source("kernel") / "io" / "rows.py"
    monkeypatch.setattr(
        Path, "read_text", lambda *_, **__: "from sparse_mla_kernel import decode_op"
    )
    assert imported(file, "kernel") == {""}


def test_no_room_of_the_kernel_imports_the_face():
    """The kernel's face imports the rooms; a room that imported it would stand above itself."""
    for room in planned("kernel"):
        for file in files_of(source("kernel") / room.removesuffix("/").removesuffix(".py")):
            assert "" not in imported(file, "kernel"), file
