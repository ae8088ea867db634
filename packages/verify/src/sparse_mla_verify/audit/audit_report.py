"""Reports of an audit: the terminal's tables, JSON, and one self-contained HTML page."""

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparse_mla_verify.attribution import attribution_report
from sparse_mla_verify.attribution.attribute import Attribution
from sparse_mla_verify.audit.claims import (
    Claim,
    Status,
    Verdict,
    all_claims,
    exit_status,
)
from sparse_mla_verify.evidence.evidence import (
    LIVE,
    RECORDED,
    CaseEvidence,
    Evidence,
)
from sparse_mla_verify.evidence.recordings import Host, Outcome, Recording
from sparse_mla_verify.measure.ulp_errors import UlpErrors, bin_labels

Results = Sequence[tuple[Claim, Verdict]]

_STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.UNDECIDED: "yellow"}
THEMES = attribution_report.THEMES
_TEMPLATE = Path(__file__).parents[1] / "data" / "report.html.j2"


@dataclass(frozen=True)
class FamilyFigures:
    """A family's results in one line."""

    name: str
    cases: int
    tiles: int
    tiles_differing: int
    lse_differing: int
    latent_errors: UlpErrors
    row_errors: UlpErrors
    lse_errors: UlpErrors
    outside_bound: int
    worst_share: float


def family_figures(evidence: Evidence) -> list[FamilyFigures]:
    """The figures of every family, in the order of the cases."""
    grouped: dict[str, list[CaseEvidence]] = {}
    for case in evidence.cases:
        grouped.setdefault(case.case.family, []).append(case)
    return [_figures(name, group) for name, group in grouped.items()]


def _figures(name: str, group: Sequence[CaseEvidence]) -> FamilyFigures:
    assessed = [c.assessment for c in group]
    return FamilyFigures(
        name=name,
        cases=len(group),
        tiles=sum(c.case.tiles for c in group),
        tiles_differing=sum(c.tiles_differing for c in group),
        lse_differing=sum(c.lse_differing for c in group),
        latent_errors=sum((a.latent_errors for a in assessed), UlpErrors()),
        row_errors=sum((a.row_errors for a in assessed), UlpErrors()),
        lse_errors=sum((a.lse_errors for a in assessed), UlpErrors()),
        outside_bound=sum(a.bounds.outside for a in assessed),
        worst_share=max(a.bounds.worst_share for a in assessed),
    )


def source_line(evidence: Evidence) -> str:
    """Where the kernel's bits come from, in words."""
    host = evidence.host
    if host is None:
        return "no GPU and no recording: the compiled code alone"
    where = f"{host.gpu}, driver {host.driver}, CUDA {host.cuda}, DSL {host.dsl}"
    if evidence.source == LIVE:
        return f"run on this computer: {where}"
    if evidence.source == RECORDED:
        return f"recorded on {host.date}: {where}"
    return f"{evidence.source}, no results of a kernel: {where}"


# The terminal


def print_report(console: Console, evidence: Evidence, results: Results) -> None:
    """The claims, the families and the histogram."""
    console.print(claims_table(results))
    for name, verdict in ((c.name, v) for c, v in results if v.status is not Status.PASS):
        for detail in verdict.details:
            console.print(f"{name}: {detail}", style=_STYLES[verdict.status], markup=False)
    families = family_figures(evidence)
    if families:
        console.print(families_table(families))
        console.print(histogram_table(families))
    console.print(f"Source: {source_line(evidence)}", markup=False)


def claims_table(results: Results) -> Table:
    """A line for each claim."""
    table = Table(title="Claims", title_justify="left", expand=False)
    for column in ("", "claim", "figures"):
        table.add_column(column, overflow="fold")
    for claim, verdict in results:
        style = _STYLES[verdict.status]
        text = f"[bold]{claim.name}[/bold]\n{claim.statement}"
        table.add_row(f"[{style}]{verdict.status.value}[/{style}]", text, verdict.figures)
    return table


def families_table(families: Sequence[FamilyFigures]) -> Table:
    """A line for each family of cases."""
    table = Table(
        title="Families: latent errors against the exact answer, in BF16 ULP", title_justify="left"
    )
    table.add_column("family", no_wrap=True)
    numbers = ("cases", "tiles", "differ", "<= 0.5", "row's worst", "of bound")
    for column in numbers:
        table.add_column(column, justify="right")
    for f in families:
        e = f.latent_errors
        correct = e.counts[0] / max(1, sum(e.counts))
        table.add_row(
            f.name,
            str(f.cases),
            f"{f.tiles:,}",
            str(f.tiles_differing),
            f"{correct:.1%}",
            f"{f.row_errors.worst:.2f}",
            f"{f.worst_share:.3f}",
        )
    return table


def histogram_table(families: Sequence[FamilyFigures]) -> Table:
    """The latents' errors over all families in BF16 ULP, of each element and of its row."""
    own = sum((f.latent_errors for f in families), UlpErrors())
    row = sum((f.row_errors for f in families), UlpErrors())
    table = Table(title="Latent errors in BF16 ULP, all families", title_justify="left")
    for column in ("ULP", "of the element", "", "of the row's largest", ""):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    total = max(1, own.elements)
    labels = (*bin_labels(), "same NaN or inf", "unordered")
    for k, label in enumerate(labels):
        cells = [label]
        for errors in (own, row):
            count = (*errors.counts, errors.matched, errors.unordered)[k]
            cells += [f"{count:,}", f"{count / total:7.3%} " + "█" * round(10 * count / total)]
        table.add_row(*cells)
    return table


# Files


def write_report(
    folder: Path,
    evidence: Evidence,
    results: Results,
    attributed: Sequence[Attribution] = (),
) -> Path:
    """Write `report.json` and `report.html` into a folder, made if need be; the HTML's path."""
    from jinja2 import Environment

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(
        json.dumps(plain(evidence, results, attributed), indent=1) + "\n"
    )
    families = family_figures(evidence)
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _TEMPLATE.read_text()
    )
    path = folder / "report.html"
    path.write_text(
        page.render(
            source=source_line(evidence),
            results=results,
            evidence=evidence,
            families=families,
            labels=bin_labels(),
            plots={theme: _plot(families, theme) for theme in THEMES} if families else {},
            attributed=attributed,
            attribution=_attribution(attributed),
            counts={s.value: sum(v.status is s for _, v in results) for s in Status},
        )
    )
    return path


def _attribution(attributed: Sequence[Attribution]) -> dict[str, Any]:
    """What the page shows of the attributions: plots by theme, and both tables' cells."""
    if not attributed:
        return {}
    plots = {theme: attribution_report.encoded(attributed, theme) for theme in THEMES}
    cells = zip(attribution_report.TITLES, attribution_report.rows(attributed), strict=True)
    return {"plots": plots, "tables": list(cells)}


def plain(
    evidence: Evidence, results: Results, attributed: Sequence[Attribution] = ()
) -> dict[str, Any]:
    """An audit as JSON holds it."""
    return {
        "exit_status": exit_status(v for _, v in results),
        "source": evidence.source,
        "host": asdict(evidence.host) if evidence.host else None,
        "claims": [
            {
                "name": claim.name,
                "statement": claim.statement,
                "stage": claim.stage,
                "kind": claim.kind,
                "status": verdict.status.value,
                "figures": verdict.figures,
                "details": list(verdict.details),
            }
            for claim, verdict in results
        ],
        "trials": [asdict(trial) for trial in evidence.trials.values()],
        "families": [asdict(f) for f in family_figures(evidence)],
        "attribution": [asdict(a) for a in attributed],
        "machine_code": dict(evidence.machine_code),
        "notes": list(evidence.notes),
    }


def _plot(families: Sequence[FamilyFigures], theme: str) -> str:
    """Histograms of the latents' errors per family, as the base64 of an SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    labels = bin_labels()
    ink = THEMES[theme][0]
    settings: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink
    )
    settings |= {"axes.edgecolor": ink, "svg.hashsalt": "audit", "font.size": "9"}
    with mpl.rc_context(settings):
        size = (10, 0.34 * len(families) + 1.2)
        figure, both = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
        names = [f.name for f in families]
        colors = mpl.colormaps["viridis"]
        sides = (
            ("of the element", [f.latent_errors for f in families]),
            ("of the row's largest element", [f.row_errors for f in families]),
        )
        for axes, (of, errors) in zip(both, sides, strict=True):
            left = [0.0] * len(families)
            for k, label in enumerate(labels):
                share = [_share(e, k) for e in errors]
                color = colors(k / (len(labels) - 1))
                axes.barh(names, share, left=left, label=label, color=color)
                left = [a + b for a, b in zip(left, share, strict=True)]
            axes.set(xlabel=f"share of latents, by error in BF16 ULP {of}", xlim=(0, 1))
        both[0].invert_yaxis()
        both[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()


def _share(errors: UlpErrors, bin_index: int) -> float:
    return errors.counts[bin_index] / max(1, sum(errors.counts))


# Pages: the README's sentences, and the tables of all claims

# Words of older recordings, and those that the claims use today.
_OLDER_WORDS = (
    (r"([\w-]+): ([\d,]+ of [\d,]+) elements tell it apart", r"\2 elements reject \1"),
    (
        r"; the worst uses ([\d.]+) of its bound; ([\d,]+) have none",
        r"; the largest error is \1 of its bound; \2 have no finite bound",
    ),
    (
        r"\(row, 16 heads\) tiles differ; ([\d,]+) BF16 elements",
        r"tiles (16 heads of a row) differ; they hold \1 BF16 elements",
    ),
    ("keep both poisons", "keep the poison in both runs"),
    ("elements past them changed", "other elements changed"),
    ("elements of such rows differ from that", "elements of such rows are otherwise"),
    ("elements are NaN or not against that", "elements are wrongly NaN, or wrongly not NaN"),
    ("cubins differ", "kernels differ"),
)


def _figures_today(outcome: Outcome) -> str:
    """The figures of a recorded outcome, in the words that the claims use today."""
    figures = outcome.figures
    for older, today in _OLDER_WORDS:
        figures = re.sub(older, today, figures)
    if outcome.kind == "structural":
        figures = re.sub(r"^(\d+ of \d+)(: |; of the first, )", r"\1 kernels; the first: ", figures)
    return figures


def figures_markdown(recording: Recording) -> str:
    """What a recorded run found, in the two sentences that the README shows."""
    host = recording.host
    where = f"{host.gpu}, driver {host.driver}, CUDA {host.cuda}, DSL {host.dsl}, {host.date}"
    passed = sum(o.status == Status.PASS.value for o in recording.outcomes)
    elements = sum(case.elements for case in recording.cases)
    return (
        f"{where}:\n{passed} of {len(recording.outcomes)} claims passed. {elements:,} outputs were "
        "compared with the model, bit for bit.\n"
    )


def claims_markdown(shipped: Mapping[str, Recording]) -> str:
    """Every claim of every schedule's recording, structural ones too: a section each."""
    return "\n".join(
        _claims_section(f"The {schedule} schedule", recording.host, recording.outcomes)
        for schedule, recording in shipped.items()
    )


def apart_markdown(apart: Sequence[tuple[str, Host, Sequence[Outcome]]]) -> str:
    """The claims that have recordings of their own: a section each, with its head and machine."""
    return "\n".join(_claims_section(*section) for section in apart)


def _claims_section(head: str, host: Host, outcomes: Sequence[Outcome]) -> str:
    """Recorded outcomes under a head; a claim that is still made is shown as it is stated today."""
    where = f"Recorded on {host.date}: {host.gpu}, driver {host.driver}."
    stated = {claim.name: claim.statement for claim in all_claims()}
    lines = [
        f"| `{o.name}` | {stated.get(o.name, o.statement)} | {o.kind} | {o.status} | "
        f"{_figures_today(o)} |"
        for o in outcomes
    ]
    table = ["| claim | | decided by | verdict | figures |", "|---|---|---|---|---|", *lines]
    return f"## {head}\n\n{where}\n\n" + "\n".join(table) + "\n"


def outcomes_of(results: Results) -> tuple[Outcome, ...]:
    """The verdicts as a recording keeps them."""
    return tuple(
        Outcome(c.name, c.statement, c.kind, v.status.value, v.figures) for c, v in results
    )
