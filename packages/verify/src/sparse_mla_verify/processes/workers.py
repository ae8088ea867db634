"""Work over processes of one thread each.

Every matrix product of the reference is small. A BLAS library that spreads each over all cores
takes twice as long, and where every core has a process already, several times as long.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

Result = TypeVar("Result")

# What OpenBLAS, MKL and OpenMP read when they are loaded.
THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Processes that start meanwhile have BLAS of one thread, but where the user set a number."""
    added = [name for name in THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


_kept: list[ProcessPoolExecutor] = []


@contextmanager
def kept(workers: int | None = None) -> Iterator[None]:
    """Meanwhile `spread` goes to one set of processes: each imports what it needs but once."""
    count = workers or os.cpu_count() or 1
    if count <= 1:
        yield
        return
    with one_thread_each(), processes(count) as pool:
        _kept.append(pool)
        try:
            yield
        finally:
            _kept.pop()


def processes(count: int) -> ProcessPoolExecutor:
    """Processes that end with this one, however it ends.

    Spawned, not forked: this one may hold threads and a CUDA context.
    """
    return ProcessPoolExecutor(count, get_context("spawn"), initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Left alone, a process of a pool would wait for work for ever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def spread(
    function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]], workers: int | None
) -> Iterator[tuple[int, Result]]:
    """Call `function` with each task's arguments over processes (all cores unless said).

    Yields each task's number and result as they are done. With one worker, or one task, all is done
    in this process. What goes to a process and comes back has to be picklable.
    """
    count = min(workers or os.cpu_count() or 1, len(tasks))
    if count <= 1:
        yield from ((k, function(*task)) for k, task in enumerate(tasks))
        return
    if _kept:
        yield from _done(_kept[-1], function, tasks)
        return
    with one_thread_each(), processes(count) as pool:
        yield from _done(pool, function, tasks)


def _done(
    pool: ProcessPoolExecutor, function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, Result]]:
    futures = {pool.submit(function, *task): k for k, task in enumerate(tasks)}
    for future in as_completed(futures):
        yield futures.pop(future), future.result()
