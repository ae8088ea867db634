import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from sparse_mla_kernel import BASE, parse_table
from sparse_mla_verify.bench import command, grid, machine, policy, report, session, summary, timing
from sparse_mla_verify.bench.grid import CHECKPOINT, FULL, QUICK, QUICK_WIDE, WIDE, Point, ordered
from sparse_mla_verify.bench.measure import Bench, disagreeing, relative_error
from sparse_mla_verify.bench.results import Result, Run, load
from sparse_mla_verify.bench.timing import Spread, host_time, interleave
from sparse_mla_verify.bench.workload import POOL_ROWS, SETS, Pool, workload
from sparse_mla_verify.peers import Prepared, ours, pytorch
from sparse_mla_verify.peers.ours import Sparse
from sparse_mla_verify.peers.pytorch import PyTorch

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
        taken = iter([])

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

        def call(k):
            prepared.calls[k]()
            self.fault(prepared.latent[k])

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
    return Result(point, 2048, times, spread, 25, {"ours": 0.02}, 1980, {"schedule": {"split": 4}})


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


# Timing


def test_trials_take_turns_and_warm_up_does_not_count():
    order = []
    replays = {n: lambda n=n: order.append(n) or float(len(order)) for n in ("a", "b", "c")}
    samples = interleave(replays, trials=4, clock=Clock(1.0))
    assert {n: len(s) for n, s in samples.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = ["".join(order[k : k + 3]) for k in range(0, len(order), 3)]
    assert rounds == ["abc", "abc", "abc", "abc", "bca", "cab", "abc"]
    assert samples["a"][0] == 3 * timing.WARMUP + 1


def test_warm_up_lasts_until_the_clocks_have_risen():
    calls = []
    interleave({"a": lambda: calls.append(None) or 1.0}, trials=1, clock=Clock(2**-6))
    # Three rounds, three more until 4 / 64 s have passed, and the trial.
    assert len(calls) == 3 + 3 + 1


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
    clock, calls = Clock(), []

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
    seen = []

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
    widths = {}

    class Watching(Decoder):
        def prepare(self, work):
            widths.setdefault(self.name, []).append((work.width, work.peer_width))
            return super().prepare(work)

    bench = bench_of(pool, Watching("ours"), Watching("base"), Watching("flashmla"))
    result = bench.wide(Point(2, 16, 40))
    lists = [(40, 40), (WIDTH, WIDTH)]
    assert widths == {"ours": lists, "flashmla": lists}
    names = ["ours_narrow", "ours_wide", "flashmla_narrow", "flashmla_wide"]
    assert list(result.times_us) == names


# Results


def test_the_json_has_the_agreed_form(tmp_path):
    path = tmp_path / "new" / "bench_latency.json"
    wide = [result_of(CHECKPOINT, ours_narrow=8.0, ours_wide=8.1)]
    run = Run(
        {"gpu": "a GPU", "driver": "1", "cubin_sha256": {"b5": "ab"}},
        [result_of(Point(5, 96, 512), ours=2.0), result_of(CHECKPOINT, ours=1.23456, floor=0.5)],
        wide,
        {"run_sparse": {"median": 9.0, "low": 8.0, "high": 10.0}},
        [Point(1, 16, 0)],
    )
    run.save(path)
    plain = json.loads(path.read_text())
    assert {"gpu", "driver", "cubin_sha256", "results"} <= set(plain)
    first = plain["results"][0]
    agreed = ("rows", "heads", "keys", "ours_us", "base_us", "flashmla_us", "floor_us")
    assert [first[key] for key in agreed] == [5, 96, 256, 1.235, None, None, 0.5]
    assert first["spread_us"]["floor"] == [0.4, 0.6]
    read = load(path)
    assert read.at(CHECKPOINT).times_us == {"ours": 1.235, "floor": 0.5}
    assert read.left_out == [Point(1, 16, 0)]
    assert read.wide[0].times_us == {"ours_narrow": 8.0, "ours_wide": 8.1}
    read.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="no benchmark's JSON"):
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


def test_a_policy_follows_from_a_run():
    assert policy.table_text(grid_run(), max_keys=2048) == "1-16:sparse"
    none = grid_run(wins=lambda point: False)
    assert policy.table_text(none, max_keys=2048) == "1-16:split"
    # One lost point is a lost batch size, and so are the unmeasured ones on either side of it.
    text = policy.table_text(grid_run(wins=lambda p: p != Point(8, 16, 512)), max_keys=2048)
    assert text == "1-6:sparse,7-15:split,16:sparse"
    assert parse_table(text)[7] == "split"
    assert policy.table_text(grid_run(wins=lambda p: p.keys <= 512), max_keys=512) == "1-16:sparse"
    assert policy.table_text(grid_run(ours=1.0), max_keys=2048) == "1-16:split"  # equal is no win


def test_a_policy_needs_the_whole_grid():
    with pytest.raises(ValueError, match="no times of ours and flashmla at 1 x 16 x 0"):
        policy.table_text(grid_run(points=QUICK), max_keys=2048)
    with pytest.raises(ValueError, match="no times of ours and other"):
        policy.table_text(grid_run(), max_keys=2048, peer="other")
    with pytest.raises(ValueError, match="max_keys is -1"):
        policy.table_text(grid_run(), max_keys=-1)


# Reports


def test_the_report_shows_points_ratios_and_failures(capsys):
    run = grid_run(points=QUICK)
    failed = Result(Point(16, 96, 256), 2048, {"ours": 1.0}, {"ours": (1.0, 1.0)}, 9,
                    failed={"flashmla": "why"})  # fmt: skip
    wide = [result_of(CHECKPOINT, ours_narrow=8.0, ours_wide=8.1)]
    host = {"run_sparse": {"median": 9.0, "low": 8.0, "high": 10.0}}
    run = Run(run.about, [*run.results[:-1], failed], wide, host, [Point(1, 16, 0)])
    report.print_report(Console(width=110), run)
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
    report.write_plot(path, Run(run.about, results))
    assert path.stat().st_size > 5000
    if suffix == ".svg":
        again = tmp_path / "again.svg"
        report.write_plot(again, Run(run.about, results))
        assert again.read_text() == path.read_text()


def test_the_plot_shows_what_has_several_key_counts(tmp_path):
    assert report.shown_shapes(grid_run().results) == [(1, 96), (5, 96), (8, 96), (16, 96)]
    assert report.shown_shapes(grid_run(points=QUICK).results) == [(5, 96), (16, 96)]
    report.write_plot(tmp_path / "quick.svg", grid_run(points=QUICK))
    with pytest.raises(ValueError, match="two key counts"):
        report.write_plot(tmp_path / "none.svg", grid_run(points=[CHECKPOINT]))


# The command


def test_a_record_names_no_place_on_a_machine():
    given = ["run", "--quick", "--out", "/a/b.json", "--plot=/a/c.png", "--flashmla", "/d"]
    assert command.said([*given, "--schedule", "split=8"]) == (
        "python -m sparse_mla_verify.bench run --quick --schedule split=8"
    )


def test_the_benchmark_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--quick"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().out
    assert command.main(["--trials", "0"]) == 2
    with pytest.raises(SystemExit):
        command.main(["--budget", "0"])


def test_records_are_read_again_by_command(tmp_path, capsys):
    path, plot = tmp_path / "run.json", tmp_path / "run.svg"
    grid_run().save(path)
    assert command.main(["table", str(path), "--plot", str(plot)]) == 0
    assert plot.exists()
    capsys.readouterr()
    assert command.main(["policy", str(path), "--max-keys", "2048"]) == 0
    assert capsys.readouterr().out == "1-16:sparse\n"
    assert command.main(["policy", str(path), "--max-keys", "-5"]) == 2


def test_records_are_read_without_pytorch_and_the_dsl():
    block = "".join(f"sys.modules[{name!r}] = None; " for name in ("torch", "cutlass"))
    code = f"import sys; {block}import sparse_mla_verify.bench.command"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_budget_starts_no_point_that_would_pass_it():
    clock, kept = Clock(), []
    budget = session.Budget(10.0, 0.0, clock)

    def measure():
        clock.now += 4.0
        return clock.now

    assert [budget(measure, kept.append) for _ in range(3)] == [True, True, False]
    assert kept == [4.0, 8.0]
    unlimited = session.Budget(None, 0.0, clock)
    assert all(unlimited(measure, kept.append) for _ in range(5))


def test_nvidia_smi_is_asked_and_may_not_answer():
    asked = []

    def answers(command, **options):
        asked.append(command)
        return SimpleNamespace(stdout="1980, 3201\n")

    fields = ("clocks.max.sm", "clocks.max.mem")
    assert machine.query(fields, "GPU-1", answers) == dict(
        zip(fields, ("1980", "3201"), strict=True)
    )
    assert asked[0][:3] == ["nvidia-smi", "-i", "GPU-1"]

    def absent(command, **options):
        raise FileNotFoundError

    assert machine.query(fields, "GPU-1", absent) == {}
    assert machine.query(("one",), "GPU-1", answers) == {}


# A whole run, with PyTorch in the kernel's place


@pytest.fixture
def on_cpu(monkeypatch, pool):
    def compile_sparse(*sizes, schedule=BASE):
        artifact = SimpleNamespace(sha256="ab")
        return SimpleNamespace(artifact=artifact, schedule=schedule)

    def run_sparse(kernel, query, kv, rows, valid, latent, lse, scale_log2, out_scale):
        result, _ = pytorch.decode(
            query, kv, rows, valid, scale_log2=scale_log2, out_scale=out_scale
        )
        latent.copy_(result)

    def host_time(call):
        call()
        return Spread(9.0, 8.0, 10.0)

    def sparse_decode(query, kv, rows, valid, *, scale_log2, out_scale):
        return pytorch.decode(query, kv, rows, valid, scale_log2=scale_log2, out_scale=out_scale)

    monkeypatch.setattr(ours, "compile_sparse", compile_sparse)
    monkeypatch.setattr(ours, "run_sparse", run_sparse)
    monkeypatch.setattr(session, "sparse_decode", sparse_decode)
    monkeypatch.setattr(session, "HOST_POINT", Point(1, 16, 2))
    monkeypatch.setattr(timing, "host_time", host_time)
    host = dict.fromkeys(session.gpu.Host.__dataclass_fields__, "none") | {"gpu": "no GPU"}
    monkeypatch.setattr(session.gpu, "host", lambda: session.gpu.Host(**host))
    monkeypatch.setattr(machine, "own_gpu", lambda: "GPU-1")
    monkeypatch.setattr(machine, "query", lambda fields, gpu: {"clocks.max.sm": "1980"})
    return bench_of(pool, Sparse("ours"), Sparse("base", BASE), PyTorch())


def options(path: Path, budget=None):
    return SimpleNamespace(out=path, budget=budget, said="the command", cache="cold")


def test_a_whole_run(on_cpu, tmp_path, capsys):
    path = tmp_path / "run.json"
    points = (Point(1, 16, 4), Point(1, 16, 8))
    console = Console(width=200)
    run = session.run(on_cpu, points, points[:1], options(path), 0.0, console)
    assert session.close(run, console) == 0
    plain = json.loads(path.read_text())
    assert [result["keys"] for result in plain["results"]] == [4, 8]
    assert plain["wide"][0]["ours_wide_us"] == 2.0
    assert plain["cubin_sha256"] == {f"b1-h16-p16-w{w}-c1": "ab" for w in (WIDTH, 4)}
    assert plain["gpu"] == "no GPU"
    assert plain["command"] == "the command"
    assert plain["versions"]["flashmla"] is None
    assert plain["host_us"]["run_sparse"] == {"median": 9.0, "low": 8.0, "high": 10.0}
    assert set(plain["host_us"]) == {"run_sparse", "sparse_decode"}
    assert plain["left_out"] == []
    report.print_report(console, load(path))


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
        session.run(on_cpu, points, (), options(path), 0.0, Console())
    read = load(path)
    assert [result.point for result in read.results] == [points[0]]
    assert read.left_out == [points[1]]


def test_a_run_that_finds_a_wrong_result_exits_with_1(capsys):
    wrong = Result(CHECKPOINT, 64, {}, {}, 0, {"base": 0.5})
    assert session.close(Run({}, [wrong]), Console()) == 1
    assert "base is off by 0.5" in capsys.readouterr().out
