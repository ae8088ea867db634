"""A run from its options to its JSON."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from sparse_mla_kernel import BASE, schedule_for, sparse_decode
from sparse_mla_kernel.checks import architecture_of
from sparse_mla_verify.bench import gpu_state, timing
from sparse_mla_verify.bench.grid import HOST_POINT, ordered
from sparse_mla_verify.bench.policy_tables import chosen_by
from sparse_mla_verify.bench.precompile import compile_all, shapes
from sparse_mla_verify.bench.results import (
    HOST,
    SCHEDULES,
    Result,
    Run,
)
from sparse_mla_verify.bench.timed_points import Bench, disagreeing
from sparse_mla_verify.gpu_runs import gpu
from sparse_mla_verify.inputs.schedules import kernel_schedule
from sparse_mla_verify.peers import flashmla, floor
from sparse_mla_verify.peers.implementation import Call, Implementation
from sparse_mla_verify.peers.ours import Sparse, parse_schedule
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.peers.pytorch import PyTorch
from sparse_mla_verify.peers.workload import SETS, Pool, workload

COLD = (
    "each replay of a graph follows a read of 256 MiB, and its launches have inputs and outputs of "
    "their own: none of their data is in the L2"
)
WARM = (
    "each replay of a graph follows another of the same graph: the L2 has what fits of its "
    "launches' inputs and outputs, which are each launch's own"
)


def on_gpu(options: argparse.Namespace, folder: Path | None, console: Console) -> Bench:
    """The benchmark of this GPU; says what it compares."""
    device = torch.device("cuda", torch.cuda.current_device())
    peer, found = flashmla.find(folder)
    console.print(f"FlashMLA: {found}", markup=False, highlight=False)
    implementations: list[Implementation] = [
        *(Sparse(name, kernel_schedule(name)) for name in SCHEDULES),
        *(Sparse(text, parse_schedule(text)) for text in options.schedule),
        *([peer] if peer else []),
        PyTorch(),
        floor.Floor(device, BASE.split),
    ]
    timer = timing.GraphTimer(device, warm=options.cache == "warm")
    return Bench(
        pool=Pool(device),
        implementations=implementations,
        timer=timer,
        width=options.width,
        sm_mhz=gpu_state.sm_mhz,
        sets=SETS,
        pick=chosen_by(None),
        trials=options.trials,
    )


def compiled(
    bench: Bench, points: Sequence[Point], wide: Sequence[Point], console: Console
) -> dict[str, Any]:
    """Compile what the points need, into the disk cache; what was done, for the record."""
    schedules = {i.name: i.schedule for i in bench.implementations if isinstance(i, Sparse)}
    arch = architecture_of(bench.pool.device)
    return compile_all(shapes(points, wide, bench.width), schedules, arch, console)


def run(
    bench: Bench,
    points: Sequence[Point],
    wide: Sequence[Point],
    options: argparse.Namespace,
    began: float,
    console: Console,
    *,
    host: bool = True,
    about: Mapping[str, Any] | None = None,
) -> Run:
    """Measure, and write the JSON: also of what was measured before an error or an interrupt.

    `host` says whether host times are taken, `about` what else the JSON is to say.
    """
    results: list[Result] = []
    wides: list[Result] = []
    hosts: dict[str, Any] = {}
    todo = ordered(points)
    done: list[Point] = []

    def now() -> Run:
        said = about_run(bench, options, time.perf_counter() - began) | dict(about or {})
        left_out = [point for point in todo if point not in done]
        found = Run(said, results, wides, hosts, left_out)
        return found.with_ours(bench.pick) if bench.pick else found

    try:
        if host:
            hosts.update(host_times(bench))
        columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, Elapsed(), console=console) as bars:
            task = bars.add_task("", total=len(todo) + len(wide))
            measure = Budget(options.budget, began)
            for point in wide:
                bars.update(task, description=f"{point} wide")
                measure(functools.partial(bench.wide, point), wides.append)
                bars.advance(task)
            for point in todo:
                bars.update(task, description=str(point))
                if measure(functools.partial(bench.point, point), results.append):
                    done.append(point)
                bars.advance(task)
    finally:
        now().save(options.out)
    return now()


class Budget:
    """Measures points until one more would pass a budget of seconds; None is no limit."""

    def __init__(
        self,
        seconds: float | None,
        began: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds = seconds
        self.began = began
        self.clock = clock
        self._longest = 0.0

    def __call__(self, measure: Callable[[], Result], keep: Callable[[Result], None]) -> bool:
        """Measure and keep, if one as long as the longest so far fits; whether it did."""
        start = self.clock()
        if self.seconds is not None and start - self.began + self._longest > self.seconds:
            return False
        keep(measure())
        self._longest = max(self._longest, self.clock() - start)
        return True


def host_times(bench: Bench) -> dict[str, dict[str, float]]:
    """Host time of one eager call, by function and schedule, at 5 x 96 x 16."""
    work = workload(bench.pool, HOST_POINT, bench.width, sets=1)
    calls: dict[str, Call] = {}
    for each in bench.implementations:
        if isinstance(each, Sparse):
            calls[f"{HOST} {each.name}"] = each.prepare(work).calls[0]
        if isinstance(each, flashmla.FlashMLA):
            calls[each.interface.flash_mla_with_kvcache.__name__] = each.prepare(work).calls[0]
    calls[sparse_decode.__name__] = functools.partial(
        sparse_decode,
        work.query[0],
        work.pool.kv,
        work.rows[0],
        work.valid,
        scale_log2=work.scale_log2,
        out_scale=work.out_scale,
        schedule=schedule_for(HOST_POINT.rows, HOST_POINT.heads),
    )
    return {name: dataclasses.asdict(timing.host_time(call)) for name, call in calls.items()}


def about_run(bench: Bench, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The GPU, the code and the method."""
    ours = {i.name: i for i in bench.implementations if isinstance(i, Sparse)}
    peers = [i for i in bench.implementations if isinstance(i, flashmla.FlashMLA)]
    host = dataclasses.asdict(gpu.host())
    return {
        "gpu": host["gpu"],
        "driver": host["driver"],
        "date": host["date"],
        "command": options.said,
        "seconds": round(seconds, 1),
        "schedules": {name: dataclasses.asdict(i.schedule) for name, i in ours.items()},
        "machine_code": {name: dict(i.machine_code) for name, i in ours.items()},
        "versions": {**host, "flashmla": peers[0].source if peers else None},
        "clocks": gpu_state.query(gpu_state.FIELDS, gpu_state.own_gpu()),
        "method": about_method(bench, options.cache),
    }


def about_method(bench: Bench, cache: str) -> dict[str, Any]:
    """How the figures were taken."""
    return {
        "time": "median over trials of a CUDA graph's time per launch; spread: 10th, 90th "
        "percentile; implementations in turn within each trial",
        "ours": "no runs of its own: at each point the times of the schedule that the policy picks "
        "for its rows and heads, named in the point's notes",
        "launches": bench.sets,
        "trials": bench.trials,
        "warmup": f"{timing.WARMUP} trials and {timing.WARMUP_SECONDS} s at least, each point",
        "pool_rows": len(bench.pool.kv),
        "cache": COLD if cache == "cold" else WARM,
        "width": f"our lists hold {bench.width} ids at every point, -1 past the keys",
        "flashmla": (flashmla.__doc__ or "").strip(),
        "floor": (floor.__doc__ or "").strip(),
        "relative_error": "norm of the difference from a float64 decode over its norm, of the "
        "first and the last launch of a graph",
        "host_us": f"one eager call at {HOST_POINT}, from 21 batches of 100 calls",
    }


def close(run: Run, console: Console) -> int:
    """Say where an implementation computes something else or failed; the exit status."""
    wrong = disagreeing([*run.results, *run.wide])
    for line in wrong:
        console.print(line, style="red", markup=False, highlight=False)
    return 1 if wrong else 0
