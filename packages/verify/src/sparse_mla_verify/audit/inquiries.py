"""Subcommands of the audit that decide no claim: attribute, identify, explain."""

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparse_mla_verify.attribution import attribution_report
from sparse_mla_verify.attribution.attribute import Attribution, attribute_all, cases_of
from sparse_mla_verify.audit import claims
from sparse_mla_verify.audit.collect import gpu_name
from sparse_mla_verify.black_box.adapters import load
from sparse_mla_verify.black_box.identify import QUESTIONS, Finding, identify
from sparse_mla_verify.evidence import recordings
from sparse_mla_verify.evidence.recordings import Recording
from sparse_mla_verify.inputs.cases import Case
from sparse_mla_verify.inputs.schedules import BASE, REFERENCE
from sparse_mla_verify.terminal.options import count
from sparse_mla_verify.terminal.progress import Bars, bars_on


def add_parsers(commands: Any, names: Callable[[str], list[str]]) -> None:
    """Add the subcommands; `names` parses a list of families."""
    attribute = commands.add_parser("attribute", help="where the error comes from")
    attribute.add_argument("--families", type=names, default=[], help="comma-separated names")
    attribute.add_argument("--schedule", choices=tuple(REFERENCE), default=BASE)
    attribute.add_argument("--recording", type=Path, help="whose bits the last step must be")
    attribute.add_argument("--workers", type=count, help="processes (all cores unless said)")
    attribute.add_argument("--json", action="store_true", help="print the result as JSON")
    attribute.add_argument("--into", type=Path, help="write the tables between this file's marks")
    identifying = commands.add_parser("identify", help="find out a kernel's conventions")
    identifying.add_argument("--kernel", required=True, help="package.module:function")
    identifying.add_argument("--json", action="store_true", help="print the result as JSON")
    identifying.add_argument("--out", type=Path, help="write the result and the machine as JSON")
    explain = commands.add_parser("explain", help="what a claim says and how it is decided")
    explain.add_argument("claim")


def attributed(
    cases: Sequence[Case],
    machine: str,
    recording: Recording | None,
    workers: int | None,
    console: Console,
) -> list[Attribution]:
    """`attribute_all` with a progress bar."""
    with bars_on(console) as bars:
        progress = Bars(bars)
        progress.start("attribute", len(cases))
        return attribute_all(
            cases,
            machine,
            recording,
            workers=workers,
            advance=lambda: progress.advance("attribute"),
        )


def attribute_command(options: argparse.Namespace) -> int:
    """The tables of every family; 1 if a recorded bit is not the last step's, 2 if none is held."""
    console = Console(stderr=options.json)
    path = options.recording or recordings.shipped(options.schedule)
    try:
        recording = recordings.load(path) if path else None
    except (OSError, ValueError) as error:
        console.print(f"recording: {path} is none ({error!r})", style="red", markup=False)
        return 2
    if options.into and not options.into.is_file():
        console.print(f"into: {options.into} is no file", style="red", markup=False)
        return 2
    cases = cases_of(options.families, options.schedule)
    found = attributed(cases, "SM90", recording, options.workers, console)
    if options.json:
        print(json.dumps([dataclasses.asdict(a) for a in found], indent=1))
    elif options.into:
        attribution_report.write_into(options.into, found)
    else:
        for table in attribution_report.tables(found):
            console.print(table)
    differing = [a.tiles_differing for a in found]
    if any(differing):
        return 1
    return 0 if found and None not in differing else 2


def identify_command(options: argparse.Namespace) -> int:
    """The conventions of a kernel; 0 unless none at all could be determined."""
    console = Console(stderr=options.json)
    try:
        kernel = load(options.kernel)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    if options.out and not options.out.parent.is_dir():
        console.print(f"out: {options.out.parent} is no folder", style="red", markup=False)
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
        options.out.write_text(json.dumps(record, indent=1) + "\n")
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


def explain_command(options: argparse.Namespace) -> int:
    """One claim in full; 2 for a name that is none."""
    found = {c.name: c for c in claims.all_claims()}
    if options.claim not in found:
        print(f"claim: {options.claim!r} is none of {', '.join(found)}", file=sys.stderr)
        return 2
    claim = found[options.claim]
    print(f"{claim.name} ({claim.kind}; stage: {claim.stage})")
    print(textwrap.fill(claim.statement, 88, initial_indent="  ", subsequent_indent="  "))
    if not claim.counterfactuals:
        return 0
    if claim.kind == "fault":
        print("It holds if no decode faults, and a kernel does that")
    else:
        print("It holds if the bits are the contract's, and other than those of a kernel that")
    for c in claim.counterfactuals:
        print(f"  {c.about}  [{c.name}; on {', '.join(c.data)}]")
    return 0
