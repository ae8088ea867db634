"""Where each rounding step of the contract happens, from the marks in the code.

A mark is a comment that begins with the step's number, on the line where the step happens or on the
line above: ``# R7``, ``# R8: the pair``, ``# R6, R7``. This file finds the marks, and writes them
as tables into contract.md:

    python docs/contract_marks.py
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "contract.md"
REFERENCE = ROOT / "packages/reference/src/sparse_mla_reference"
KERNEL = ROOT / "packages/kernel/src/sparse_mla_kernel"
#: The folders that hold a decode kernel each, by name.
KERNELS = {path.parent.name: path.parent for path in sorted(KERNEL.glob("kernels/*/decode.py"))}
SHARED = KERNEL / "arithmetic"
OWNER_MERGE = KERNEL / "dcp/owner_merge.py"

#: Where the kernel package may mark a step.
MARKED = {"R": (*KERNELS.values(), SHARED), "O": (OWNER_MERGE,)}

_MARK = re.compile(r"#\s*([RO]\d+(?:,\s*[RO]\d+)*)(?![\w-])")
_ROW = re.compile(r"^\| ([RO]\d+) \|", flags=re.MULTILINE)


@dataclass(frozen=True, order=True)
class Place:
    """Where a step happens: a file, and the function in it; "" outside of all."""

    path: Path
    function: str


def steps() -> list[str]:
    """The steps that the contract lists, in its order."""
    return list(dict.fromkeys(_ROW.findall(_without_places(PAGE.read_text(encoding="utf-8")))))


def marks(place: Path) -> dict[str, list[Place]]:
    """The place of each mark of a step, in a file or in the files below a folder."""
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    found: dict[str, list[Place]] = defaultdict(list)
    for file in files:
        text = file.read_text(encoding="utf-8")
        spans = list(_functions(ast.parse(text)))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _MARK.match(token.string) if token.type == tokenize.COMMENT else None
            if match is None:
                continue
            line = token.start[0]
            inside = [name for name, first, last in spans if first <= line <= last]
            where = Place(file, inside[-1] if inside else "")
            for step in re.findall(r"[RO]\d+", match[1]):
                found[step].append(where)
    return found


def _functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Name, first and last line of every function, an outer one before those inside it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno or node.lineno


def table(prefix: str) -> str:
    """The table of where each step of ``prefix`` (``"R"`` or ``"O"``) happens, as Markdown."""
    if prefix == "R":
        columns = {"reference": marks(REFERENCE)}
        columns |= {name.replace("_", " "): marks(folder) for name, folder in KERNELS.items()}
        columns |= {"shared by the kernels": marks(SHARED)}
    else:
        columns = {"reference": marks(REFERENCE), "kernel": marks(OWNER_MERGE)}
    lines = ["| # | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for step in (step for step in steps() if step.startswith(prefix)):
        cells = [_cell(found[step]) for found in columns.values()]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(places: list[Place]) -> str:
    """Files, their functions, and how often a function marks the step if that is not once."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for place, times in Counter(places).items():
        name = f"`{place.function}`" if place.function else ""
        by_file[place.path].append(name if times == 1 else f"{name} ({times})")
    return "; ".join(
        f"[`{path.stem}`](../{path.relative_to(ROOT).as_posix()}) " + ", ".join(names)
        for path, names in by_file.items()
    )


def page(text: str) -> str:
    """The page with today's tables between their comments."""
    for prefix in "RO":
        begin, end = _borders(prefix)
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), flags=re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"contract.md must hold {begin} and {end} once, in this order")
        written = f"{begin}\n\n{table(prefix)}\n\n{end}"
        text = pattern.sub(written.replace("\\", r"\\"), text)
    return text


def _without_places(text: str) -> str:
    for prefix in "RO":
        begin, end = _borders(prefix)
        text = re.sub(re.escape(begin) + ".*?" + re.escape(end), "", text, flags=re.DOTALL)
    return text


def _borders(prefix: str) -> tuple[str, str]:
    name = {"R": "steps", "O": "owner merge"}[prefix]
    return (
        f"<!-- places of the {name}: written by `python docs/contract_marks.py` -->",
        f"<!-- /places of the {name} -->",
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
