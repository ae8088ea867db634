"""A run as the part of a page that a command writes: Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sparse_mla_verify.bench.grid import CHECKPOINT, FULL, HEADS, KEYS, ROWS
from sparse_mla_verify.bench.results import (
    FLASHMLA,
    HOST,
    NAMES,
    OURS,
    Run,
)
from sparse_mla_verify.bench.summary import in_scope, targets
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.terminal.options import spelled_today

NAMED = {True: "yes", False: "no", None: "not known"}


def markdown(run: Run, figure: Path | None = None) -> str:
    """What was measured on what, the targets, and ours at every point; with a link to the plot."""
    parts = [_about(run), _targets(run), _checkpoint(run)]
    if figure is not None:
        parts.append(
            f"![Time against keys, one line for each implementation]({figure.as_posix()})\n\n"
            "The bands reach from the 10th to the 90th percentile."
        )
    parts += [_grid(run, heads) for heads in HEADS if any(_at(run, heads))]
    parts += [_choice(run), *_wide(run), *_host(run)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _about(run: Run) -> str:
    about = run.about
    left_out = f" {len(run.left_out)} points were left out." if run.left_out else ""
    return (
        f"{about.get('gpu')}, driver {about.get('driver')}, {about.get('date')}: "
        f"`{spelled_today(str(about.get('command')))}`. "
        f"Times are medians, in microseconds for one launch.{left_out}"
    )


def _targets(run: Run) -> str:
    lines = []
    for target in targets(run, FULL):
        figure = "" if target.figure is None else f"{target.figure:.3g}"
        points = f"{target.measured} of {target.expected}"
        lines.append([target.what, figure, f"{target.limit:g}", points, NAMED[target.met]])
    return _table(["target", "figure", "at most", "points", "met"], lines)


def _checkpoint(run: Run) -> str:
    """All implementations at the checkpoint's rows and heads."""
    rows, heads = CHECKPOINT.rows, CHECKPOINT.heads
    results = {k: r for k in KEYS if (r := run.at(Point(rows, heads, k))) is not None}
    names = [name for name in NAMES if any(name in r.times_us for r in results.values())]
    lines = [
        [f"`{name}`", *(_time(r.times_us.get(name), 2) for r in results.values())] for name in names
    ]
    return _table([f"{rows} x {heads}, keys:", *map(str, results)], lines) if lines else ""


def _grid(run: Run, heads: int) -> str:
    """Ours at a head count, with its ratio to FlashMLA."""
    lines = []
    for rows in ROWS:
        cells = []
        for keys in KEYS:
            point = Point(rows, heads, keys)
            result = run.at(point)
            time = _time(result.times_us.get(OURS) if result else None, 1)
            ratio = result.ratio(OURS, FLASHMLA) if result else None
            # Bold where ours ought to be ahead and is not.
            mark = "**" if ratio is not None and ratio >= 1 and in_scope(point) else ""
            cells.append(time if ratio is None else f"{mark}{time} ({ratio:.2f}){mark}")
        if any(cells):
            lines.append([str(rows), *cells])
    title = f"`ours` at {heads} heads (in brackets: its time divided by FlashMLA's):"
    return f"{title}\n\n{_table(['rows, keys:', *map(str, KEYS)], lines)}"


def _choice(run: Run) -> str:
    """Which schedule is ours."""
    chosen = {(r.point.rows, r.point.heads): r.notes.get(OURS) for r in run.results}
    lines = [
        [str(rows), *(f"`{name}`" if (name := chosen.get((rows, h))) else "" for h in HEADS)]
        for rows in ROWS
        if any(chosen.get((rows, h)) for h in HEADS)
    ]
    if not lines:
        return ""
    return f"`ours` is this schedule:\n\n{_table(['rows, heads:', *map(str, HEADS)], lines)}"


def _wide(run: Run) -> Iterator[str]:
    if run.wide:
        names = [f"{of}_{which}" for of in (OURS, FLASHMLA) for which in ("narrow", "wide")]
        lines = [
            [str(r.point), *(_time(r.times_us.get(name), 2) for name in names)] for r in run.wide
        ]
        yield "Narrow lists have as many ids as there are keys. Wide lists have 2048 ids:"
        yield _table(["rows x heads x keys", *(f"`{name}`" for name in names)], lines)


def _host(run: Run) -> Iterator[str]:
    if run.host_us:
        lines = [[f"`{name}`", f"{t['median']:.1f}"] for name, t in run.host_us.items()]
        yield f"This is the host time of one eager call. Our figure is that of `{HOST}`:"
        yield _table(["call", "us"], lines)


def _at(run: Run, heads: int) -> Iterator[bool]:
    return (result.point.heads == heads for result in run.results)


def _time(time_us: float | None, places: int) -> str:
    return "" if time_us is None else f"{time_us:.{places}f}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))
