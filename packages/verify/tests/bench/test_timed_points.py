import weakref
from types import SimpleNamespace

import pytest
import torch

from sparse_mla_verify.bench.timed_points import disagreeing, relative_error
from sparse_mla_verify.peers.implementation import Prepared
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.peers.pytorch import PyTorch

WIDTH = 64


class Decoder:
    """An implementation in BF16, with a fault."""

    def __init__(self, name, fault=lambda latent: None):
        self.name, self.fault = name, fault

    def prepare(self, work):
        prepared = PyTorch().prepare(work)
        latent = prepared.latent
        assert latent is not None

        def call(k):
            prepared.calls[k]()
            self.fault(latent[k])

        calls = [lambda k=k: call(k) for k in range(len(prepared.calls))]
        return Prepared(calls, prepared.latent, {"name": self.name})


def test_a_point_is_checked_and_timed(pool, bench_of):
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


def test_what_a_graph_reads_outlives_its_replays(pool, bench_of):
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


def test_ours_is_the_schedule_that_is_picked(pool, fake_timer, bench_of):
    bench = bench_of(pool, Decoder("base"), Decoder("low-latency"), Decoder("low-latency-4"))
    bench.pick = lambda rows, heads: "low-latency" if (rows, heads) == (2, 16) else "other"
    bench.timer = fake_timer(iter([float(k) for k in range(1000)]))
    result = bench.point(Point(2, 16, 40))
    assert list(result.times_us) == ["ours", "base", "low-latency", "low-latency-4"]
    assert result.times_us["ours"] == result.times_us["low-latency"]
    assert len(set(result.times_us.values())) == 3
    assert result.spread_us["ours"] == result.spread_us["low-latency"]
    assert result.notes["ours"] == "low-latency"
    assert "ours" not in bench.point(Point(3, 16, 40)).times_us


def test_no_keys_are_a_point_too(pool, bench_of):
    result = bench_of(pool, Decoder("ours")).point(Point(2, 16, 0))
    assert result.relative_error == {"ours": 0.0}
    wrong = Decoder("ours", lambda latent: latent.fill_(0.1))
    assert disagreeing([bench_of(pool, wrong).point(Point(2, 16, 0))])


def test_what_computes_something_else_is_said(pool, bench_of):
    scaled = Decoder("flashmla", lambda latent: latent.mul_(1.03))
    result = bench_of(pool, Decoder("ours"), scaled).point(Point(2, 16, 40))
    (line,) = disagreeing([result])
    assert line.startswith("2 x 16 x 40: flashmla is off by 0.0")
    assert line.endswith("bound 0.02")
    within = Decoder("ours", lambda latent: latent.mul_(1.03))  # E4M3 probabilities may
    assert disagreeing([bench_of(pool, within).point(Point(2, 16, 40))]) == []


def test_only_the_last_launch_may_be_wrong(pool, bench_of):
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
        with pytest.raises(RuntimeError, match="outputs must be written and finite"):
            relative_error(latent, writes_all_but(k), lambda k: expected)
    with pytest.raises(RuntimeError, match="outputs must be written and finite"):
        relative_error(latent, lambda: 1.0, lambda k: expected)


def test_one_that_cannot_run_does_not_lose_the_others(pool, bench_of):
    def prepare(work):
        raise RuntimeError("no such head count\nand more")

    broken = SimpleNamespace(name="flashmla", prepare=prepare)
    result = bench_of(pool, broken, Decoder("ours")).point(Point(2, 16, 40))
    assert result.failed == {"flashmla": "no such head count"}
    assert result.times_us == {"ours": 2.0}
    assert disagreeing([result]) == ["2 x 16 x 40: flashmla failed: no such head count"]
    alone = bench_of(pool, broken).point(Point(2, 16, 40))
    assert (alone.times_us, alone.trials) == ({}, 0)


def test_wide_lists_are_compared_with_narrow_ones(pool, bench_of):
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
