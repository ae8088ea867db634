"""The tables of `sparse_mla_kernel.host.policy`, from a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import wrap

from sparse_mla_verify.bench.grid import FULL, KEYS
from sparse_mla_verify.bench.results import (
    FLASHMLA,
    OURS,
    SCHEDULES,
    Pick,
    Run,
)
from sparse_mla_verify.peers.point import Point

POLICY_MARKS = re.compile(r"(# policy: .*\n)(?:.*\n)*?(# /policy\n)")
_LINE = 90  # characters of a text in a module
_MAX_KEYS = re.compile(r"^# policy: .* --max-keys ([0-9]+)", re.MULTILINE)


def chosen_by(table: str | None) -> Pick:
    """What the kernel's `schedule_for` picks by a table, as a name; None is the shipped table.

    Needs the kernel's package. Raises ValueError for a malformed table.
    """
    from sparse_mla_kernel.host import policy

    if table is not None:
        policy.parse_schedules(table)
    names = {schedule: name for name, schedule in policy.NAMED.items()}
    return lambda rows, heads: names[policy.schedule_for(rows, heads, table=table)]


def schedules_text(
    run: Run,
    *,
    max_keys: int,
    peer: str = FLASHMLA,
    names: Sequence[str] = SCHEDULES,
    grid: Sequence[Point] = FULL,
) -> list[str]:
    """The table of schedules, a text for each head count.

    A batch shape gets the schedule that is slower than `peer` at the fewest key counts of the grid
    up to `max_keys`. Of several such schedules it gets the one with the least geometric mean of its
    medians. A schedule that failed at any of them is left out. A batch size between two measured
    sizes is treated as the larger one.

    Raises:
        ValueError: The grid has no point up to `max_keys`, or no schedule has all times at a shape.
    """
    shapes: dict[int, dict[int, list[Point]]] = {}
    for point in _points(grid, max_keys):
        shapes.setdefault(point.heads, {}).setdefault(point.rows, []).append(point)
    lines = []
    for heads, batches in shapes.items():
        fastest = {rows: _best(run, points, names, peer) for rows, points in batches.items()}
        # From one more than the last measured size, up to its own.
        firsts = dict(zip(fastest, [1, *(rows + 1 for rows in fastest)], strict=False))
        entries = []
        for name, group in groupby(fastest, key=fastest.__getitem__):
            sizes = list(group)
            entries.append(f"{_span(firsts[sizes[0]], sizes[-1])}x{heads}:{name}")
        lines.append(",".join(entries))
    return lines


def _best(run: Run, points: Sequence[Point], names: Sequence[str], peer: str) -> str:
    ranks: dict[str, tuple[int, float]] = {}
    results = [result for point in points if (result := run.at(point)) is not None]
    for name in names:
        times = [r.times_us[name] for r in results if name in r.times_us]
        if len(times) == len(points):
            ratios = [ratio for r in results if (ratio := r.ratio(name, peer)) is not None]
            mean = math.fsum(map(math.log, times)) / len(times)
            ranks[name] = (sum(ratio >= 1 for ratio in ratios), mean)
    if not ranks:
        at = f"{points[0].rows} x {points[0].heads}"
        raise ValueError(
            f"the run must have all times of one of {', '.join(names)}, got none at {at}"
        )
    return min(ranks, key=ranks.__getitem__)


def table_text(
    run: Run, *, max_keys: int, peer: str = FLASHMLA, grid: Sequence[Point] = FULL
) -> str:
    """The table: `sparse` for the batch sizes at which ours beats the peer wherever measured.

    "Wherever measured" means at every head count and every key count of the grid up to `max_keys`,
    by the medians. A batch size between two measured sizes is `sparse` if both are. A size above
    the largest is not named, which means `split`.

    Raises:
        ValueError: The grid has no point up to `max_keys`, or a time is missing at one.
    """
    wins: dict[int, bool] = {}
    for point in _points(grid, max_keys):
        result = run.at(point)
        ratio = result.ratio(OURS, peer) if result else None
        if ratio is None:
            raise ValueError(f"the run must have times of {OURS} and {peer}, got none at {point}")
        wins[point.rows] = wins.get(point.rows, True) and ratio < 1
    return _entries(_between(wins))


def code(run: Run, *, max_keys: int, peer: str = FLASHMLA) -> tuple[str, Run]:
    """The marked part of `sparse_mla_kernel/policy.py`, and the run with ours by its table.

    Raises ValueError as `schedules_text` and `table_text` do.
    """
    lines = schedules_text(run, max_keys=max_keys, peer=peer)
    chosen = run.with_ours(chosen_by(",".join(lines)))
    about = f"{run.about.get('gpu')}, driver {run.about.get('driver')}, {run.about.get('date')}"
    against = "" if peer == FLASHMLA else f" --peer {peer}"
    spaced = (f"{line},".replace(",", ", ") for line in lines)
    pieces = [p for line in spaced for p in wrap(line, _LINE, break_on_hyphens=False)]
    texts = [f'    "{piece}"' for piece in pieces]
    return (
        "# policy: written by `sparse-mla-audit bench policy FILE --max-keys "
        f"{max_keys}{against}`\n"
        f"# The run: {about}.\n"
        f'TABLE = "{table_text(chosen, max_keys=max_keys, peer=peer)}"\n'
        "SCHEDULES = (\n" + "\n".join(texts) + "\n)\n# /policy\n"
    ), chosen


def put_into(text: str, part: str) -> str:
    """A text with the marked part replaced. Raises ValueError where there is not exactly one."""
    found, count = POLICY_MARKS.subn(lambda _: part, text)
    if count != 1:
        raise ValueError(f"into must have one marked part # policy: ... # /policy, got {count}")
    return found


def part_of(text: str) -> tuple[str, int | None]:
    """The marked part of a text, and the `--max-keys` that it was made with; None for none."""
    match = POLICY_MARKS.search(text)
    if match is None:
        raise ValueError("text must have a marked part # policy: ... # /policy, got none")
    keys = _MAX_KEYS.search(match[0])
    return match[0], int(keys[1]) if keys else None


def _points(grid: Sequence[Point], max_keys: int) -> list[Point]:
    points = sorted(point for point in grid if point.keys <= max_keys)
    if not points:
        raise ValueError(f"max_keys must be {min(KEYS)} or more, got {max_keys}")
    return points


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
        entries.append(f"{_span(sizes[0], sizes[-1])}:{'sparse' if win else 'split'}")
    return ",".join(entries)


def _span(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else f"{first}"
