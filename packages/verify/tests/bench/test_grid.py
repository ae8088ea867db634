import pytest

from sparse_mla_verify.bench import (
    grid,
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
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.peers.workload import (
    POOL_ROWS,
    SETS,
)


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


def test_points_are_read_from_text():
    assert parse_points("5x96x0, 5x96x256,5x96x0") == (Point(5, 96, 0), CHECKPOINT)
    for text in ("5x96", "5x96xa", "0x96x1", "1x24x1", "1x0x1", "1x96x-1", "1x96x\u00b2"):
        with pytest.raises(ValueError, match="points must "):
            parse_points(text)
    with pytest.raises(ValueError, match="points must be one or more, got none"):
        parse_points(",")
