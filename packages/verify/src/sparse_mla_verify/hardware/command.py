"""The reference's models of instructions against a Hopper GPU: `hardware`."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sparse_mla_verify.gpu_runs.present import lacks_gpu
from sparse_mla_verify.hardware.comparison import Device, Session
from sparse_mla_verify.hardware.record import (
    GPU,
    GROUPS,
    Record,
    names_of,
    shortcomings,
)
from sparse_mla_verify.terminal.options import COMMAND, one_or_more, parser
from sparse_mla_verify.terminal.progress import Bars, bars_on

NAME = "hardware"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 when everything was compared and agrees, 1 on a mismatch, 2 when incomplete."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    said = f"{COMMAND} {NAME} {shlex.join(given)}"
    if lacks_gpu(NAME):
        return 2
    console = Console()
    try:
        from sparse_mla_verify.hardware.device import CudaDevice

        device = CudaDevice()
    except (ImportError, RuntimeError, AssertionError) as error:
        console.print(f"needs an sm_90 GPU, PyTorch with CUDA and the DSL: {error}", markup=False)
        return 2
    record = _run(options, device, console, said)
    console.print(_table(record))
    wrong = shortcomings(record, options.only)
    for line in wrong:
        console.print(line, markup=False, highlight=False)
    console.print(f"{record.seconds:.0f} s; recording: {options.out}", markup=False)
    if any(compared.mismatches for compared in record.compared):
        return 1
    return 2 if wrong else 0


def _run(options: argparse.Namespace, device: Device, console: Console, said: str) -> Record:
    with bars_on(console) as bars:
        session = Session(
            device, names_of(options.only), Bars(bars), options.workers, options.budget
        )
        record = Record(GPU, said, device.host(), options.workers, 0.0, ())
        for compared in session.compare():
            # Written each time: a run that is cut short has said what it found.
            record = Record(
                GPU,
                record.command,
                record.host,
                record.cores,
                round(session.seconds, 1),
                (*record.compared, compared),
            )
            record.save(options.out)
    return record


def _table(record: Record) -> Table:
    table = Table("operation", "compared", "mismatches", "at", "instruction")
    for c in record.compared:
        at = f"{c.seconds:.0f} s"
        table.add_row(c.name, f"{c.inputs:,}", f"{c.mismatches:,}", at, c.instruction)
    return table


def _groups(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    for group in chosen:
        if group not in GROUPS:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(GROUPS)}, got {group!r}")
    return chosen


def _parser() -> argparse.ArgumentParser:
    command = parser(NAME, "Compare the models with a Hopper GPU, on all inputs where possible.")
    command.add_argument("--out", type=Path, required=True, help="the recording, JSON")
    command.add_argument(
        "--only", type=_groups, default=GROUPS, metavar="GROUP,...", help=", ".join(GROUPS)
    )
    command.add_argument(
        "--budget", type=float, default=540.0, metavar="SECONDS", help="default: 540"
    )
    command.add_argument(
        "--workers",
        type=one_or_more,
        default=len(os.sched_getaffinity(0)),
        help="processes for the models; default: the cores",
    )
    return command
