"""The points that are timed, and their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from sparse_mla_verify.peers.point import Point

ROWS = (1, 2, 3, 4, 5, 6, 8, 16)
HEADS = (16, 64, 96, 128)
KEYS = (0, 16, 64, 128, 256, 512, 1024, 2048)
WIDTH = 2048  # row ids that a list holds, at every point: one kernel serves all key counts
TRIALS = 15  # of a point


CHECKPOINT = Point(5, 96, 256)
HOST_POINT = Point(5, 96, 16)  # few keys: the GPU takes less time than the host
FULL = tuple(Point(*sizes) for sizes in itertools.product(ROWS, HEADS, KEYS))
QUICK = (
    *(Point(5, 96, keys) for keys in (0, 16, 64, 256, 512, 2048)),
    Point(8, 96, 256),
    *(Point(16, 96, keys) for keys in (256, 512)),
    Point(8, 16, 2048),
    Point(8, 128, 2048),
)
#: Where a list of 2048 ids with 256 valid ones is compared with a list of 256.
WIDE = tuple(Point(rows, 96, 256) for rows in (1, 5, 8, 16))
QUICK_WIDE = (CHECKPOINT,)


def parse_points(text: str) -> tuple[Point, ...]:
    """Read points as `"5x96x0,5x96x256"`: rows x heads x keys.

    Raises ValueError for a malformed one, one out of range, or none.
    """
    points = []
    for entry in filter(None, map(str.strip, text.split(","))):
        sizes = entry.split("x")
        if len(sizes) != 3 or not all(size.isascii() and size.isdigit() for size in sizes):
            raise ValueError(f"points must be ROWSxHEADSxKEYS, got {entry!r}")
        point = Point(*map(int, sizes))
        if point.rows < 1 or point.heads < 16 or point.heads % 16:
            raise ValueError(
                f"points must have 1 row or more and a multiple of 16 heads, got {entry!r}"
            )
        points.append(point)
    if not points:
        raise ValueError("points must be one or more, got none")
    return tuple(dict.fromkeys(points))


def ordered(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points of `QUICK` first, so that a short budget leaves out the others; then by shape."""
    wanted = set(points)
    first = [point for point in QUICK if point in wanted]
    return (*first, *sorted(wanted.difference(first)))
