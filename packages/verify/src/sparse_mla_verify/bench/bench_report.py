"""A run as a table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from sparse_mla_verify.bench.grid import FULL
from sparse_mla_verify.bench.page import NAMED
from sparse_mla_verify.bench.results import (
    FLASHMLA,
    FLOOR,
    NAMES,
    OURS,
    PYTORCH,
    Result,
    Run,
)
from sparse_mla_verify.bench.summary import targets
from sparse_mla_verify.inputs.schedules import (
    BASE,
    LOW_LATENCY,
    LOW_LATENCY_2,
    LOW_LATENCY_4,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Name, colour and marker: fixed, so that an implementation looks the same in every run's plot.
STYLE = {
    OURS: ("ours", "#0072B2", "o"),
    BASE: ("base schedule", "#56B4E9", "s"),
    FLASHMLA: ("FlashMLA", "#D55E00", "^"),
    PYTORCH: ("PyTorch", "#999999", "v"),
    FLOOR: ("floor: empty cluster kernel", "#000000", ""),
    LOW_LATENCY: ("low-latency, split 8", "#009E73", ""),
    LOW_LATENCY_4: ("low-latency, split 4", "#E69F00", ""),
    LOW_LATENCY_2: ("low-latency, split 2", "#CC79A7", ""),
}
OF_OURS = (LOW_LATENCY, LOW_LATENCY_4, LOW_LATENCY_2)  # thin: ours is one of them
OTHERS = ("#F0E442", "#882255", "#44AA99", "#AA4499")
PANELS = 4


def print_report(console: Console, run: Run) -> None:
    """All points, the wide lists, host times, and the targets."""
    console.print(points_table(run))
    if run.wide:
        console.print(_wide_table(run.wide))
    for name, spread in run.host_us.items():
        tails = _range(spread["low"], spread["high"])
        text = f"host time of {name}: {spread['median']:.1f} us a call (10-90%: {tails})"
        console.print(text, markup=False, highlight=False)
    console.print(_targets_table(run))
    if run.left_out:
        console.print(f"{len(run.left_out)} points were left out: the budget was spent")


def points_table(run: Run) -> Table:
    """A line a point: microseconds, how far ours spreads, and ratios."""
    table = _table(f"us a launch, medians. {_title(run)}", "rows x heads x keys", *run.names)
    pairs = [(OURS, to) for to in (BASE, FLASHMLA) if {OURS, to} <= set(run.names)]
    table.add_column("ours 10-90%", justify="right")
    for of, to in pairs:
        table.add_column(f"{of}/{to}", justify="right")
    for result in sorted(run.results, key=lambda result: result.point):
        ratios = [result.ratio(of, to) for of, to in pairs]
        table.add_row(
            str(result.point),
            *(_median(result, name) for name in run.names),
            _range(*result.spread_us[OURS]) if OURS in result.spread_us else "",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    return table


def _wide_table(results: Sequence[Result]) -> Table:
    names = list(dict.fromkeys(name for result in results for name in result.times_us))
    title = "us a launch with lists as wide as the keys (narrow) and as wide as ever (wide)"
    table = _table(title, "rows x heads x keys", *names)
    for result in results:
        table.add_row(str(result.point), *(_median(result, name) for name in names))
    return table


def _targets_table(run: Run) -> Table:
    table = _table("targets", "target", "figure", "at most", "points", "met")
    for target in targets(run, FULL):
        figure = "" if target.figure is None else f"{target.figure:.3g}"
        points = f"{target.measured} of {target.expected}"
        table.add_row(target.what, figure, f"{target.limit:g}", points, NAMED[target.met])
    return table


def _title(run: Run) -> str:
    about = run.about
    return f"{about.get('gpu')}, driver {about.get('driver')}, {about.get('date')}"


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _median(result: Result, name: str) -> str:
    if name not in result.times_us:
        return "failed" if name in result.failed else ""
    return f"{result.times_us[name]:.2f}"


def _range(low: float, high: float) -> str:
    return f"{low:.2f}-{high:.2f}"


def write_plot(path: Path, run: Run) -> None:
    """Time against keys, a panel a batch shape, a line an implementation.

    The suffix says the format. Raises ValueError if no shape has at least two key counts.
    """
    shapes = shown_shapes(run.results)
    if not shapes:
        raise ValueError("the run must have a batch shape with two key counts, got none")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(2, len(shapes))
    lines = -(-len(shapes) // columns)
    with mpl.rc_context({"svg.hashsalt": "bench", "font.size": 9}):
        size = (5.6 * columns + 0.4, 3.4 * lines + 0.9)
        figure, grid = plt.subplots(lines, columns, figsize=size, layout="constrained")
        panels = list(grid.flat) if len(shapes) > 1 else [grid]
        for axes, shape in zip(panels, shapes, strict=False):
            _panel(axes, run, shape)
        for axes in panels[len(shapes) :]:
            axes.axis("off")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
        figure.supxlabel(f"keys a row. {_title(run)}", fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a date, so that the same run gives the same bytes.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
        plt.close(figure)


def shown_shapes(results: Sequence[Result]) -> list[tuple[int, int]]:
    """Up to four `(rows, heads)` with the most key counts, 96 heads before others."""
    counts: dict[tuple[int, int], int] = {}
    for result in results:
        shape = (result.point.rows, result.point.heads)
        counts[shape] = counts.get(shape, 0) + 1
    several = {shape: count for shape, count in counts.items() if count > 1}
    wanted = [(rows, 96) for rows in (1, 5, 8, 16)]
    ranked = sorted(several, key=lambda shape: (-several[shape], shape not in wanted, shape))
    return sorted(ranked[:PANELS])


def _panel(axes: Axes, run: Run, shape: tuple[int, int]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    results = sorted(
        (r for r in run.results if (r.point.rows, r.point.heads) == shape), key=lambda r: r.point
    )
    # Equal steps: the key counts double, and there is 0.
    places = range(len(results))
    extra = iter(OTHERS * len(run.names))
    for name in (*filter(run.names.__contains__, NAMES), *(n for n in run.names if n not in NAMES)):
        label, color, marker = STYLE.get(name) or (name, next(extra), ".")
        there = [k for k in places if name in results[k].times_us]
        times = [results[k].times_us[name] for k in there]
        style = "--" if name == FLOOR else "-"
        width = 0.8 if name in OF_OURS else 1.4
        look: dict[str, Any] = {
            "color": color,
            "marker": marker,
            "ms": 4,
            "lw": width,
            "label": label,
        }
        axes.plot(there, times, style, zorder=3 if name == OURS else 2, **look)
        if name in OF_OURS:
            continue
        low = [results[k].spread_us[name][0] for k in there]
        high = [results[k].spread_us[name][1] for k in there]
        axes.fill_between(there, low, high, color=color, alpha=0.2, lw=0)
    axes.set_xticks(list(places), [str(result.point.keys) for result in results])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("us a launch")
    axes.set_title(
        f"{shape[0]} {'row' if shape[0] == 1 else 'rows'} x {shape[1]} heads", fontsize=9
    )
    axes.grid(True, axis="y", which="both", lw=0.3, alpha=0.6)
