"""`python -m sparse_mla_verify.hardware`: compare the models with the GPU."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table

from sparse_mla_verify.hardware.comparison import Device, Session
from sparse_mla_verify.hardware.record import (
    GPU,
    GROUPS,
    Record,
    names_of,
    shortcomings,
)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def start(self, part: str, total: int) -> None:
        self._tasks[part] = self._bars.add_task(part, total=total)

    def advance(self, part: str) -> None:
        self._bars.advance(self._tasks[part])


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 when everything was compared and agrees, 1 on a mismatch, 2 when incomplete."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        from sparse_mla_verify.hardware.device import CudaDevice

        device = CudaDevice()
    except (ImportError, RuntimeError, AssertionError) as error:
        console.print(f"needs an sm_90 GPU, PyTorch with CUDA and the DSL: {error}", markup=False)
        return 2
    record = _run(options, device, console)
    console.print(_table(record))
    wrong = shortcomings(record, options.only)
    for line in wrong:
        console.print(line, markup=False, highlight=False)
    console.print(f"{record.seconds:.0f} s; recording: {options.out}", markup=False)
    if any(compared.mismatches for compared in record.compared):
        return 1
    return 2 if wrong else 0


def _run(options: argparse.Namespace, device: Device, console: Console) -> Record:
    columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=console) as bars:
        session = Session(
            device, names_of(options.only), _Bars(bars), options.workers, options.budget
        )
        record = Record(GPU, _command(), device.host(), options.workers, 0.0, ())
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


def _command() -> str:
    return "python -m sparse_mla_verify.hardware " + shlex.join(sys.argv[1:])


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
            raise argparse.ArgumentTypeError(f"{group!r}: may be {', '.join(GROUPS)}")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_mla_verify.hardware",
        description="Compare the reference's models with a Hopper GPU, all inputs where possible.",
    )
    parser.add_argument("--out", type=Path, required=True, help="the recording, JSON")
    parser.add_argument(
        "--only", type=_groups, default=GROUPS, metavar="GROUP,...", help=", ".join(GROUPS)
    )
    parser.add_argument(
        "--budget", type=float, default=540.0, metavar="SECONDS", help="default: 540"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes for the models; default: the cores",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
