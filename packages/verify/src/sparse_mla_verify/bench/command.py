"""The benchmark command.

    sparse-mla-audit bench                       # run, the whole grid
    sparse-mla-audit bench --quick               # run, a few points
    sparse-mla-audit bench --points 5x96x256     # run, the points named alone
    sparse-mla-audit bench table FILE            # a run's table and plot again
    sparse-mla-audit bench table FILE --plot SVG --into PAGE    # and on a page
    sparse-mla-audit bench policy FILE --max-keys 2048 [--into MODULE]
    sparse-mla-audit bench stages [--out FILE]   # where a launch's time goes, on the GPU
    sparse-mla-audit bench stages FILE [--into PAGE]         # a run's tables again

Exit status of a run: 0; 1 when an implementation failed or computes something else; 2 without a
GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from sparse_mla_verify.bench import (
    bench_report,
    page,
    policy_tables,
    stages,
)
from sparse_mla_verify.bench.grid import FULL, QUICK, QUICK_WIDE, TRIALS, WIDE, WIDTH, parse_points
from sparse_mla_verify.bench.results import FLASHMLA, load
from sparse_mla_verify.gpu_runs.present import lacks_gpu
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.terminal.options import COMMAND, one_or_more, parser, positive, whole
from sparse_mla_verify.terminal.page_figures import between_marks

NAME = "bench"
_PLAIN_WIDTH = 160  # of a table that goes to a file or a pipe
_PRIVATE = (
    "--out",
    "--plot",
    "--flashmla",
    "--bench",
    "--into",
)  # options whose values are paths on a computer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status. `run` is the one when none is named."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in (*_COMMANDS, "-h", "--help"):
        given.insert(0, "run")
    options = _parser().parse_args(given)
    options.said = said(given)
    command: Callable[[argparse.Namespace], int] = _COMMANDS[options.command]
    return command(options)


def _parser() -> argparse.ArgumentParser:
    bench = parser(NAME, __doc__)
    commands = bench.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="time everything on the GPU (the default)")
    which = run.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help=f"{len(QUICK)} points of {len(FULL)}")
    which.add_argument(
        "--points",
        type=_points,
        metavar="5x96x0,...",
        help="these points alone, without wide lists and host times",
    )
    run.add_argument("--budget", type=positive, help="seconds; starts no point that passes them")
    run.add_argument("--out", type=Path, default=Path("bench_latency.json"), help="the JSON")
    run.add_argument("--plot", type=Path, help="PNG or SVG; beside the JSON if left out")
    run.add_argument(
        "--flashmla", type=Path, help="folder of FlashMLA ($FLASHMLA_DIR, else vLLM's if left out)"
    )
    run.add_argument(
        "--schedule",
        action="append",
        default=[],
        metavar="split=8,...",
        help="time our kernel with this schedule as well; may be given several times",
    )
    run.add_argument("--cache", choices=("cold", "warm"), default="cold", help="the L2")
    run.add_argument(
        "--width", type=_width, default=WIDTH, help="row ids that a list of ours holds"
    )
    run.add_argument("--trials", type=one_or_more, default=TRIALS, help="of a point")
    table = commands.add_parser("table", help="print a run's table; plot it")
    table.add_argument("file", type=Path)
    table.add_argument("--plot", type=Path, help="PNG or SVG")
    table.add_argument("--into", type=Path, help="write it between the marks of this page as well")
    tables = commands.add_parser("policy", help="the policy tables that follow from a run")
    tables.add_argument("file", type=Path)
    tables.add_argument("--max-keys", type=int, required=True, help="keys that count, at most")
    tables.add_argument("--peer", default=FLASHMLA, help="what ours must beat")
    tables.add_argument(
        "--into",
        type=Path,
        help="write them between the marks of this module (sparse_mla_kernel/policy.py), and the "
        "times of ours in the run's JSON by them",
    )
    staged = commands.add_parser("stages", help="where a launch's time goes, stage by stage")
    staged.add_argument("file", type=Path, nargs="?", help="a run's JSON; runs on the GPU if none")
    staged.add_argument("--out", type=Path, default=Path("stages.json"), help="a new run's JSON")
    staged.add_argument("--into", type=Path, help="write between the marks of this page as well")
    staged.add_argument(
        "--bench",
        type=Path,
        default=stages.shipped().with_name("bench_latency.json"),
        help="the benchmark's JSON, of what a launch takes (the one that ships if left out)",
    )
    return bench


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def _points(text: str) -> tuple[Point, ...]:
    try:
        return parse_points(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _width(text: str) -> int:
    width = whole(text)
    if width < WIDTH:
        raise argparse.ArgumentTypeError(f"must be {WIDTH} or more, got {text}")
    return width


def said(given: Sequence[str]) -> str:
    """The command as a record has it: no paths on a computer."""
    kept: list[str] = []
    skip = False
    for word in given:
        if not skip and word.partition("=")[0] not in _PRIVATE:
            kept.append(word)
        skip = not skip and word in _PRIVATE
    return f"{COMMAND} {NAME} {shlex.join(kept)}"


def _run(options: argparse.Namespace) -> int:
    console = _console()
    if lacks_gpu(NAME):
        return 2
    from sparse_mla_verify.bench import whole_run

    began = time.perf_counter()
    folder = options.flashmla or (Path(p) if (p := os.environ.get("FLASHMLA_DIR")) else None)
    try:
        bench = whole_run.on_gpu(options, folder, console)
    except ValueError as error:  # of --schedule
        console.print(str(error), style="red", markup=False)
        return 2
    points, wide = (QUICK, QUICK_WIDE) if options.quick else (FULL, WIDE)
    if options.points:
        points, wide = options.points, ()
    about = {"compiled": whole_run.compiled(bench, points, wide, console)}
    host = not options.points
    run = whole_run.run(bench, points, wide, options, began, console, host=host, about=about)
    bench_report.print_report(console, run)
    plot = options.plot or options.out.with_suffix(".svg")
    files = [str(options.out)]
    try:
        bench_report.write_plot(plot, run)
        files.append(str(plot))
    except ValueError as error:  # too few points for one
        console.print(f"no plot: {error}", markup=False, highlight=False)
    console.print(f"written: {', '.join(files)}", markup=False, highlight=False)
    return whole_run.close(run, console)


def _table(options: argparse.Namespace) -> int:
    try:
        run = load(options.file)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    bench_report.print_report(_console(), run)
    if options.plot:
        bench_report.write_plot(options.plot, run)
    if options.into:
        figure = options.plot and Path(os.path.relpath(options.plot, options.into.parent))
        text = between_marks(options.into.read_text(), page.markdown(run, figure))
        options.into.write_text(text)
    return 0


def _policy(options: argparse.Namespace) -> int:
    try:
        text, chosen = policy_tables.code(
            load(options.file), max_keys=options.max_keys, peer=options.peer
        )
        if options.into:
            options.into.write_text(policy_tables.put_into(options.into.read_text(), text))
            chosen.save(options.file)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text, end="")
    return 0


def _stages(options: argparse.Namespace) -> int:
    if options.file is None and (status := stages.run(options.out, options.said)):
        return status
    try:
        text = stages.markdown(options.file or options.out, load(options.bench))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text, end="")
    if options.into:
        options.into.write_text(between_marks(options.into.read_text(), text))
    return 0


_COMMANDS = {"run": _run, "table": _table, "policy": _policy, "stages": _stages}
