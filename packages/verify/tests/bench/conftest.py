"""What several files of the benchmark's tests build: runs, benches, clocks and timers."""

from collections.abc import Iterator

import pytest

from sparse_mla_verify.bench.grid import (
    FULL,
)
from sparse_mla_verify.bench.results import (
    Result,
    Run,
)
from sparse_mla_verify.bench.timed_points import Bench
from sparse_mla_verify.peers.workload import (
    Pool,
)

WIDTH = 64


class Clock:
    """Time that passes by so much a look."""

    def __init__(self, step=0.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


class FakeTimer:
    """Replays that run the calls, and take the times of a script by turns."""

    def __init__(self, script=(1.0, 2.0, 3.0)):
        self.script = script

    def capture(self, calls):
        taken: Iterator[float] = iter(())

        def replay():
            nonlocal taken
            for call in calls:
                call()
            time = next(taken, None)
            if time is None:
                taken = iter(self.script)
                time = next(taken)
            return time

        return replay


@pytest.fixture(scope="module")
def pool():
    return Pool("cpu", rows=1024)


def bench_of(pool, *implementations, timer=None, trials=3):
    return Bench(
        pool=pool,
        implementations=implementations,
        timer=timer or FakeTimer(),
        width=WIDTH,
        sm_mhz=lambda: 1980,
        sets=2,
        trials=trials,
    )


def result_of(point, **times):
    spread = {name: (time - 0.1, time + 0.1) for name, time in times.items()}
    return Result(point, 2048, times, spread, 25, {"base": 0.02}, 1980, {"ours": "low-latency"})


def grid_run(ours=0.5, flashmla=1.0, points=FULL, wins=lambda point: True):
    results = [
        result_of(p, ours=ours if wins(p) else 2 * flashmla, base=1.0, flashmla=flashmla, floor=0.1)
        for p in points
    ]
    about = {"gpu": "a GPU", "driver": "1", "date": "2000-01-01"}
    return Run(about, results)


def schedules_run(times, points=FULL, flashmla=1.0):
    """A run in which a point's times are what a function says."""
    results = [result_of(p, flashmla=flashmla, **times(p)) for p in points]
    return Run({"gpu": "a GPU", "driver": "1", "date": "2000-01-01"}, results)


def flat(**times):
    """The same times everywhere; a blank in a name is a hyphen."""
    return lambda point: {name.replace("_", "-"): time for name, time in times.items()}


@pytest.fixture(scope="session", name="fake_clock")
def _fake_clock():
    return Clock


@pytest.fixture(scope="session", name="fake_timer")
def _fake_timer():
    return FakeTimer


@pytest.fixture(scope="session", name="bench_of")
def _bench_of():
    return bench_of


@pytest.fixture(scope="session", name="result_of")
def _result_of():
    return result_of


@pytest.fixture(scope="session", name="grid_run")
def _grid_run():
    return grid_run


@pytest.fixture(scope="session", name="schedules_run")
def _schedules_run():
    return schedules_run


@pytest.fixture(scope="session", name="flat")
def _flat():
    return flat
