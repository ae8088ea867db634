import argparse
import itertools
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import sparse_mla_kernel.host.policy as kernel_policy
from sparse_mla_kernel import BASE, parse_schedules, parse_table
from sparse_mla_kernel.host import cache
from sparse_mla_verify.audit.collect import cross_compiled, dsl_version
from sparse_mla_verify.bench import (
    bench_report,
    command,
    gpu_state,
    grid,
    page,
    policy_tables,
    precompile,
    summary,
    timing,
    whole_run,
)
from sparse_mla_verify.bench.grid import (
    CHECKPOINT,
    FULL,
    QUICK,
    QUICK_WIDE,
    WIDE,
    ordered,
    parse_points,
)
from sparse_mla_verify.bench.results import (
    SCHEDULES,
    Result,
    Run,
    Spread,
    load,
)
from sparse_mla_verify.bench.timed_points import Bench, disagreeing, relative_error
from sparse_mla_verify.bench.timing import host_time, interleave
from sparse_mla_verify.evidence.recordings import Host
from sparse_mla_verify.gpu_runs import gpu
from sparse_mla_verify.inputs.cases import Signature
from sparse_mla_verify.inputs.schedules import kernel_schedule
from sparse_mla_verify.peers import ours, pytorch
from sparse_mla_verify.peers.implementation import Prepared
from sparse_mla_verify.peers.ours import Sparse
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.peers.pytorch import PyTorch
from sparse_mla_verify.peers.workload import (
    POOL_ROWS,
    SETS,
    Pool,
    workload,
)
from sparse_mla_verify.terminal.page_figures import MARKS, between_marks

WIDTH = 64
ROOT = Path(__file__).parents[4]
SHIPPED = Path(command.__file__).parents[1] / "data" / "bench_latency.json"


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


class Decoder:
    """An implementation in BF16, with a fault."""

    def __init__(self, name, fault=lambda latent: None):
        self.name, self.fault = name, fault

    def prepare(self, work):
        prepared = PyTorch().prepare(work)
        assert prepared.latent is not None
        latent = prepared.latent

        def call(k):
            prepared.calls[k]()
            self.fault(latent[k])

        calls = [lambda k=k: call(k) for k in range(len(prepared.calls))]
        return Prepared(calls, prepared.latent, {"name": self.name})


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


# The grid and the inputs


def test_the_grid():
    assert len(FULL) == len(set(FULL)) == 8 * 4 * 8
    assert set(QUICK) | set(WIDE) | {CHECKPOINT} <= set(FULL)
    assert len(QUICK) == 11
    assert set(QUICK_WIDE) <= set(WIDE)
    assert max(point.keys for point in FULL) == grid.WIDTH
    assert SETS * max(p.rows * p.keys for p in FULL) == POOL_ROWS


def test_a_short_budget_keeps_the_quick_points():
    assert ordered(FULL)[: len(QUICK)] == QUICK
    assert sorted(ordered(FULL)) == sorted(FULL)
    assert ordered([Point(1, 16, 0), CHECKPOINT]) == (CHECKPOINT, Point(1, 16, 0))


def test_no_graph_reads_a_row_twice(pool):
    ids = pool.ids(4, 4, 64)
    assert ids.shape == (4, 4, 64)
    assert len(ids.unique()) == 1024
    assert pool.ids(2, 16, 64).shape == (2, 16, 64)  # more than there are: again from the start
    assert pool.ids(2, 3, 0).shape == (2, 3, 0)


def test_inputs_are_distinct_sets_of_finite_values(pool):
    assert not bool((pool.kv & 0x7F == 0x7F).any())
    work = workload(pool, Point(3, 16, 8), WIDTH, sets=4)
    assert work.query.shape == (4, 3, 16, 576)
    assert work.rows.shape == (4, 3, WIDTH)
    assert bool((work.rows[..., 8:] == -1).all())
    assert work.valid.tolist() == [8, 8, 8]
    assert not torch.equal(work.query[0], work.query[1])
    again = workload(Pool("cpu", rows=1024), Point(3, 16, 8), WIDTH, sets=4)
    assert torch.equal(again.query, work.query)
    assert torch.equal(again.rows, work.rows)
    wide = work.widened(80, 70)
    assert (wide.width, wide.peer_width, wide.rows[0, 0, 7]) == (80, 70, work.ids[0, 0, 7])


def test_points_are_read_from_text():
    assert parse_points("5x96x0, 5x96x256,5x96x0") == (Point(5, 96, 0), CHECKPOINT)
    for text in ("5x96", "5x96xa", "0x96x1", "1x24x1", "1x0x1", "1x96x-1", "1x96x\u00b2"):
        with pytest.raises(ValueError, match="points has"):
            parse_points(text)
    with pytest.raises(ValueError, match="points is empty"):
        parse_points(",")


# Timing


def test_trials_take_turns_and_warm_up_does_not_count():
    order = []

    def replay(name):
        order.append(name)
        return float(len(order))

    replays = {name: partial(replay, name) for name in ("a", "b", "c")}
    samples = interleave(replays, trials=4, clock=Clock(1.0))
    assert {n: len(s) for n, s in samples.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = ["".join(order[k : k + 3]) for k in range(0, len(order), 3)]
    assert rounds == ["abc", "abc", "abc", "abc", "bca", "cab", "abc"]
    assert samples["a"][0] == 3 * timing.WARMUP + 1


def test_warm_up_lasts_until_the_clocks_have_risen():
    calls = itertools.count()
    interleave({"a": lambda: float(next(calls))}, trials=1, clock=Clock(2**-6))
    # Three rounds, three more until 4 / 64 s have passed, and the trial.
    assert next(calls) == 3 + 3 + 1


def test_slow_points_get_fewer_trials_but_some():
    calls = {"a": lambda: 1.0}
    assert len(interleave(calls, trials=25, seconds=0.5, clock=Clock(10))["a"]) == (
        timing.LEAST_TRIALS
    )
    assert len(interleave(calls, trials=5, seconds=0.5, clock=Clock(10))["a"]) == 5
    assert interleave({}, trials=5) == {}


def test_spread():
    spread = Spread.of([float(k) for k in range(11, 0, -1)])
    assert (spread.median, spread.low, spread.high) == (6.0, 2.0, 10.0)


def test_host_time_is_per_call_and_does_not_count_the_warm_up():
    clock = Clock()
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


# Points


def test_a_point_is_checked_and_timed(pool):
    result = bench_of(pool, Decoder("ours"), Decoder("base")).point(Point(2, 16, 40))
    # Three times in turn, from whichever the warm-up left.
    assert result.times_us == {"ours": 2.0, "base": 2.0}
    assert result.spread_us["ours"] == pytest.approx((1.2, 2.8))
    assert result.trials == 3
    assert set(result.relative_error) == {"ours", "base"}
    assert max(result.relative_error.values()) < 0.01
    assert result.notes == {"name": "ours"}
    assert (result.width, result.sm_mhz, result.failed) == (WIDTH, 1980, {})
    assert disagreeing([result]) == []


def test_what_a_graph_reads_outlives_its_replays(pool):
    """A CUDA graph holds addresses alone: what is freed is used anew under it."""
    held, alive = [], []

    class Holder:
        def __init__(self, name):
            self.name = name

        def prepare(self, work):
            tensor = torch.zeros(1)
            held.append(weakref.ref(tensor))
            return Prepared([tensor.sum])

    class Graphs:
        def capture(self, calls):
            def replay():
                alive.append([ref() is not None for ref in held])
                return 1.0

            return replay

    bench_of(pool, Holder("a"), Holder("b"), timer=Graphs()).point(Point(1, 16, 2))
    assert len(alive) > 2
    assert alive.count([True, True]) == len(alive)
    assert [ref() for ref in held] == [None, None]


def test_ours_is_the_schedule_that_is_picked(pool):
    bench = bench_of(pool, Decoder("base"), Decoder("low-latency"), Decoder("low-latency-4"))
    bench.pick = lambda rows, heads: "low-latency" if (rows, heads) == (2, 16) else "other"
    bench.timer = FakeTimer(iter([float(k) for k in range(1000)]))
    result = bench.point(Point(2, 16, 40))
    assert list(result.times_us) == ["ours", "base", "low-latency", "low-latency-4"]
    assert result.times_us["ours"] == result.times_us["low-latency"]
    assert len(set(result.times_us.values())) == 3
    assert result.spread_us["ours"] == result.spread_us["low-latency"]
    assert result.notes["ours"] == "low-latency"
    assert "ours" not in bench.point(Point(3, 16, 40)).times_us


def test_another_choice_replaces_ours():
    result = result_of(
        Point(1, 16, 0), ours=9.0, ours_wide=9.0, base=1.0, base_wide=2.0, baseline=3.0
    )
    host = {"run_sparse": 1.0, "run_sparse base": 2.0, "run_sparse low-latency": 3.0}
    run = Run({}, [result], [result], host).with_ours(lambda rows, heads: "base")
    for changed in (*run.results, *run.wide):
        assert changed.times_us == {
            "ours": 1.0, "ours_wide": 2.0, "base": 1.0, "base_wide": 2.0, "baseline": 3.0,
        }  # fmt: skip
        assert changed.notes == {"ours": "base"}
    assert run.host_us == host | {"run_sparse": 2.0}
    assert run.with_ours(lambda rows, heads: "base") == run


def test_no_keys_are_a_point_too(pool):
    result = bench_of(pool, Decoder("ours")).point(Point(2, 16, 0))
    assert result.relative_error == {"ours": 0.0}
    wrong = Decoder("ours", lambda latent: latent.fill_(0.1))
    assert disagreeing([bench_of(pool, wrong).point(Point(2, 16, 0))])


def test_what_computes_something_else_is_said(pool):
    scaled = Decoder("flashmla", lambda latent: latent.mul_(1.03))
    result = bench_of(pool, Decoder("ours"), scaled).point(Point(2, 16, 40))
    (line,) = disagreeing([result])
    assert line.startswith("2 x 16 x 40: flashmla is off by 0.0")
    assert line.endswith("bound 0.02")
    within = Decoder("ours", lambda latent: latent.mul_(1.03))  # E4M3 probabilities may
    assert disagreeing([bench_of(pool, within).point(Point(2, 16, 40))]) == []


def test_only_the_last_launch_may_be_wrong(pool):
    seen: list[None] = []

    def fault(latent):
        seen.append(None)
        if len(seen) % 2 == 0:
            latent.zero_()

    result = bench_of(pool, Decoder("ours", fault)).point(Point(2, 16, 40))
    assert result.relative_error["ours"] == pytest.approx(1.0)


def test_unwritten_outputs_are_a_failure():
    latent = torch.zeros(3, 2, 16, 512, dtype=torch.bfloat16)
    expected = torch.ones(2, 16, 512, dtype=torch.float64)

    def writes_all_but(k):
        def replay():
            latent.copy_(expected.expand_as(latent))
            latent[k, 1, 3, 7] = torch.nan
            return 1.0

        return replay

    for k in range(3):
        with pytest.raises(RuntimeError, match="unwritten"):
            relative_error(latent, writes_all_but(k), lambda k: expected)
    with pytest.raises(RuntimeError, match="unwritten"):
        relative_error(latent, lambda: 1.0, lambda k: expected)


def test_one_that_cannot_run_does_not_lose_the_others(pool):
    def prepare(work):
        raise RuntimeError("no such head count\nand more")

    broken = SimpleNamespace(name="flashmla", prepare=prepare)
    result = bench_of(pool, broken, Decoder("ours")).point(Point(2, 16, 40))
    assert result.failed == {"flashmla": "no such head count"}
    assert result.times_us == {"ours": 2.0}
    assert disagreeing([result]) == ["2 x 16 x 40: flashmla failed: no such head count"]
    alone = bench_of(pool, broken).point(Point(2, 16, 40))
    assert (alone.times_us, alone.trials) == ({}, 0)


def test_wide_lists_are_compared_with_narrow_ones(pool):
    widths: dict[str, list[tuple[int, int]]] = {}

    class Watching(Decoder):
        def prepare(self, work):
            widths.setdefault(self.name, []).append((work.width, work.peer_width))
            return super().prepare(work)

    bench = bench_of(pool, *map(Watching, ("base", "low-latency", "flashmla", "pytorch", "floor")))
    bench.pick = lambda rows, heads: "low-latency"
    result = bench.wide(Point(2, 16, 40))
    lists = [(40, 40), (WIDTH, WIDTH)]
    timed = ("base", "low-latency", "flashmla")
    assert widths == dict.fromkeys(timed, lists)
    names = [f"{name}_{which}" for name in ("ours", *timed) for which in ("narrow", "wide")]
    assert list(result.times_us) == names


# Results


def test_the_json_has_the_agreed_form(tmp_path):
    path = tmp_path / "new" / "bench_latency.json"
    wide = [result_of(CHECKPOINT, ours_narrow=8.0, ours_wide=8.1)]
    run = Run(
        {"gpu": "a GPU", "driver": "1", "machine_code": {"b5": "ab"}},
        [result_of(Point(5, 96, 512), ours=2.0), result_of(CHECKPOINT, ours=1.23456, floor=0.5)],
        wide,
        {"run_sparse": {"median": 9.0, "low": 8.0, "high": 10.0}},
        [Point(1, 16, 0)],
    )
    run.save(path)
    plain = json.loads(path.read_text())
    assert {"gpu", "driver", "machine_code", "results"} <= set(plain)
    first = plain["results"][0]
    agreed = ("rows", "heads", "keys", "ours_us", "base_us", "flashmla_us", "floor_us")
    assert [first[key] for key in agreed] == [5, 96, 256, 1.235, None, None, 0.5]
    assert first["spread_us"]["floor"] == [0.4, 0.6]
    read = load(path)
    at_checkpoint = read.at(CHECKPOINT)
    assert at_checkpoint is not None
    assert at_checkpoint.times_us == {"ours": 1.235, "floor": 0.5}
    assert read.left_out == [Point(1, 16, 0)]
    assert read.wide[0].times_us == {"ours_narrow": 8.0, "ours_wide": 8.1}
    read.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a benchmark's run"):
        load(tmp_path / "other.json")


# Targets


def figures(run):
    return {target.what: target for target in summary.targets(run, FULL)}


def test_targets_of_a_whole_run():
    run = grid_run(ours=0.3)
    mean = figures(run)["geometric mean of ours / FlashMLA"]
    assert mean.figure == pytest.approx(0.3)
    assert (mean.measured, mean.expected, mean.met) == (7 * 4 * 8 + 4 * 6, 248, True)
    assert figures(run)["5 x 96 x 256: ours / FlashMLA"].met
    behind = "points where ours is not ahead of FlashMLA"
    assert figures(run)[behind].met
    worse = grid_run(ours=0.3, wins=lambda point: point != Point(8, 128, 2048))
    assert (figures(worse)[behind].figure, figures(worse)[behind].met) == (1.0, False)
    out_of_scope = grid_run(ours=0.3, wins=lambda point: point.rows < 16 or point.keys <= 512)
    assert figures(out_of_scope)[behind].met


def test_targets_of_some_points_may_be_missed_but_not_met():
    some = grid_run(ours=0.3, points=QUICK)
    behind = "points where ours is not ahead of FlashMLA"
    assert figures(some)[behind].met is None
    worse = grid_run(ours=0.3, points=QUICK, wins=lambda point: point != Point(8, 16, 2048))
    assert figures(worse)[behind].met is False
    empty = figures(Run({}, []))
    assert [target.met for target in empty.values()] == [None] * 7


def test_targets_of_lists_and_host_time():
    wide = [
        result_of(p, ours_narrow=10.0, ours_wide=time)
        for p, time in zip(WIDE, (10.1, 10.3, 10.0, 10.0), strict=True)
    ]
    run = Run({}, [], wide, {"run_sparse": {"median": 12.5}})
    assert figures(run)["256 valid ids: list of 2048 / list of 256"].figure == pytest.approx(1.03)
    assert figures(run)["host time of run_sparse: us"].met is False


# Policy


def schedules_run(times, points=FULL, flashmla=1.0):
    """A run in which a point's times are what a function says."""
    results = [result_of(p, flashmla=flashmla, **times(p)) for p in points]
    return Run({"gpu": "a GPU", "driver": "1", "date": "2000-01-01"}, results)


def flat(**times):
    """The same times everywhere; a blank in a name is a hyphen."""
    return lambda point: {name.replace("_", "-"): time for name, time in times.items()}


def test_a_policy_follows_from_a_run():
    assert policy_tables.table_text(grid_run(), max_keys=2048) == "1-16:sparse"
    none = grid_run(wins=lambda point: False)
    assert policy_tables.table_text(none, max_keys=2048) == "1-16:split"
    # One lost point is a lost batch size, and so are the unmeasured ones on either side of it.
    text = policy_tables.table_text(grid_run(wins=lambda p: p != Point(8, 16, 512)), max_keys=2048)
    assert text == "1-6:sparse,7-15:split,16:sparse"
    assert parse_table(text)[7] == "split"
    assert (
        policy_tables.table_text(grid_run(wins=lambda p: p.keys <= 512), max_keys=512)
        == "1-16:sparse"
    )
    assert (
        policy_tables.table_text(grid_run(ours=1.0), max_keys=2048) == "1-16:split"
    )  # equal is no win


def test_a_policy_needs_the_whole_grid():
    with pytest.raises(ValueError, match="no times of ours and flashmla at 1 x 16 x 0"):
        policy_tables.table_text(grid_run(points=QUICK), max_keys=2048)
    with pytest.raises(ValueError, match="no times of ours and other"):
        policy_tables.table_text(grid_run(), max_keys=2048, peer="other")
    with pytest.raises(ValueError, match="max_keys is -1"):
        policy_tables.table_text(grid_run(), max_keys=-1)


def test_a_shapes_schedule_has_the_least_mean():
    def times(p):
        small = p.rows * p.heads < 500
        # At 16 heads and 16 rows: 9 of 8 points slower by 1.2, the last faster by 4.
        mean = {"low-latency-2": 0.2 if p.keys == 2048 else 0.96, "low-latency-4": 0.8}
        odd = mean if (p.rows, p.heads) == (16, 16) else {}
        return {"base": 2.0, "low-latency": 0.5 if small else 1.5, "low-latency-4": 1.0} | odd

    run = schedules_run(times)
    lines = policy_tables.schedules_text(run, max_keys=2048)
    assert lines == [
        "1-16x16:low-latency",
        "1-6x64:low-latency,7-16x64:low-latency-4",
        "1-5x96:low-latency,6-16x96:low-latency-4",
        "1-3x128:low-latency,4-16x128:low-latency-4",
    ]
    table = ",".join(lines)
    pick = policy_tables.chosen_by(table)
    # Sizes between measured ones are as the next larger, by the kernel's rule too.
    assert [pick(7, 64), pick(3, 112), pick(4, 112), pick(17, 256)] == [
        "low-latency-4", "low-latency", "low-latency-4", "low-latency-4",
    ]  # fmt: skip


def test_a_schedule_behind_the_peer_at_fewer_points_comes_before_one_with_less_mean():
    def times(p):
        # Behind a peer of 1.0 at 1, 2 and all of a shape's 8 key counts.
        slow = {"base": p.keys == 2048, "low-latency": p.keys >= 1024, "low-latency-2": True}
        fast = {"base": 0.9, "low-latency": 0.1, "low-latency-2": 0.05}
        return {name: 1.0 if slow[name] else fast[name] for name in slow}

    run = schedules_run(times)
    assert policy_tables.schedules_text(run, max_keys=2048)[0] == "1-16x16:base"
    # Up to 1024 keys base is behind nowhere, the others still are.
    assert policy_tables.schedules_text(run, max_keys=1024)[0] == "1-16x16:base"
    # Of 512 keys at most two are never behind: the mean decides.
    assert policy_tables.schedules_text(run, max_keys=512)[0] == "1-16x16:low-latency"
    # Without a time of the peer none is behind.
    assert policy_tables.schedules_text(run, max_keys=2048, peer="none")[0] == "1-16x16:low-latency"


def test_the_mean_is_geometric_and_of_the_keys_that_count():
    def times(p):
        return {"base": 0.1 if p.keys == 2048 else 1.0, "low-latency-2": 0.9}

    run = schedules_run(times, flashmla=2.0)  # behind which none is
    assert (
        policy_tables.schedules_text(run, max_keys=2048)[0] == "1-16x16:base"
    )  # 10 ** -(1 / 8) = 0.75
    assert policy_tables.schedules_text(run, max_keys=1024)[0] == "1-16x16:low-latency-2"


def test_a_schedule_that_failed_somewhere_is_not_chosen():
    def times(p):
        return {"base": 1.0} | ({} if p == Point(5, 96, 16) else {"low-latency": 0.5})

    lines = policy_tables.schedules_text(schedules_run(times), max_keys=2048)
    assert lines[2] == "1-4x96:low-latency,5x96:base,6-16x96:low-latency"
    with pytest.raises(ValueError, match=r"not all times of any of base, .* at 1 x 16"):
        policy_tables.schedules_text(schedules_run(times, QUICK), max_keys=2048)
    with pytest.raises(ValueError, match="not all times"):
        policy_tables.schedules_text(schedules_run(flat(other=1.0)), max_keys=2048)


def test_the_kernels_tables_are_written_by_the_command(tmp_path, capsys):
    path, module = tmp_path / "run.json", tmp_path / "policy.py"
    before = "import re\n\n# policy: written before\nTABLE = 5\n# /policy\n\nNAMED = 1\n"
    module.write_text(before)
    schedules_run(flat(base=2.0, low_latency_4=0.5)).save(path)
    given = ["policy", str(path), "--max-keys", "1024"]
    assert command.main(given) == 0
    text = capsys.readouterr().out
    assert (module.read_text(), load(path).names[0]) == (before, "base")
    assert command.main([*given, "--into", str(module)]) == 0
    assert module.read_text() == f"import re\n\n{text}\nNAMED = 1\n"
    assert policy_tables.part_of(module.read_text()) == (text, 1024)
    values: dict[str, Any] = {}
    exec(text, values)
    assert values["TABLE"] == "1-16:sparse"
    assert parse_schedules(values["SCHEDULES"])[96][5] == kernel_schedule("low-latency-4")
    # Ours follows, in the run as well.
    at_checkpoint = load(path).at(CHECKPOINT)
    assert at_checkpoint is not None
    assert at_checkpoint.times_us["ours"] == 0.5
    assert command.main([*given, "--into", str(module)]) == 0
    assert module.read_text() == f"import re\n\n{text}\nNAMED = 1\n"
    module.write_text("no marks\n")
    assert command.main([*given, "--into", str(module)]) == 2
    assert "0 marked parts" in capsys.readouterr().err


def test_long_tables_stay_within_a_line():
    def times(p):
        fast = SCHEDULES[grid.ROWS.index(p.rows) % len(SCHEDULES)]
        return dict.fromkeys(SCHEDULES, 2.0) | {fast: 0.5}

    text, run = policy_tables.code(schedules_run(times), max_keys=2048)
    assert max(map(len, text.splitlines())) <= 100
    values: dict[str, Any] = {}
    exec(text, values)
    pick = policy_tables.chosen_by(values["SCHEDULES"])
    assert [pick(rows, 96) for rows in grid.ROWS] == list(SCHEDULES) * 2
    assert {r.times_us["ours"] for r in run.results} == {0.5}


def test_the_kernel_names_the_schedules_as_the_other_layers_do():
    assert dict(kernel_policy.NAMED) == {name: kernel_schedule(name) for name in SCHEDULES}


# Compiling beforehand


def test_kernels_of_a_run():
    points = [Point(1, 16, 4), Point(1, 16, 8), Point(2, 16, 4)]
    assert precompile.shapes(points, points[:1], 64) == [(1, 16, 64), (2, 16, 64), (1, 16, 4)]
    assert len(precompile.shapes(FULL, WIDE, grid.WIDTH)) == 8 * 4 + 4


def test_what_is_timed_is_compiled_before(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path))
    compile_all = precompile.compile_all
    schedules = {"base": BASE, "low-latency": kernel_schedule("low-latency")}
    seen = []

    def compile_one(*sizes, schedule):
        seen.append((sizes, schedule))
        if sizes[0] == 2:
            raise RuntimeError("no such kernel\nand more")
        return True

    monkeypatch.setattr(precompile, "precompile_sparse", compile_one)
    shapes = [(1, 16, 64), (2, 32, 64)]
    about = compile_all(shapes, schedules, "sm_90a", Console(width=200), workers=1)
    assert seen == [
        ((rows, heads, heads, width, rows, "sm_90a"), schedules[name])
        for name in ("low-latency", "base")
        for rows, heads, width in shapes
    ]
    assert (about["kernels"], about["failed"], about["processes"]) == (4, 2, 1)
    assert capsys.readouterr().out.count("no such kernel") == 2
    monkeypatch.setenv("SPARSE_MLA_CACHE", "0")
    assert compile_all(shapes, schedules, "sm_90a", Console()) == {"kernels": 0}
    assert len(seen) == 4


def test_processes_compile_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path))
    shapes = [(1, 16, 8), (2, 16, 8)]
    about = precompile.compile_all(shapes, {"base": BASE}, "sm_90a", Console(), workers=2)
    assert (about["kernels"], about["failed"], about["processes"]) == (2, 0, 2)
    sizes: dict[str, object] = {"batch": 2, "heads": 16, "padded": 16, "width": 8, "cap": 2}
    sizes |= {"push": None, "schedule": dict(vars(BASE))}
    assert cache.holds(cache.describe("decode", "sm_90a", sizes))
    assert len(list(tmp_path.iterdir())) == 2


# Reports


def test_the_report_shows_points_ratios_and_failures(capsys):
    run = grid_run(points=QUICK)
    failed = Result(Point(16, 96, 256), 2048, {"ours": 1.0}, {"ours": (1.0, 1.0)}, 9,
                    failed={"flashmla": "why"})  # fmt: skip
    wide = [result_of(CHECKPOINT, ours_narrow=8.0, ours_wide=8.1)]
    host = {"run_sparse": {"median": 9.0, "low": 8.0, "high": 10.0}}
    run = Run(run.about, [*run.results[:-1], failed], wide, host, [Point(1, 16, 0)])
    bench_report.print_report(Console(width=160), run)
    shown = capsys.readouterr().out
    for words in (
        "5 x 96 x 256",
        "0.40-0.60",
        "ours/flashmla",
        "failed",
        "8.10",
        "9.0 us a call (10-90%: 8.00-10.00)",
        "not known",
        "1 points were left out",
    ):
        assert words in shown


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_plot(tmp_path, suffix):
    path = tmp_path / f"plot{suffix}"
    run = grid_run()
    results = [
        Result(**{**vars(r), "times_us": {**r.times_us, "split=8": 0.7},
                  "spread_us": {**r.spread_us, "split=8": (0.6, 0.8)}})
        for r in run.results
    ]  # fmt: skip
    bench_report.write_plot(path, Run(run.about, results))
    assert path.stat().st_size > 5000
    if suffix == ".svg":
        again = tmp_path / "again.svg"
        bench_report.write_plot(again, Run(run.about, results))
        assert again.read_text() == path.read_text()


def test_the_plot_shows_what_has_several_key_counts(tmp_path):
    assert bench_report.shown_shapes(grid_run().results) == [(1, 96), (5, 96), (8, 96), (16, 96)]
    assert bench_report.shown_shapes(grid_run(points=QUICK).results) == [(5, 96), (16, 96)]
    bench_report.write_plot(tmp_path / "quick.svg", grid_run(points=QUICK))
    with pytest.raises(ValueError, match="two key counts"):
        bench_report.write_plot(tmp_path / "none.svg", grid_run(points=[CHECKPOINT]))


def test_the_page_has_every_point_of_ours_and_the_targets():
    lost = Point(8, 128, 2048)
    run = grid_run(ours=0.3, wins=lambda point: point != lost)
    wide = [result_of(CHECKPOINT, ours_narrow=8.0, ours_wide=8.14, flashmla_narrow=12.0)]
    host = {"run_sparse": {"median": 9.04, "low": 8.0, "high": 10.0}}
    run = Run(run.about | {"command": "the command"}, run.results, wide, host)
    text = page.markdown(run, Path("figures/latency.svg"))
    lines = text.splitlines()
    assert lines[0] == "a GPU, driver 1, 2000-01-01: `the command`. Microseconds a launch, medians."
    assert "(figures/latency.svg)" in text
    assert "| geometric mean of ours / FlashMLA | 0.302 | 0.6 | 248 of 248 | yes |" in lines
    assert "| points where ours is not ahead of FlashMLA | 1 | 0 | 248 of 248 | no |" in lines
    assert text.count("0.3 (0.30)") == 255
    assert text.count("**2.0 (2.00)**") == 1
    assert "| `flashmla` |" + " 1.00 |" * 8 in lines
    assert "| 5 |" + " `low-latency` |" * 4 in lines
    assert "| 5 x 96 x 256 | 8.00 | 8.14 | 12.00 |  |" in lines
    assert "| `run_sparse` | 9.0 |" in lines
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert set(tables) == {3, 6, 10}  # every line of a table has as many cells
    assert page.markdown(Run({}, []))


def test_the_page_is_written_by_the_command(tmp_path):
    path, page_path, plot = tmp_path / "run.json", tmp_path / "page.md", tmp_path / "f" / "p.svg"
    page_path.write_text("# Title\n\n<!-- figures: by a command -->\nold\n<!-- /figures -->\nend\n")
    run = grid_run()
    run.save(path)
    given = ["table", str(path), "--plot", str(plot), "--into", str(page_path)]
    assert command.main(given) == 0
    text = page_path.read_text()
    assert text == between_marks(text, page.markdown(run, Path("f/p.svg")))
    assert text.startswith("# Title\n\n<!-- figures: by a command -->\n\na GPU, driver 1")
    assert "old" not in text
    assert command.main(given) == 0
    assert page_path.read_text() == text


# The run that ships


@pytest.fixture
def shipped():
    return load(SHIPPED)


def test_the_shipped_run_is_of_todays_code(shipped):
    """At the checkpoint, on every schedule; what runs is compiled here again."""
    point = shipped.at(CHECKPOINT)
    for name in SCHEDULES:
        sizes = (CHECKPOINT.rows, CHECKPOINT.heads, CHECKPOINT.heads, point.width, CHECKPOINT.rows)
        recorded = shipped.about["machine_code"][name][Signature(*sizes).key]
        if shipped.about["versions"]["dsl"] != dsl_version():
            pytest.skip("another version of the DSL compiles to other code")
        assert cross_compiled(Signature(*sizes, name), "sm_90a").code_sha256 == recorded, name


def test_the_shipped_run_is_of_the_whole_grid_and_computed_the_right_thing(shipped):
    assert shipped.left_out == []
    assert {result.point for result in shipped.results} == set(FULL)
    assert disagreeing([*shipped.results, *shipped.wide]) == []
    assert all("flashmla_wide" in result.times_us for result in shipped.wide)


def test_the_shipped_tables_are_what_the_command_makes_of_the_shipped_run(shipped):
    part, max_keys = policy_tables.part_of(Path(kernel_policy.__file__).read_text())
    assert max_keys is not None, "the tables are not written by the command"
    text, chosen = policy_tables.code(shipped, max_keys=max_keys)
    assert part == text
    assert chosen == shipped  # its times of ours are those of the shipped table


def test_the_page_shows_the_shipped_run(shipped):
    text = (ROOT / "docs" / "benchmark.md").read_text()
    assert text == between_marks(text, page.markdown(shipped, Path("figures/latency.svg")))


def test_the_page_has_a_place_for_the_figures():
    assert len(MARKS.findall((ROOT / "docs" / "benchmark.md").read_text())) == 1


def test_the_module_has_a_place_for_the_tables():
    part, _ = policy_tables.part_of(Path(kernel_policy.__file__).read_text())
    values: dict[str, Any] = {}
    exec(part, values)
    assert (values["TABLE"], values["SCHEDULES"]) == (kernel_policy.TABLE, kernel_policy.SCHEDULES)


# The command


def test_a_record_names_no_place_on_a_machine():
    given = ["run", "--quick", "--out", "/a/b.json", "--plot=/a/c.png", "--flashmla", "/d"]
    assert command.said([*given, "--schedule", "split=8"]) == (
        "sparse-mla-audit bench run --quick --schedule split=8"
    )


def test_the_benchmark_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--quick"]) == 2
    assert "bench needs an NVIDIA GPU" in capsys.readouterr().err
    assert command.main(["--points", "5x96x256"]) == 2
    for given in (
        ["--budget", "0"],
        ["--points", "5x96"],
        ["--quick", "--points", "5x96x256"],
        ["--trials", "0"],
        ["--width", "2047"],
    ):
        with pytest.raises(SystemExit):
            command.main(given)
    with pytest.raises(argparse.ArgumentTypeError, match="ROWSxHEADSxKEYS"):
        command._points("5x96")


def test_records_are_read_again_by_command(tmp_path, capsys):
    path, plot = tmp_path / "run.json", tmp_path / "run.svg"
    grid_run().save(path)
    assert command.main(["table", str(path), "--plot", str(plot)]) == 0
    assert plot.exists()
    capsys.readouterr()
    assert command.main(["policy", str(path), "--max-keys", "2048"]) == 0
    assert 'TABLE = "1-16:split"\n' in capsys.readouterr().out  # of base, as fast as FlashMLA
    assert command.main(["policy", str(path), "--max-keys", "-5"]) == 2


def test_records_are_read_without_pytorch_and_the_dsl():
    block = "".join(f"sys.modules[{name!r}] = None; " for name in ("torch", "cutlass"))
    code = f"import sys; {block}import sparse_mla_verify.bench.command"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_budget_starts_no_point_that_would_pass_it():
    clock = Clock()
    kept: list[object] = []
    budget = whole_run.Budget(10.0, 0.0, clock)

    def measure():
        clock.now += 4.0
        return clock.now

    assert [budget(measure, kept.append) for _ in range(3)] == [True, True, False]
    assert kept == [4.0, 8.0]
    unlimited = whole_run.Budget(None, 0.0, clock)
    assert all(unlimited(measure, kept.append) for _ in range(5))


def test_nvidia_smi_is_asked_and_may_not_answer():
    asked = []

    def answers(command, **options):
        asked.append(command)
        return SimpleNamespace(stdout="1980, 3201\n")

    fields = ("clocks.max.sm", "clocks.max.mem")
    assert gpu_state.query(fields, "GPU-1", answers) == dict(
        zip(fields, ("1980", "3201"), strict=True)
    )
    assert asked[0][:3] == ["nvidia-smi", "-i", "GPU-1"]

    def absent(command, **options):
        raise FileNotFoundError

    assert gpu_state.query(fields, "GPU-1", absent) == {}
    assert gpu_state.query(("one",), "GPU-1", answers) == {}


# A whole run, with PyTorch in the kernel's place


@pytest.fixture
def on_cpu(monkeypatch, pool):
    def compile_sparse(*sizes, schedule):
        artifact = SimpleNamespace(code_sha256="ab")
        return SimpleNamespace(artifact=artifact, schedule=schedule)

    def run_sparse(kernel, query, kv, rows, valid, latent, lse, scale_log2, out_scale):
        result, _ = pytorch.decode(
            query, kv, rows, valid, scale_log2=scale_log2, out_scale=out_scale
        )
        latent.copy_(result)

    def host_time(call):
        call()
        return Spread(9.0, 8.0, 10.0)

    def sparse_decode(query, kv, rows, valid, *, scale_log2, out_scale, schedule):
        return pytorch.decode(query, kv, rows, valid, scale_log2=scale_log2, out_scale=out_scale)

    monkeypatch.setattr(ours, "compile_sparse", compile_sparse)
    monkeypatch.setattr(ours, "run_sparse", run_sparse)
    monkeypatch.setattr(whole_run, "sparse_decode", sparse_decode)
    monkeypatch.setattr(whole_run, "HOST_POINT", Point(1, 16, 2))
    monkeypatch.setattr(timing, "host_time", host_time)
    host: dict[str, Any] = dict.fromkeys(Host.__dataclass_fields__, "none") | {"gpu": "no GPU"}
    monkeypatch.setattr(gpu, "host", lambda: Host(**host))
    monkeypatch.setattr(gpu_state, "own_gpu", lambda: "GPU-1")
    monkeypatch.setattr(gpu_state, "query", lambda fields, gpu: {"clocks.max.sm": "1980"})
    schedules = (Sparse(name, kernel_schedule(name)) for name in ("base", "low-latency"))
    bench = bench_of(pool, *schedules, PyTorch())
    bench.pick = lambda rows, heads: "low-latency"
    return bench


def options(path: Path, budget=None):
    return SimpleNamespace(out=path, budget=budget, said="the command", cache="cold")


def test_a_whole_run(on_cpu, tmp_path, capsys):
    path = tmp_path / "run.json"
    points = (Point(1, 16, 4), Point(1, 16, 8))
    console = Console(width=200)
    about = {"compiled": {"kernels": 4}}
    run = whole_run.run(on_cpu, points, points[:1], options(path), 0.0, console, about=about)
    assert whole_run.close(run, console) == 0
    plain = json.loads(path.read_text())
    assert [result["keys"] for result in plain["results"]] == [4, 8]
    assert plain["wide"][0]["ours_wide_us"] == 2.0
    assert [result["notes"]["ours"] for result in plain["results"]] == ["low-latency"] * 2
    machine_code = {f"b1-h16-p16-w{w}-c1": "ab" for w in (WIDTH, 4)}
    assert plain["machine_code"] == {"base": machine_code, "low-latency": machine_code}
    assert plain["schedules"]["low-latency"]["split"] == kernel_schedule("low-latency").split
    assert plain["compiled"] == {"kernels": 4}
    assert plain["gpu"] == "no GPU"
    assert plain["command"] == "the command"
    assert plain["versions"]["flashmla"] is None
    assert plain["host_us"]["run_sparse"] == {"median": 9.0, "low": 8.0, "high": 10.0}
    assert set(plain["host_us"]) == {
        "run_sparse", "run_sparse base", "run_sparse low-latency", "sparse_decode",
    }  # fmt: skip
    assert plain["left_out"] == []
    bench_report.print_report(console, load(path))


def test_points_named_alone_are_timed_alone(on_cpu, tmp_path):
    path = tmp_path / "run.json"
    whole_run.run(on_cpu, [Point(1, 16, 4)], (), options(path), 0.0, Console(), host=False)
    plain = json.loads(path.read_text())
    assert (plain["host_us"], plain["wide"], len(plain["results"])) == ({}, [], 1)


def test_an_interrupted_run_is_written(on_cpu, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    points = (Point(1, 16, 4), Point(1, 16, 8))
    whole = Bench.point

    def interrupted(self, point):
        if point == points[1]:
            raise KeyboardInterrupt
        return whole(self, point)

    monkeypatch.setattr(Bench, "point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        whole_run.run(on_cpu, points, (), options(path), 0.0, Console())
    read = load(path)
    assert [result.point for result in read.results] == [points[0]]
    assert read.left_out == [points[1]]


def test_a_run_that_finds_a_wrong_result_exits_with_1(capsys):
    wrong = Result(CHECKPOINT, 64, {}, {}, 0, {"base": 0.5})
    assert whole_run.close(Run({}, [wrong]), Console()) == 1
    assert "base is off by 0.5" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": [{}], "wide": []}'])
def test_a_file_that_is_no_run_is_an_error(content, tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(content)
    assert command.main(["table", str(file)]) == 2
    assert "must be a benchmark's run" in capsys.readouterr().err


def test_times_that_are_none_are_refused(tmp_path):
    file = tmp_path / "run.json"
    schedules_run(flat(base=float("nan"))).save(file)
    with pytest.raises(ValueError, match="must be finite and above 0"):
        load(file)


def test_the_readme_shows_the_shipped_run(shipped):
    """The figures at the checkpoint and of the whole scope; a new run needs a new text."""
    readme = " ".join((Path(__file__).parents[4] / "README.md").read_text().split())
    times = shipped.at(CHECKPOINT).times_us
    said = f"takes {times['ours']:.2f} us, FlashMLA's sparse decode {times['flashmla']:.2f} us"
    assert f"{said}, and the base schedule {times['base']:.2f} us." in readme
    met = {target.what: target for target in summary.targets(shipped, FULL)}
    behind = met["points where ours is not ahead of FlashMLA"]
    mean = met["geometric mean of ours / FlashMLA"]
    assert behind.figure == 0
    assert f"each of the {behind.measured} points" in readme
    assert f"takes {mean.figure:.2f} of FlashMLA's time in the geometric mean" in readme
