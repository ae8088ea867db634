from pathlib import Path

from sparse_mla_verify.bench import (
    command,
    page,
)
from sparse_mla_verify.bench.grid import (
    CHECKPOINT,
)
from sparse_mla_verify.bench.results import (
    Run,
)
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.terminal.page_figures import FIGURE_MARKS, between_marks

ROOT = Path(__file__).parents[4]


def test_the_page_has_every_point_of_ours_and_the_targets(result_of, grid_run):
    lost = Point(8, 128, 2048)
    run = grid_run(ours=0.3, wins=lambda point: point != lost)
    wide = [result_of(CHECKPOINT, ours_narrow=8.0, ours_wide=8.14, flashmla_narrow=12.0)]
    host = {"run_sparse": {"median": 9.04, "low": 8.0, "high": 10.0}}
    run = Run(run.about | {"command": "the command"}, run.results, wide, host)
    text = page.markdown(run, Path("figures/latency.svg"))
    lines = text.splitlines()
    about = "a GPU, driver 1, 2000-01-01: `the command`."
    assert lines[0] == f"{about} Times are medians, in microseconds for one launch."
    assert "(figures/latency.svg)" in text
    assert "| geometric mean of ours / FlashMLA | 0.302 | 0.6 | 248 of 248 | yes |" in lines
    assert "| points where ours is not ahead of FlashMLA | 1 | 0 | 248 of 248 | no |" in lines
    assert text.count("0.3 (0.30)") == 255
    assert text.count("**2.0 (2.00)**") == 1
    assert "| `flashmla` |" + " 1.00 |" * 8 in lines
    assert "| 5 |" + " `low-latency` |" * 4 in lines
    assert "| 5 x 96 x 256 | 8.00 | 8.14 | 12.00 |  |" in lines
    assert "| `run_sparse` | 9.0 |" in lines
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert set(tables) == {3, 6, 10}  # every line of a table has as many cells
    assert page.markdown(Run({}, []))


def test_the_page_is_written_by_the_command(tmp_path, grid_run):
    path, page_path, plot = tmp_path / "run.json", tmp_path / "page.md", tmp_path / "f" / "p.svg"
    page_path.write_text("# Title\n\n<!-- figures: by a command -->\nold\n<!-- /figures -->\nend\n")
    run = grid_run()
    run.save(path)
    given = ["table", str(path), "--plot", str(plot), "--into", str(page_path)]
    assert command.main(given) == 0
    text = page_path.read_text()
    assert text == between_marks(text, page.markdown(run, Path("f/p.svg")))
    assert text.startswith("# Title\n\n<!-- figures: by a command -->\n\na GPU, driver 1")
    assert "old" not in text
    assert command.main(given) == 0
    assert page_path.read_text() == text


def test_the_page_has_a_place_for_the_figures():
    assert len(FIGURE_MARKS.findall((ROOT / "docs" / "benchmark.md").read_text())) == 1
