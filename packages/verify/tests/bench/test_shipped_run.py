from pathlib import Path

import pytest

import sparse_mla_kernel.host.policy as kernel_policy
from sparse_mla_verify.audit.collect import cross_compiled, dsl_version
from sparse_mla_verify.bench import (
    command,
    page,
    policy_tables,
    summary,
)
from sparse_mla_verify.bench.grid import (
    CHECKPOINT,
    FULL,
)
from sparse_mla_verify.bench.results import (
    SCHEDULES,
    load,
)
from sparse_mla_verify.bench.timed_points import disagreeing
from sparse_mla_verify.inputs.cases import Signature
from sparse_mla_verify.terminal.page_figures import between_marks

ROOT = Path(__file__).parents[4]
SHIPPED = Path(command.__file__).parents[1] / "data" / "bench_latency.json"


@pytest.fixture
def shipped():
    return load(SHIPPED)


@pytest.mark.compiler
def test_the_shipped_run_is_of_todays_code(shipped):
    """At the checkpoint, on every schedule; what runs is compiled here again."""
    point = shipped.at(CHECKPOINT)
    for name in SCHEDULES:
        sizes = (CHECKPOINT.rows, CHECKPOINT.heads, CHECKPOINT.heads, point.width, CHECKPOINT.rows)
        recorded = shipped.about["machine_code"][name][Signature(*sizes).key]
        if shipped.about["versions"]["dsl"] != dsl_version():
            pytest.skip("another version of the DSL compiles to other code")
        assert cross_compiled(Signature(*sizes, name), "sm_90a").code_sha256 == recorded, name


def test_the_shipped_run_is_of_the_whole_grid_and_computed_the_right_thing(shipped):
    assert shipped.left_out == []
    assert {result.point for result in shipped.results} == set(FULL)
    assert disagreeing([*shipped.results, *shipped.wide]) == []
    assert all("flashmla_wide" in result.times_us for result in shipped.wide)


def test_the_shipped_tables_are_what_the_command_makes_of_the_shipped_run(shipped):
    part, max_keys = policy_tables.part_of(Path(kernel_policy.__file__).read_text())
    assert max_keys is not None, "the tables are not written by the command"
    text, chosen = policy_tables.code(shipped, max_keys=max_keys)
    assert part == text
    assert chosen == shipped  # its times of ours are those of the shipped table


def test_the_page_shows_the_shipped_run(shipped):
    text = (ROOT / "docs" / "benchmark.md").read_text()
    assert text == between_marks(text, page.markdown(shipped, Path("figures/latency.svg")))


def test_the_readme_shows_the_shipped_run(shipped):
    """The figures at the checkpoint and of the whole scope; a new run needs a new text."""
    readme = " ".join((Path(__file__).parents[4] / "README.md").read_text().split())
    times = shipped.at(CHECKPOINT).times_us
    said = f"takes {times['ours']:.2f} us, FlashMLA's sparse decode {times['flashmla']:.2f} us"
    assert f"{said}, and the base schedule {times['base']:.2f} us." in readme
    met = {target.what: target for target in summary.targets(shipped, FULL)}
    behind = met["points where ours is not ahead of FlashMLA"]
    mean = met["geometric mean of ours / FlashMLA"]
    assert behind.figure == 0
    assert f"each of the {behind.measured} points" in readme
    assert f"takes {mean.figure:.2f} of FlashMLA's time in the geometric mean" in readme
