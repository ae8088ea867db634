"""The audit: decide every claim, live on a GPU or on a recording, and report.

Exit status: 0 when all claims hold, 1 when one fails, 2 when none fails but one can't be decided.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from sparse_mla_verify.attribution import attribute
from sparse_mla_verify.attribution.command import attributed
from sparse_mla_verify.audit import audit_report, claims, collect
from sparse_mla_verify.audit.decide import decide, left_out
from sparse_mla_verify.evidence import recordings
from sparse_mla_verify.evidence.evidence import Evidence
from sparse_mla_verify.evidence.recordings import Recording
from sparse_mla_verify.gpu_runs.present import gpu_name, lacks_gpu
from sparse_mla_verify.inputs.cases import FAMILIES, HEAD_TILE, SEED, Case, all_cases
from sparse_mla_verify.inputs.schedules import BASE
from sparse_mla_verify.processes.workers import kept
from sparse_mla_verify.terminal.options import add_choice_of_cases, add_workers, parser, positive
from sparse_mla_verify.terminal.progress import Bars, bars_on


def _run_parser() -> argparse.ArgumentParser:
    run = parser("run", __doc__)
    run.add_argument("--recording", type=Path, help="decide on this recording, GPU or not")
    run.add_argument("--report", type=Path, default=Path("audit-report"), help="folder to write to")
    run.add_argument("--json", action="store_true", help="print the result as JSON, no tables")
    run.add_argument("--seed", type=int, default=SEED, help="of other inputs; needs a GPU")
    run.add_argument(
        "--time-budget",
        type=positive,
        metavar="S",
        help="leave out cases past so many seconds of prediction",
    )
    add_choice_of_cases(run)
    add_workers(run)
    return run


def _record_parser() -> argparse.ArgumentParser:
    record = parser("record", "Run every case on the GPU, write a recording, decide the claims.")
    record.add_argument("out", type=Path, help="the JSON file; arrays go into an npz beside it")
    record.add_argument("--report", type=Path, help="folder to write a report to as well")
    add_choice_of_cases(record)
    add_workers(record)
    return record


def run(arguments: Sequence[str]) -> int:
    """Decide every claim and write the report; 0, 1 or 2 as the module says."""
    options = _run_parser().parse_args(arguments)
    console = Console(stderr=options.json)
    if options.seed != SEED and (options.recording or gpu_name() is None):
        console.print(
            f"seed must be {SEED} without a GPU, got {options.seed}", style="red", markup=False
        )
        return 2
    if options.recording:
        try:
            _of_schedule(recordings.load(options.recording), options.schedule)
        except ValueError as error:
            console.print(f"recording: {error}", markup=False)
            return 2
    with kept(options.workers):
        evidence, recording = gather(options, console)
        parts = (e.case for e in evidence.cases if e.case.name in attribute.CASES)
        shown = [attribute.part_of(case) for case in parts]
        machine = collect.machine_of(evidence.host.arch) if evidence.host else "SM90"
        shares = attributed(shown, machine, recording, options.workers, console)
    results = decide(evidence)
    absent = [f"left out: {name}, {why}" for name, why in left_out(evidence).items()]
    evidence = replace(evidence, notes=(*evidence.notes, *absent))
    if options.json:
        print(json.dumps(audit_report.plain(evidence, results, shares), indent=1))
    else:
        audit_report.print_report(console, evidence, results)
    path = audit_report.write_report(options.report, evidence, results, shares)
    for line in absent:
        console.print(line, markup=False, highlight=False)
    return _close(console, results, f"report: {path}")


def _of_schedule(recording: Recording, schedule: str) -> None:
    """Raises ValueError where a recording is of another schedule."""
    held = {recordings.signature_of(key).schedule for key in recording.machine_code}
    if held - {schedule}:
        raise ValueError(f"schedule must be {', '.join(sorted(held))}, got {schedule}")


def record(arguments: Sequence[str]) -> int:
    """Run every case on the GPU, write a recording and decide the claims."""
    options = _record_parser().parse_args(arguments)
    console = Console()
    if lacks_gpu("record"):
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


def _close(
    console: Console, results: Sequence[tuple[claims.Claim, claims.Verdict]], last: str
) -> int:
    statuses = [verdict.status for _, verdict in results]
    counted = ", ".join(f"{statuses.count(s)} {s.value}" for s in claims.Status)
    console.print(f"{len(statuses)} claims: {counted}; {last}", markup=False, highlight=False)
    return claims.exit_status(verdict for _, verdict in results)


def gather(options: argparse.Namespace, console: Console) -> tuple[Evidence, Recording | None]:
    """Evidence from where the options and the computer allow, and the recording it is of."""
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
