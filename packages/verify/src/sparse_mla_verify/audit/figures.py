"""What recordings say, for pages: `figures`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sparse_mla_verify.audit import audit_report, claims, collect
from sparse_mla_verify.audit.decide import PUSH
from sparse_mla_verify.evidence import recordings
from sparse_mla_verify.evidence.evidence import RECORDED, Evidence
from sparse_mla_verify.evidence.recordings import KERNEL, Recording
from sparse_mla_verify.inputs.schedules import REFERENCE
from sparse_mla_verify.terminal.options import add_into, parser
from sparse_mla_verify.terminal.page_figures import between_marks


def main(arguments: Sequence[str]) -> int:
    """Print or write what a recording found; 2 where there is no such recording or page."""
    commands = parser("figures", "Write what a recording found, as the README shows it.")
    commands.add_argument("--recording", type=Path, help="another recording than the one shipped")
    commands.add_argument(
        "--every", action="store_true", help="every claim of every schedule's recording instead"
    )
    add_into(commands)
    options = commands.parse_args(arguments)
    path = options.recording or recordings.shipped()
    if path is None:
        print("there is no recording to take figures from", file=sys.stderr)
        return 2
    try:
        recording = recordings.load(path)
    except ValueError as error:
        print(f"recording: {error}", file=sys.stderr)
        return 2
    if options.into and not options.into.is_file():
        print(f"into must be a file, got {options.into}", file=sys.stderr)
        return 2
    if recording.source != KERNEL:
        print(
            f"recording must be of a kernel, got {path} of source {recording.source}",
            file=sys.stderr,
        )
        return 2
    table = audit_report.figures_markdown(recording)
    if options.every:
        paths = {name: recordings.shipped(name) for name in REFERENCE}
        held = {n: recordings.load(p) for n, p in paths.items() if p}
        table = (
            audit_report.claims_markdown(held)
            + "\n"
            + audit_report.apart_markdown(recorded_apart(held))
        )
    if options.into:
        options.into.write_text(between_marks(options.into.read_text(), table))
    else:
        print(table, end="")
    return 0


def recorded_apart(
    shipped: Mapping[str, Recording], *, workers: int | None = None
) -> list[tuple[str, recordings.Host, tuple[recordings.Outcome, ...]]]:
    """What the recordings of guarded caches and of push mode decide: heads, machines, outcomes.

    By themselves: the cubins of guarded caches are held against those of the schedules' recordings,
    and nothing is compiled.
    """
    by_name = {c.name: c for c in claims.all_claims()}
    nothing = Evidence(RECORDED, None, (), {}, {})
    sections = []
    for schedule, recording in shipped.items():
        caches = collect.guarded_caches(schedule)
        evidence = replace(
            nothing, guarded=caches, compiled=recording.machine_code, compiler=recording.host.dsl
        )
        claim = by_name[claims.UNREAD]
        found = audit_report.outcomes_of([(claim, claim.decide(evidence))])
        sections.append((f"Guarded caches, the {schedule} schedule", caches.host, found))
    pushed = collect.recorded_push(workers=workers)
    evidence = replace(nothing, push=pushed)
    decided = [by_name[name] for name in PUSH if by_name[name].kind != "structural"]
    found = audit_report.outcomes_of([(c, c.decide(evidence)) for c in decided])
    return [*sections, ("Push mode", next(iter(pushed.recordings.values())).host, found)]
