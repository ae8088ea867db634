import pytest
from rich.console import Console

from sparse_mla_verify.bench import (
    bench_report,
)
from sparse_mla_verify.bench.grid import (
    CHECKPOINT,
    QUICK,
)
from sparse_mla_verify.bench.results import (
    Result,
    Run,
)
from sparse_mla_verify.peers.point import Point


def test_the_report_shows_points_ratios_and_failures(capsys, result_of, grid_run):
    run = grid_run(points=QUICK)
    failed = Result(Point(16, 96, 256), 2048, {"ours": 1.0}, {"ours": (1.0, 1.0)}, 9,
                    failed={"flashmla": "why"})  # fmt: skip
    wide = [result_of(CHECKPOINT, ours_narrow=8.0, ours_wide=8.1)]
    host = {"run_sparse": {"median": 9.0, "low": 8.0, "high": 10.0}}
    run = Run(run.about, [*run.results[:-1], failed], wide, host, [Point(1, 16, 0)])
    bench_report.print_report(Console(width=160), run)
    shown = capsys.readouterr().out
    for words in (
        "5 x 96 x 256",
        "0.40-0.60",
        "ours/flashmla",
        "failed",
        "8.10",
        "9.0 us a call (10-90%: 8.00-10.00)",
        "not known",
        "1 points were left out",
    ):
        assert words in shown


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_plot(tmp_path, suffix, grid_run):
    path = tmp_path / f"plot{suffix}"
    run = grid_run()
    results = [
        Result(**{**vars(r), "times_us": {**r.times_us, "split=8": 0.7},
                  "spread_us": {**r.spread_us, "split=8": (0.6, 0.8)}})
        for r in run.results
    ]  # fmt: skip
    bench_report.write_plot(path, Run(run.about, results))
    assert path.stat().st_size > 5000
    if suffix == ".svg":
        again = tmp_path / "again.svg"
        bench_report.write_plot(again, Run(run.about, results))
        assert again.read_text() == path.read_text()


def test_the_plot_shows_what_has_several_key_counts(tmp_path, grid_run):
    assert bench_report.shown_shapes(grid_run().results) == [(1, 96), (5, 96), (8, 96), (16, 96)]
    assert bench_report.shown_shapes(grid_run(points=QUICK).results) == [(5, 96), (16, 96)]
    bench_report.write_plot(tmp_path / "quick.svg", grid_run(points=QUICK))
    with pytest.raises(ValueError, match="two key counts"):
        bench_report.write_plot(tmp_path / "none.svg", grid_run(points=[CHECKPOINT]))
