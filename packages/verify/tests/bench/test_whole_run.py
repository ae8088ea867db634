import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sparse_mla_verify.bench import (
    bench_report,
    gpu_state,
    timing,
    whole_run,
)
from sparse_mla_verify.bench.grid import (
    CHECKPOINT,
)
from sparse_mla_verify.bench.results import (
    Result,
    Run,
    Spread,
    load,
)
from sparse_mla_verify.bench.timed_points import Bench
from sparse_mla_verify.evidence.recordings import Host
from sparse_mla_verify.gpu_runs import gpu
from sparse_mla_verify.inputs.schedules import kernel_schedule
from sparse_mla_verify.peers import ours, pytorch
from sparse_mla_verify.peers.ours import Sparse
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.peers.pytorch import PyTorch

WIDTH = 64


def test_a_budget_starts_no_point_that_would_pass_it(fake_clock):
    clock = fake_clock()
    kept: list[object] = []
    budget = whole_run.Budget(10.0, 0.0, clock)

    def measure():
        clock.now += 4.0
        return clock.now

    assert [budget(measure, kept.append) for _ in range(3)] == [True, True, False]
    assert kept == [4.0, 8.0]
    unlimited = whole_run.Budget(None, 0.0, clock)
    assert all(unlimited(measure, kept.append) for _ in range(5))


@pytest.fixture
def on_cpu(monkeypatch, pool, bench_of):
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
