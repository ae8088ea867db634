import itertools
from functools import partial

import pytest

from sparse_mla_verify.bench import (
    timing,
)
from sparse_mla_verify.bench.timing import host_time, interleave


def test_trials_take_turns_and_warm_up_does_not_count(fake_clock):
    order = []

    def replay(name):
        order.append(name)
        return float(len(order))

    replays = {name: partial(replay, name) for name in ("a", "b", "c")}
    samples = interleave(replays, trials=4, clock=fake_clock(1.0))
    assert {n: len(s) for n, s in samples.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = ["".join(order[k : k + 3]) for k in range(0, len(order), 3)]
    assert rounds == ["abc", "abc", "abc", "abc", "bca", "cab", "abc"]
    assert samples["a"][0] == 3 * timing.WARMUP + 1


def test_warm_up_lasts_until_the_clocks_have_risen(fake_clock):
    calls = itertools.count()
    interleave({"a": lambda: float(next(calls))}, trials=1, clock=fake_clock(2**-6))
    # Three rounds, three more until 4 / 64 s have passed, and the trial.
    assert next(calls) == 3 + 3 + 1


def test_slow_points_get_fewer_trials_but_some(fake_clock):
    calls = {"a": lambda: 1.0}
    assert len(interleave(calls, trials=25, seconds=0.5, clock=fake_clock(10))["a"]) == (
        timing.LEAST_TRIALS
    )
    assert len(interleave(calls, trials=5, seconds=0.5, clock=fake_clock(10))["a"]) == 5
    assert interleave({}, trials=5) == {}


def test_host_time_is_per_call_and_does_not_count_the_warm_up(fake_clock):
    clock = fake_clock()
    calls: list[None] = []

    def call():
        calls.append(None)
        clock.now += 2.0 if len(calls) <= 10 else 5e-6

    def synchronize():
        clock.now += 1.0

    spread = host_time(call, calls=10, batches=3, synchronize=synchronize, clock=clock)
    assert len(calls) == 40
    assert spread.median == pytest.approx(5.0)
    assert spread.high == pytest.approx(5.0)
