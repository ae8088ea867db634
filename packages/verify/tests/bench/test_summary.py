import pytest

from sparse_mla_verify.bench import (
    summary,
)
from sparse_mla_verify.bench.grid import (
    FULL,
    QUICK,
    WIDE,
)
from sparse_mla_verify.bench.results import (
    Run,
)
from sparse_mla_verify.peers.point import Point


def figures(run):
    return {target.what: target for target in summary.targets(run, FULL)}


def test_targets_of_a_whole_run(grid_run):
    run = grid_run(ours=0.3)
    mean = figures(run)["geometric mean of ours / FlashMLA"]
    assert mean.figure == pytest.approx(0.3)
    assert (mean.measured, mean.expected, mean.met) == (7 * 4 * 8 + 4 * 6, 248, True)
    assert figures(run)["5 x 96 x 256: ours / FlashMLA"].met
    behind = "points where ours is not ahead of FlashMLA"
    assert figures(run)[behind].met
    worse = grid_run(ours=0.3, wins=lambda point: point != Point(8, 128, 2048))
    assert (figures(worse)[behind].figure, figures(worse)[behind].met) == (1.0, False)
    as_fast = figures(grid_run(ours=1.0))[behind]
    assert (as_fast.figure, as_fast.met) == (248.0, False)
    out_of_scope = grid_run(ours=0.3, wins=lambda point: point.rows < 16 or point.keys <= 512)
    assert figures(out_of_scope)[behind].met


def test_targets_of_some_points_may_be_missed_but_not_met(grid_run):
    some = grid_run(ours=0.3, points=QUICK)
    behind = "points where ours is not ahead of FlashMLA"
    assert figures(some)[behind].met is None
    worse = grid_run(ours=0.3, points=QUICK, wins=lambda point: point != Point(8, 16, 2048))
    assert figures(worse)[behind].met is False
    empty = figures(Run({}, []))
    assert [target.met for target in empty.values()] == [None] * 7


def test_targets_of_lists_and_host_time(result_of):
    wide = [
        result_of(p, ours_narrow=10.0, ours_wide=time)
        for p, time in zip(WIDE, (10.1, 10.3, 10.0, 10.0), strict=True)
    ]
    run = Run({}, [], wide, {"run_sparse": {"median": 12.5}})
    assert figures(run)["256 valid ids: list of 2048 / list of 256"].figure == pytest.approx(1.03)
    assert figures(run)["host time of run_sparse: us"].met is False
