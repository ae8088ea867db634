"""Compiling what a run times, before it is timed: many kernels at once, into the disk cache."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from sparse_mla_kernel import Schedule, precompile_sparse
from sparse_mla_kernel.host import cache
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.processes.workers import spread

Shape = tuple[int, int, int]  # rows, heads, width


def shapes(points: Iterable[Point], wide: Iterable[Point], width: int) -> list[Shape]:
    """The kernels' shapes: lists of the one width, but where narrow ones are timed as well."""
    needed = [(point.rows, point.heads, width) for point in points]
    for point in wide:
        needed += [(point.rows, point.heads, width), (point.rows, point.heads, point.keys)]
    return list(dict.fromkeys(needed))


def compile_all(
    needed: Iterable[Shape],
    schedules: Mapping[str, Schedule],
    arch: str,
    console: Console,
    *,
    workers: int | None = None,
) -> dict[str, Any]:
    """Compile every shape by every schedule, a process a core; what was done, for the record.

    A kernel that does not compile is said and left to fail again where it is timed.
    """
    if cache.folder() is None:
        console.print("the cache is off: kernels are compiled one by one, as they are timed")
        return {"kernels": 0}
    # FP16 schedules take longest: the short ones fill up the end.
    slow_first = sorted(schedules, key=lambda name: schedules[name].mma != "f16")
    tasks = [(*shape, arch, schedules[name]) for name in slow_first for shape in needed]
    began = time.perf_counter()
    failed = 0
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("", total=len(tasks))
        for k, error in spread(_compile, tasks, workers):
            bars.advance(bar)
            if error is not None:
                failed += 1
                *sizes, _, schedule = tasks[k]
                line = f"{' x '.join(map(str, sizes))}, {schedule}: {error}"
                console.print(line, style="red", markup=False, highlight=False)
    return {
        "kernels": len(tasks),
        "failed": failed,
        "processes": min(workers or os.cpu_count() or 1, len(tasks)),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _compile(rows: int, heads: int, width: int, arch: str, schedule: Schedule) -> str | None:
    """Compile one; None, or why it is not in the cache."""
    compile_one = functools.partial(precompile_sparse, rows, heads, heads, width, rows, arch)
    try:
        return None if compile_one(schedule=schedule) else "the cache has not kept it"
    except Exception as error:  # one kernel's must not end the others
        return (str(error) or type(error).__name__).splitlines()[0]
