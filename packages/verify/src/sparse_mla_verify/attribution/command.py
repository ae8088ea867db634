"""Where the error comes from, rounding by rounding: `attribute`."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sparse_mla_verify.attribution import attribution_report
from sparse_mla_verify.attribution.attribute import Attribution, attribute_all, cases_of
from sparse_mla_verify.evidence import recordings
from sparse_mla_verify.evidence.recordings import Recording
from sparse_mla_verify.inputs.cases import Case
from sparse_mla_verify.terminal.options import add_choice_of_cases, add_into, add_workers, parser
from sparse_mla_verify.terminal.progress import Bars, bars_on


def main(arguments: Sequence[str]) -> int:
    """Print every family's tables.

    1 if a recorded bit is not the last step's, 2 if the recording holds none of the cases.
    """
    commands = parser("attribute", __doc__)
    commands.add_argument("--recording", type=Path, help="whose bits the last step must be")
    commands.add_argument("--json", action="store_true", help="print the result as JSON")
    add_choice_of_cases(commands)
    add_workers(commands)
    add_into(commands)
    options = commands.parse_args(arguments)
    console = Console(stderr=options.json)
    path = options.recording or recordings.shipped(options.schedule)
    try:
        recording = recordings.load(path) if path else None
    except ValueError as error:
        console.print(f"recording: {error}", style="red", markup=False)
        return 2
    if options.into and not options.into.is_file():
        console.print(f"into must be a file, got {options.into}", style="red", markup=False)
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
