"""The audit command: decide every claim, live on a GPU or on a recording, and report.

Exit status: 0 when all claims hold, 1 when one fails, 2 when none fails but one can't be decided.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from rich.console import Console
from rich.table import Table

from sparse_mla_verify.attribution import attribute
from sparse_mla_verify.audit import (
    audit_report,
    claims,
    collect,
    inquiries,
)
from sparse_mla_verify.audit.collect import gpu_name
from sparse_mla_verify.evidence import recordings
from sparse_mla_verify.evidence.evidence import RECORDED, Evidence
from sparse_mla_verify.evidence.recordings import KERNEL, Recording
from sparse_mla_verify.inputs.cases import (
    FAMILIES,
    HEAD_TILE,
    SEED,
    Case,
    all_cases,
)
from sparse_mla_verify.inputs.schedules import BASE, REFERENCE
from sparse_mla_verify.processes.workers import kept
from sparse_mla_verify.push import lse_counterfactuals
from sparse_mla_verify.terminal.options import count, positive
from sparse_mla_verify.terminal.page_figures import between_marks
from sparse_mla_verify.terminal.progress import Bars, bars_on


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status. `run` is the one when none is named."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in (*_COMMANDS, "-h", "--help"):
        given.insert(0, "run")
    options = _parser().parse_args(given)
    return _COMMANDS[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparse-mla-audit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="decide every claim (the default)")
    run.add_argument("--recording", type=Path, help="decide on this recording, GPU or not")
    run.add_argument("--report", type=Path, default=Path("audit-report"), help="folder to write to")
    run.add_argument("--json", action="store_true", help="print the result as JSON, no tables")
    record = commands.add_parser("record", help="run on the GPU and write a recording")
    record.add_argument("out", type=Path, help="the JSON file; arrays go into an npz beside it")
    record.add_argument("--report", type=Path, help="folder to write a report to as well")
    run.add_argument("--seed", type=int, default=SEED, help="of other inputs; needs a GPU")
    run.add_argument(
        "--time-budget",
        type=positive,
        metavar="S",
        help="leave out cases past so many seconds of prediction",
    )
    for command in (run, record):
        command.add_argument("--schedule", choices=tuple(REFERENCE), default=BASE)
        command.add_argument("--families", type=_names, default=[], help="comma-separated names")
        command.add_argument("--workers", type=count, help="processes of the reference (all cores)")
    inquiries.add_parsers(commands, _names)
    commands.add_parser("list", help="the claims and the case families")
    figures = commands.add_parser("figures", help="the README's table, from a recording")
    figures.add_argument("--recording", type=Path, help="another recording than the one shipped")
    figures.add_argument("--into", type=Path, help="write it between the marks of this file")
    figures.add_argument(
        "--every", action="store_true", help="every claim of every schedule's recording instead"
    )
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        raise argparse.ArgumentTypeError(f"{unknown} are none of {', '.join(FAMILIES)}")
    return names


# Claims that one family alone can decide. While a recording that ships lacks it, the audit of that
# recording leaves the claim out, by name; a run on a GPU takes family and claim.
NEEDS = MappingProxyType({"p-saturates": "huge-logits"})


# Claims that the recordings of push mode decide, wherever the audit runs. They are of the base
# schedule and are looked at in an audit of all its families.
PUSH = ("pushed-steps", "same-push-code", lse_counterfactuals.CLAIM)


def left_out(evidence: Evidence) -> dict[str, str]:
    """The claims that are left out, with the reason.

    Those that need a pending family which a recording lacks, those about push mode in an audit of
    less than all families of the base schedule, and the one about guarded caches in an audit of
    less than all families.
    """
    held = {c.case.family for c in evidence.cases}
    waiting = {
        name: f"until the family {family} is recorded"
        for name, family in NEEDS.items()
        if evidence.source == RECORDED and FAMILIES[family].pending and family not in held
    }
    if evidence.push is None:
        waiting |= dict.fromkeys(PUSH, "for an audit of the whole base schedule")
    if evidence.guarded is None:
        waiting[claims.UNREAD] = "for an audit of all families"
    return waiting


def decide(evidence: Evidence) -> list[tuple[claims.Claim, claims.Verdict]]:
    """Every claim with its verdict, but those that are left out."""
    absent = left_out(evidence)
    return [(c, c.decide(evidence)) for c in claims.all_claims() if c.name not in absent]


def gather(options: argparse.Namespace, console: Console) -> tuple[Evidence, Recording | None]:
    """Evidence from where the options and the machine allow, and the recording it is of."""
    path = options.recording or (None if gpu_name() else recordings.shipped(options.schedule))
    recording = recordings.load(path) if path else None
    cases, left = within_budget(_cases(options, recording), options.time_budget)
    note = f"{len(left)} cases left out for the time budget: {', '.join(left)}"
    with bars_on(console) as bars:
        progress = Bars(bars)
        if recording:
            found = collect.from_recording(recording, cases, progress, workers=options.workers)
        elif gpu_name():
            found = collect.from_gpu(cases, progress, workers=options.workers)[0]
        else:
            found = collect.from_nothing(cases, progress, workers=options.workers)
        whole = not options.families and not left
        if whole:
            found = replace(found, guarded=collect.guarded_caches(options.schedule))
        if whole and options.schedule == BASE:
            push = collect.pushed(progress, workers=options.workers)
            found = replace(found, push=push, trials={**found.trials, **push.trials})
    return replace(found, notes=(*found.notes, note)) if left else found, recording


def _cases(options: argparse.Namespace, recording: Recording | None) -> Sequence[Case]:
    """The cases asked for: pending families where a GPU runs them or the recording holds them."""
    cases = all_cases(options.families, options.schedule, pending=True, seed=options.seed)
    if recording is None:
        return cases
    held = {record.name for record in recording.cases}
    asked = options.families
    return [c for c in cases if c.name in held or asked or not FAMILIES[c.family].pending]


TILE_KEYS_PER_SECOND = 2000  # (head tile, key) pairs that a core predicts and falsifies


def within_budget(
    cases: Sequence[Case], seconds: float | None
) -> tuple[Sequence[Case], tuple[str, ...]]:
    """The cases that one core predicts in so many seconds, the cheapest first; those left out.

    The cheapest is always in.
    """
    if seconds is None:
        return cases, ()
    cost = {c.name: int(np.sum(c.counts + 16)) * c.heads / HEAD_TILE for c in cases}
    ranked = sorted(cases, key=lambda c: cost[c.name])
    spent = np.cumsum([cost[c.name] for c in ranked]) / TILE_KEYS_PER_SECOND
    kept = {c.name for k, c in enumerate(ranked) if k == 0 or spent[k] <= seconds}
    return [c for c in cases if c.name in kept], tuple(n for n in cost if n not in kept)


def _run(options: argparse.Namespace) -> int:
    console = Console(stderr=options.json)
    if options.seed != SEED and (options.recording or gpu_name() is None):
        console.print(f"seed: other inputs than those of seed {SEED} need a GPU", style="red")
        return 2
    if options.recording:
        try:
            held = recordings.load(options.recording).machine_code
        except (OSError, ValueError) as error:
            console.print(f"recording: {options.recording} is none ({error!r})", markup=False)
            return 2
        other = {recordings.signature_of(key).schedule for key in held} - {options.schedule}
        if other:
            names = f"{', '.join(sorted(other))}; --schedule is {options.schedule}"
            console.print(f"recording: {options.recording} is of {names}", markup=False)
            return 2
    with kept(options.workers):
        evidence, recording = gather(options, console)
        parts = (e.case for e in evidence.cases if e.case.name in attribute.CASES)
        shown = [attribute.part_of(case) for case in parts]
        machine = collect.machine_of(evidence.host.arch) if evidence.host else "SM90"
        attributed = inquiries.attributed(shown, machine, recording, options.workers, console)
    results = decide(evidence)
    absent = [f"left out: {name}, {why}" for name, why in left_out(evidence).items()]
    evidence = replace(evidence, notes=(*evidence.notes, *absent))
    if options.json:
        print(json.dumps(audit_report.plain(evidence, results, attributed), indent=1))
    else:
        audit_report.print_report(console, evidence, results)
    path = audit_report.write_report(options.report, evidence, results, attributed)
    for line in absent:
        console.print(line, markup=False, highlight=False)
    return _close(console, results, f"report: {path}")


def _close(
    console: Console, results: Sequence[tuple[claims.Claim, claims.Verdict]], last: str
) -> int:
    statuses = [verdict.status for _, verdict in results]
    counted = ", ".join(f"{statuses.count(s)} {s.value}" for s in claims.Status)
    console.print(f"{len(statuses)} claims: {counted}; {last}", markup=False, highlight=False)
    return claims.exit_status(verdict for _, verdict in results)


def _record(options: argparse.Namespace) -> int:
    console = Console()
    if gpu_name() is None:
        console.print("record needs an NVIDIA GPU and PyTorch with CUDA", style="red")
        return 2
    cases = all_cases(options.families, options.schedule, pending=True)
    with bars_on(console) as bars:
        evidence, recording = collect.from_gpu(cases, Bars(bars), workers=options.workers)
    results = decide(evidence)
    audit_report.print_report(console, evidence, results)
    if options.report:
        audit_report.write_report(options.report, evidence, results)
    # Written whatever came out: a failing run is evidence too.
    replace(recording, outcomes=audit_report.outcomes_of(results)).save(options.out)
    return _close(console, results, f"recording: {options.out}")


def _list(options: argparse.Namespace) -> int:
    console = Console()
    table = Table("claim", "stage", "decided by", "statement", title="Claims", title_justify="left")
    for claim in claims.all_claims():
        table.add_row(claim.name, claim.stage, claim.kind, claim.statement)
    console.print(table)
    table = Table("family", "cases", "tiles", "what", title="Families", title_justify="left")
    for family in FAMILIES.values():
        cases = family.build()
        tiles = sum(case.tiles for case in cases)
        table.add_row(family.name, str(len(cases)), f"{tiles:,}", family.about)
    console.print(table)
    return 0


def _figures(options: argparse.Namespace) -> int:
    path = options.recording or recordings.shipped()
    if path is None:
        print("there is no recording to take figures from", file=sys.stderr)
        return 2
    try:
        recording = recordings.load(path)
    except (OSError, ValueError) as error:
        print(f"recording: {path} is none ({error!r})", file=sys.stderr)
        return 2
    if options.into and not options.into.is_file():
        print(f"into: {options.into} is no file", file=sys.stderr)
        return 2
    if recording.source != KERNEL:
        print(f"{path} is not a recording of a kernel", file=sys.stderr)
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


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "attribute": inquiries.attribute_command,
    "identify": inquiries.identify_command,
    "record": _record,
    "list": _list,
    "explain": inquiries.explain_command,
    "figures": _figures,
}
