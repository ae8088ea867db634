"""A kernel's conventions, found out from its answers alone: `identify`."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparse_mla_verify.black_box.adapters import load
from sparse_mla_verify.black_box.identify import QUESTIONS, Finding, identify
from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.gpu_runs.present import gpu_name
from sparse_mla_verify.terminal.options import parser
from sparse_mla_verify.terminal.progress import Bars, bars_on


def main(arguments: Sequence[str]) -> int:
    """Print a kernel's conventions; 0 unless none at all could be determined."""
    commands = parser("identify", __doc__)
    commands.add_argument("--kernel", required=True, help="package.module:function")
    commands.add_argument("--json", action="store_true", help="print the result as JSON")
    commands.add_argument("--out", type=Path, help="write the result and the GPU as JSON")
    options = commands.parse_args(arguments)
    console = Console(stderr=options.json)
    try:
        kernel = load(options.kernel)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    if options.out and not options.out.parent.is_dir():
        console.print(
            f"the folder of out must be there, got {options.out}", style="red", markup=False
        )
        return 2
    machine = _machine() if options.out else {}  # before a kernel can fault
    with bars_on(console) as bars:
        progress = Bars(bars)
        progress.start("questions", len(QUESTIONS))
        found = identify(kernel, advance=lambda name: progress.advance("questions"))
    plain = [dataclasses.asdict(f) for f in found]
    if options.json:
        print(json.dumps(plain, indent=1))
    else:
        console.print(findings_table(options.kernel, found))
    if options.out:
        record = {"kernel": options.kernel, "machine": machine, "findings": plain}
        json_files.write(options.out, record)
    return 0 if any(f.determined for f in found) else 2


def _machine() -> dict[str, Any]:
    """The GPU and the versions; {} where there is no GPU."""
    if gpu_name() is None:
        return {}
    from sparse_mla_verify.gpu_runs import gpu

    return dataclasses.asdict(gpu.host())


def findings_table(kernel: str, found: Sequence[Finding]) -> Table:
    """A line for each question; evidence that several share is printed once."""
    table = Table("question", "answer", "evidence", title=kernel, title_justify="left")
    before: tuple[str, ...] = ()
    for finding in found:
        style = "green" if finding.determined else "yellow"
        shown = (
            "as above"
            if finding.evidence and finding.evidence == before
            else "\n".join(finding.evidence)
        )
        table.add_row(finding.question, f"[{style}]{finding.answer}[/{style}]", shown)
        before = finding.evidence
    return table
