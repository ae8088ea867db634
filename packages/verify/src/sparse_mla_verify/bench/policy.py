"""The policy table of `sparse_mla_kernel.policy`, from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from sparse_mla_verify.bench.grid import FULL, Point
from sparse_mla_verify.bench.results import FLASHMLA, OURS, Run


def table_text(
    run: Run, *, max_keys: int, peer: str = FLASHMLA, grid: Sequence[Point] = FULL
) -> str:
    """The table: `sparse` for the batch sizes at which ours beats the peer wherever measured.

    That is at every head count and every key count up to `max_keys` of the grid, by the medians. A
    batch size between two measured ones is `sparse` if both are; one past the largest is not named,
    which is as `split`.

    Raises:
        ValueError: The grid has no point up to `max_keys`, or a time is missing at one.
    """
    points = [point for point in grid if point.keys <= max_keys]
    if not points:
        raise ValueError(f"max_keys is {max_keys}; the grid has no so few keys")
    wins: dict[int, bool] = {}
    for point in sorted(points):
        result = run.at(point)
        ratio = result.ratio(OURS, peer) if result else None
        if ratio is None:
            raise ValueError(f"the run has no times of {OURS} and {peer} at {point}")
        wins[point.rows] = wins.get(point.rows, True) and ratio < 1
    return _entries(_between(wins))


def _between(wins: Mapping[int, bool]) -> dict[int, bool]:
    """The same for every size from the first to the last."""
    measured = sorted(wins)
    filled = {}
    for low, high in zip(measured, [*measured[1:], measured[-1]], strict=True):
        filled[low] = wins[low]
        filled |= dict.fromkeys(range(low + 1, high), wins[low] and wins[high])
    return filled


def _entries(wins: Mapping[int, bool]) -> str:
    entries = []
    for win, group in groupby(sorted(wins), key=lambda rows: wins[rows]):
        sizes = list(group)
        span = f"{sizes[0]}-{sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        entries.append(f"{span}:{'sparse' if win else 'split'}")
    return ",".join(entries)
