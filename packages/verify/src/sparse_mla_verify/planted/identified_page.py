"""What `identify` found of several kernels, and the variants that the audit caught, as a page.

    sparse-mla-audit identified --into docs/identified.md

Reads `identify-*.json` (`sparse-mla-audit identify --kernel K --out FILE`) and `variants.json`
(`sparse-mla-audit variants --out DIR`) of a folder, by default of those that ship.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.evidence.recordings import FOLDER
from sparse_mla_verify.planted.variants import VARIANTS
from sparse_mla_verify.terminal.options import add_into, parser
from sparse_mla_verify.terminal.page_figures import between_marks

#: Columns, by the name of the file: what a reader knows a kernel by.
KERNELS = {
    "ours": "base schedule",
    "ours_low_latency": "low-latency schedule",
    "flashmla": "FlashMLA sparse decode",
    "pytorch": "PyTorch, BF16, on the CPU",
}


def page(folder: Path) -> str:
    """Two tables in Markdown: question by kernel, and variant by what caught it.

    Raises:
        ValueError: The folder lacks a file.
    """
    found = {name: _read(folder / f"identify-{name}.json") for name in KERNELS}
    variants = _read(folder / "variants.json")
    machine = variants["machine"]
    said = f"{machine['gpu']}, driver {machine['driver']}, {machine['date']}."
    return f"{said}\n\n{_answers(found)}\n\n{_caught(variants['variants'])}\n"


def _read(path: Path) -> dict[str, Any]:
    return json_files.read(path, "a record of `identify` or of `variants`", dict)


def _answers(found: Mapping[str, Mapping[str, Any]]) -> str:
    questions = dict.fromkeys(f["question"] for r in found.values() for f in r["findings"])
    lines = [
        _row("question", *(KERNELS[name] for name in found)),
        _row(*["---"] * (len(found) + 1)),
    ]
    for question in questions:
        answers = [
            next((f["answer"] for f in r["findings"] if f["question"] == question), "not asked")
            for r in found.values()
        ]
        lines.append(_row(question, *answers))
    return "\n".join(lines)


def _caught(variants: Sequence[Mapping[str, Any]]) -> str:
    head = ("variant of the base kernel", "claims that fail", "what `identify` says")
    lines = [_row(*head), _row(*["---"] * len(head))]
    for result in variants:
        variant = result["variant"]
        if "error" in result:
            lines.append(_row(variant["name"], "did not run", result["error"].splitlines()[-1]))
            continue
        question, _ = variant["finding"]
        answer = f"{question}: {result['findings'][question]}"
        lines.append(_row(variant["name"], ", ".join(result["failed"]) or "none", answer))
    ran = {result["variant"]["name"] for result in variants}
    lines += [_row(v.name, "not recorded", "") for v in VARIANTS if v.name not in ran]
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page's tables or write them into a page; 2 where a file is missing."""
    command = parser("identified", __doc__)
    command.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="of the JSON files")
    add_into(command)
    options = command.parse_args(arguments)
    try:
        tables = page(options.folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.into:
        options.into.write_text(between_marks(options.into.read_text(), tables))
    else:
        print(tables, end="")
    return 0
