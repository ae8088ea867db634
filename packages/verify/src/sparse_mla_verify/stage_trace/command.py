"""Find the stage of a differing bit: a debug build's stages against the reference's.

    sparse-mla-audit stages --case small/few-keys --schedule low-latency
    sparse-mla-audit stages --out FILE

A debug build of the kernel stores its logits, P and its bytes, running maxima, row sums and
partials. The command prints for each stage how many elements differ from the reference's, and
names the first stage that differs. `--out` runs the small cases on every schedule, then once more
with a planted fault, and writes a recording. The exit status is 0 if no bit differs and the planted
fault is found at its stage, 1 if not, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.gpu_runs.present import lacks_gpu
from sparse_mla_verify.inputs.schedules import BASE, REFERENCE
from sparse_mla_verify.processes.patched_kernel import Change
from sparse_mla_verify.stage_trace.areas import STORED
from sparse_mla_verify.stage_trace.comparison import (
    StageDifference,
    compare_stages,
    first_differing,
    reference_stages,
)
from sparse_mla_verify.stage_trace.debug_build import PLANTED, PLANTED_STAGE
from sparse_mla_verify.stage_trace.kernel_run import KernelRun, Task, run_debug_build
from sparse_mla_verify.stage_trace.small_cases import case_named, small_cases
from sparse_mla_verify.terminal.options import parser

#: The recording that ships.
SHIPPED = "stage_trace_h200.json"
Result = dict[Task, list[StageDifference]]


def traced(
    tasks: Sequence[Task], stages: Sequence[str], planted: Iterable[Change] = ()
) -> tuple[KernelRun, Result]:
    """Run tasks on the GPU by a debug build, and compare each with the reference."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_debug_build(Path(folder), tasks, stages, planted)
    found = {}
    for task in tasks:
        case = case_named(*task)
        found[task] = compare_stages(case, run.stages[task], reference_stages(case), stages)
    return run, found


def said(result: Result) -> str:
    """What was found, a line for each stage, and the first stage that differs."""
    parts = []
    for (case, schedule), differences in result.items():
        first = first_differing(differences)
        parts += [
            f"{case} on {schedule}:",
            *(f"  {difference}" for difference in differences),
            f"  the first stage that differs: {first}" if first else "  no bit differs",
        ]
    return "\n".join(parts)


def recorded_tasks() -> tuple[list[Task], list[Task]]:
    """The tasks of the recording: without a fault, and with the planted one."""
    names = [case.name for case in small_cases(BASE)]
    tasks = [(name, schedule) for schedule in REFERENCE for name in names]
    return tasks, [task for task in tasks if task[0] == names[0]]


def record(out: Path, command: str) -> int:
    """Run the recording's tasks, print what was found, write the recording; the exit status."""
    tasks, planted_tasks = recorded_tasks()
    run, result = traced(tasks, tuple(STORED))
    print(said(result), flush=True)
    _, planted = traced(planted_tasks, tuple(STORED), [PLANTED])
    print(f"planted fault: {PLANTED.old} -> {PLANTED.new}\n{said(planted)}")
    plain = {
        **{name: run.host[name] for name in ("gpu", "driver", "date")},
        "command": command,
        "versions": run.host,
        "machine_code": run.machine_code,
        "planted": {"file": PLANTED.file, "old": PLANTED.old, "new": PLANTED.new},
        "results": _plain(result),
        "planted_results": _plain(planted),
    }
    json_files.write_lines(out, plain)
    print(f"written: {out}")
    return 0 if holds(plain) else 1


def _plain(result: Result) -> list[dict[str, Any]]:
    return [
        {
            "case": case,
            "schedule": schedule,
            "digest": case_named(case, schedule).digest(),
            "elements": {d.stage: d.elements for d in differences},
            "differing": {d.stage: d.differing for d in differences},
            "first": first_differing(differences),
        }
        for (case, schedule), differences in result.items()
    ]


def shipped() -> Path:
    """Where the recording that ships lies, or would."""
    return Path(str(resources.files("sparse_mla_verify").joinpath("data", SHIPPED)))


def holds(recording: dict[str, Any]) -> bool:
    """Whether a recording has every task, no differing bit, and the fault at its stage."""
    tasks = recorded_tasks()
    for wanted, key, first in zip(
        tasks, ("results", "planted_results"), (None, PLANTED_STAGE), strict=True
    ):
        results = recording[key]
        if [(r["case"], r["schedule"]) for r in results] != wanted:
            return False
        for result in results:
            differs = any(result["differing"].values())
            if result["first"] != first or differs != bool(first):
                return False
            if not all(result["elements"].values()):
                return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace one case, or record all."""
    command = parser("stages", __doc__)
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--case", help="a small case, or a case of a family")
    which.add_argument("--out", type=Path, help="record the small cases into this JSON file")
    command.add_argument("--schedule", choices=tuple(REFERENCE), default=BASE)
    command.add_argument("--stage", choices=tuple(STORED), help="store this stage alone")
    return _run(command.parse_args(arguments), command)


def _run(options: argparse.Namespace, command: argparse.ArgumentParser) -> int:
    if options.case is not None:
        try:
            case_named(options.case, options.schedule)
        except ValueError as error:
            command.error(str(error))
    if lacks_gpu("stages"):
        return 2
    if options.out is not None:
        return record(options.out, f"sparse-mla-audit stages --out {options.out.name}")
    stages = (options.stage,) if options.stage else tuple(STORED)
    _, result = traced([(options.case, options.schedule)], stages)
    print(said(result))
    return 1 if any(first_differing(differences) for differences in result.values()) else 0
