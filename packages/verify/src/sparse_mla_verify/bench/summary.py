"""The targets of the kernel's latency, as figures of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sparse_mla_verify.bench.grid import CHECKPOINT
from sparse_mla_verify.bench.results import (
    FLASHMLA,
    HOST,
    OURS,
    Result,
    Run,
)
from sparse_mla_verify.inputs.schedules import BASE
from sparse_mla_verify.peers.point import Point


@dataclass(frozen=True)
class Target:
    """A figure and what it may be at most; None where the run doesn't say."""

    what: str
    figure: float | None
    limit: float
    measured: int = 1  # points that the figure is of
    expected: int = 1

    @classmethod
    def of_one(cls, what: str, figure: float | None, limit: float) -> Target:
        """A target at one point, measured or not."""
        return cls(what, figure, limit, int(figure is not None))

    @property
    def met(self) -> bool | None:
        """Whether the figure is within the limit; None if it is not known, or only of some points.

        A figure of some points can miss the target, but not meet it.
        """
        if self.figure is None:
            return None
        if self.figure > self.limit:
            return False
        return True if self.measured == self.expected else None


def in_scope(point: Point) -> bool:
    """Whether the kernel is to be ahead of FlashMLA there: up to 8 rows; 16 rows to 512 keys."""
    return point.rows <= 8 or (point.rows == 16 and point.keys <= 512)


def targets(run: Run, scope: Iterable[Point]) -> list[Target]:
    """All targets; `scope` is the whole grid, of which a quick run has only some points."""
    points = [point for point in scope if in_scope(point)]
    ratios = [r for p in points if (r := _ratio(run.at(p), OURS, FLASHMLA)) is not None]
    counts = {"measured": len(ratios), "expected": len(points)}
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    behind = float(sum(r >= 1 for r in ratios)) if ratios else None
    small = run.at(Point(8, 16, 2048))
    wide = [r for w in run.wide if (r := _ratio(w, "ours_wide", "ours_narrow")) is not None]
    host = run.host_us.get(HOST, {}).get("median")
    checkpoint = run.at(CHECKPOINT)
    one = Target.of_one
    return [
        one(f"{CHECKPOINT}: ours / FlashMLA", _ratio(checkpoint, OURS, FLASHMLA), 0.40),
        one(f"{CHECKPOINT}: ours / base", _ratio(checkpoint, OURS, BASE), 0.62),
        Target("points where ours is not ahead of FlashMLA", behind, 0.0, **counts),
        Target("geometric mean of ours / FlashMLA", mean, 0.60, **counts),
        one("8 x 16 x 2048: us", small.times_us.get(OURS) if small else None, 12.0),
        one("256 valid ids: list of 2048 / list of 256", max(wide, default=None), 1.02),
        one("host time of run_sparse: us", host, 12.0),
    ]


def _ratio(result: Result | None, of: str, to: str) -> float | None:
    return result.ratio(of, to) if result else None
