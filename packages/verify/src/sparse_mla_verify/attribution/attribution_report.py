"""Attributions as tables, as Markdown and as a plot."""

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from sparse_mla_verify.attribution.attribute import COSTS, Attribution
from sparse_mla_verify.models.altered_reference import STAGES
from sparse_mla_verify.models.counterfactuals import BY_NAME
from sparse_mla_verify.terminal.page_figures import between_marks

NOTHING = 1e-9  # float64's own roundings
LEAST = 1e-7  # of the plot's colours: smaller changes count as zero
THEMES = {"light": ("black", "viridis"), "dark": ("white", "viridis")}


def _number(x: float) -> str:
    return "0" if x < NOTHING else f"{x:.3f}" if x >= 0.001 else f"{x:.0e}"


def rows(found: Sequence[Attribution]) -> tuple[list[list[str]], list[list[str]]]:
    """The cells of both tables: changes by rounding, and whole errors by counterfactual."""
    changes = [
        [about, *(_number(a.steps[k].change.ulp) for a in found)]
        for k, about in enumerate(STAGES.values())
        if about != STAGES["lse"]
    ]
    changes.append(["the kernel's error", *(_number(a.error.ulp) for a in found)])
    changes.append(["relative", *(f"{a.error.relative:.1e}" for a in found)])
    changes.append(["worst", *(f"{a.error.worst_ulp:.2f}" for a in found)])
    changes.append(["LSE, largest error", *(f"{a.error.lse:.0e}" for a in found)])
    changes.append(["recorded tiles that differ", *(_residual(a) for a in found)])
    costs = [["the kernel's", *(_number(a.error.ulp) for a in found)]]
    for k, name in enumerate(COSTS):
        cells = [f"{_number(a.costs[k].error.ulp)}{_lse(a, k)}" for a in found]
        costs.append([f"{name}: {BY_NAME[name].about}", *cells])
    return changes, costs


def _residual(a: Attribution) -> str:
    return "not recorded" if a.tiles_differing is None else f"{a.tiles_differing} of {a.tiles}"


def _lse(a: Attribution, k: int) -> str:
    """The LSE's error where the counterfactual makes it ten times the kernel's."""
    lse = a.costs[k].error.lse
    return f" (LSE {lse:.0e})" if lse > 10 * a.error.lse else ""


TITLES = (
    "What each rounding changes, in BF16 ULP of a row's largest latent (RMS)",
    "The whole error under each counterfactual, in the same unit",
)


def tables(found: Sequence[Attribution]) -> list[Table]:
    """Both tables for the terminal, with a column for each family."""
    made = []
    for title, head, cells in zip(TITLES, ("rounding", "a kernel that"), rows(found), strict=True):
        table = Table(title=title, title_justify="left")
        table.add_column(head, overflow="fold", min_width=20)
        for a in found:
            table.add_column(a.family, justify="right", overflow="fold")
        for row in cells:
            table.add_row(*row)
        made.append(table)
    return made


def markdown(found: Sequence[Attribution], plots: str) -> str:
    """Both tables as Markdown, and the picture of `plots`, a folder relative to the page."""
    parts = [
        f'<picture>\n<source media="(prefers-color-scheme: dark)" '
        f'srcset="{plots}/attribution-dark.svg">\n'
        f'<img alt="What each rounding and each counterfactual costs, by family" '
        f'src="{plots}/attribution-light.svg">\n</picture>'
    ]
    for title, head, cells in zip(TITLES, ("rounding", "a kernel that"), rows(found), strict=True):
        lines = [f"| {head} | {' | '.join(a.family for a in found)} |"]
        lines.append("|---|" + "---:|" * len(found))
        lines += [f"| {' | '.join(row)} |" for row in cells]
        parts += [f"### {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def write_into(page: Path, found: Sequence[Attribution]) -> None:
    """Write the tables between a page's marks and the plots into `figures` beside it."""
    folder = page.parent / "figures"
    folder.mkdir(exist_ok=True)
    for theme in THEMES:
        (folder / f"attribution-{theme}.svg").write_bytes(plot(found, theme))
    page.write_text(between_marks(page.read_text(), markdown(found, "figures")))


def plot(found: Sequence[Attribution], theme: str) -> bytes:
    """Both tables as maps of colour on a transparent ground, as SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ink, colours = THEMES[theme]
    settings: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink
    )
    settings |= {"axes.edgecolor": ink, "font.size": "9", "svg.hashsalt": "attribution"}
    stages = [s for s in STAGES if s != "lse"]
    changes = [[a.steps[list(STAGES).index(s)].change.ulp for a in found] for s in stages]
    costs = [[c.error.ulp for c in (a.costs[k] for a in found)] for k in range(len(COSTS))]
    costs = [[a.error.ulp for a in found], *costs]
    with mpl.rc_context(settings):
        size = (7.5, 2.0 + 0.3 * (len(stages) + len(costs)))
        figure, axes = plt.subplots(2, 1, figsize=size, layout="constrained")
        _map(axes[0], stages, changes, found, colours)
        axes[0].set_title("change by each rounding, BF16 ULP of a row's largest (RMS)")
        _map(axes[1], ["the contract", *COSTS], costs, found, colours)
        axes[1].set_title("whole error, same unit")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return buffer.getvalue()


def _map(
    axes: Any,
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    found: Sequence[Attribution],
    colours: str,
) -> None:
    shades = [[math.log10(max(v, LEAST)) for v in row] for row in values]
    axes.imshow(shades, aspect="auto", cmap=colours, vmin=math.log10(LEAST), vmax=1.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(len(found)), [a.family for a in found], rotation=25, ha="right")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            ink = "black" if shades[y][x] > -1.5 else "white"
            axes.text(x, y, _number(value), ha="center", va="center", color=ink, fontsize=7)


def encoded(found: Sequence[Attribution], theme: str) -> str:
    """The plot as the base64 of an SVG."""
    return base64.b64encode(plot(found, theme)).decode()
