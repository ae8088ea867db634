"""Timing: a CUDA graph of many launches for GPU time, a clock for host time.

What needs a GPU is `GraphTimer`; the rest takes any replay that says how long it took.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from sparse_mla_verify.bench.grid import TRIALS
from sparse_mla_verify.bench.results import Spread
from sparse_mla_verify.peers.implementation import Call

Replay = Callable[[], float]  # runs a graph once; microseconds a launch

WARMUP = 3  # trials that don't count, at least
WARMUP_SECONDS = 0.05  # and as long: clocks fall while a kernel is compiled
LEAST_TRIALS = 9  # however long they take
POINT_SECONDS = 0.3  # after which no further trial of a point starts
EVICT_BYTES = 2**28  # read before a trial: four times an L2 of 60 MB


class Timer(Protocol):
    """What makes replays of calls."""

    def capture(self, calls: Sequence[Call]) -> Replay:
        """Run the calls once, then capture them."""


class GraphTimer:
    """Replays CUDA graphs on a stream of its own, with a cold or a warm L2.

    Cold: before each replay a buffer larger than the L2 is read (not written: dirty lines would
    have to go out under the timed launches). It also keeps the GPU busy until the graph has been
    submitted, so that the clock doesn't run while the host submits. Warm: the graph itself runs
    just before; what its input sets exceed the L2 by is cold all the same.
    """

    def __init__(self, device: torch.device | str, *, warm: bool = False) -> None:
        self.stream = torch.cuda.Stream(device)
        self.warm = warm
        self._evict = torch.zeros(EVICT_BYTES // 4, dtype=torch.float32, device=device)
        self._sink = torch.empty((), dtype=torch.float32, device=device)
        torch.cuda.synchronize(device)

    def capture(self, calls: Sequence[Call]) -> Replay:
        """Run the calls once, then capture them in one graph."""
        torch.cuda.synchronize()  # the inputs were made on another stream
        # Not torch.cuda.graph: it empties the allocator's cache at each capture.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
            self.stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        return functools.partial(self._replay, graph, len(calls))

    def _replay(self, graph: torch.cuda.CUDAGraph, launches: int) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.warm:
                graph.replay()
            else:
                torch.amax(self._evict, dim=0, out=self._sink)
            start.record()
            graph.replay()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / launches


def interleave(
    replays: Mapping[str, Replay],
    *,
    trials: int = TRIALS,
    seconds: float = POINT_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Trials of all replays in turn; each trial starts with another one than the last.

    After the warm-up come `trials`; fewer, but at least `LEAST_TRIALS`, when they take longer than
    `seconds`.
    """
    names = list(replays)
    samples: dict[str, list[float]] = {name: [] for name in names}
    if not names:
        return samples
    began = clock()
    warm = 0
    while warm < WARMUP or clock() - began < WARMUP_SECONDS:
        for replay in replays.values():
            replay()
        warm += 1
    began = clock()
    for trial in range(trials):
        if trial >= LEAST_TRIALS and clock() - began > seconds:
            break
        turn = trial % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(replays[name]())
    return samples


def host_time(
    call: Call,
    *,
    calls: int = 100,
    batches: int = 21,
    synchronize: Callable[[], None] = torch.cuda.synchronize,
    clock: Callable[[], float] = time.perf_counter,
) -> Spread:
    """Host time of one eager call, from batches of calls that the host doesn't wait for.

    The calls' launches must take the GPU less time than the host, or their queue must hold a batch.
    """
    for _ in range(calls):
        call()
    samples = []
    for _ in range(batches):
        synchronize()
        began = clock()
        for _ in range(calls):
            call()
        samples.append((clock() - began) * 1e6 / calls)
    synchronize()
    return Spread.of(samples)
