"""Where a launch's time goes, as far as a machine without a GPU goes: patches, code, tables."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparse_mla_verify.audit.collect import dsl_version
from sparse_mla_verify.bench import command, stages, stamps
from sparse_mla_verify.bench.grid import CHECKPOINT, WIDTH
from sparse_mla_verify.bench.results import Result, Run, Spread
from sparse_mla_verify.bench.results import load as load_bench
from sparse_mla_verify.inputs.cases import Signature
from sparse_mla_verify.inputs.schedules import (
    BASE,
    LOW_LATENCY,
    LOW_LATENCY_2,
    LOW_LATENCY_4,
    kernel_schedule,
)
from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.processes.patched_kernel import environment
from sparse_mla_verify.terminal.page_figures import between_marks

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "budget.md"
ABOUT = {
    "gpu": "a GPU",
    "driver": "1",
    "date": "2000-01-01",
    "command": "the command",
    "launches_read": 16,
}

CLOCKS = 9000  # from launch to launch

# Compiles one of the copy's kernels as a run does: hash, whether it spills, clock reads.
COMPILE = """
import re
import sys
import sparse_mla_kernel
from sparse_mla_verify.bench.stages import signatures
from sparse_mla_verify.bench.grid import WIDTH
from sparse_mla_verify.inputs.schedules import kernel_schedule
folder, name = sys.argv[1:]
assert sparse_mla_kernel.__file__.startswith(folder), sparse_mla_kernel.__file__
rows, heads = signatures()[name]
made = sparse_mla_kernel.cross_compile(
    rows, heads, heads, WIDTH, rows, "sm_90a", schedule=kernel_schedule(name)
)
sass = made.sass()
spills = sass.count("STL") + sass.count("LDL") + made.ptx.count(".local")
clock = r"setp[.](neu[.]f32|ne[.]s32) p, .*@p mov[.]u32 \\S+, %clock;"
waits = len(re.findall(clock, made.ptx))
print(made.code_sha256, spills, sass.count("SR_CLOCKLO"), waits)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    pytest.importorskip("sparse_mla_kernel")
    return stamps.stamped(tmp_path_factory.mktemp("stamped"))


# ---- the patches --------------------------------------------------------------------------------


def test_every_stage_is_marked_and_said():
    marked = {mark.stage for mark in stamps.MARKS}
    assert marked | {"store"} == set(stamps.TIMED_STAGES)  # the stores end with the pipeline
    assert stages.SAID.keys() == set(stamps.TIMED_STAGES)
    assert stamps.WORDS % 2 == 0
    assert len(stamps.TIMED_STAGES) <= stamps.WORDS


def test_every_line_to_patch_is_there_once(copy):
    """A mark's line is found once, and the mark stands before it; a change is made once."""
    for name in {mark.file for mark in stamps.MARKS}:
        lines = [
            line.strip() for line in (copy / "sparse_mla_kernel" / name).read_text().split("\n")
        ]
        for mark in (mark for mark in stamps.MARKS if mark.file == name):
            at = [k for k, line in enumerate(lines) if line == mark.statement]
            # A line that is a change's as well no longer stands there as it was.
            start = mark.line.partition("(")[0]
            assert any(lines[k + 1].startswith(start) for k in at), mark
        assert sum(line.startswith("lap(rT") for line in lines) >= sum(
            mark.file == name for mark in stamps.MARKS
        )


@pytest.mark.parametrize(
    "name",
    [
        "kernels/base/decode.py",
        "kernels/base/gather.py",
        "kernels/base/query.py",
        "kernels/base/merge.py",
        "kernels/low_latency/decode.py",
    ],
)
def test_the_copy_without_its_stamps_is_the_source(copy, name):
    """Nothing but the stamps is added: the statements left are the source's, in order."""
    kernel = pytest.importorskip("sparse_mla_kernel")
    source = (Path(kernel.__file__).parent / name).read_text().split("\n")
    patched = (copy / "sparse_mla_kernel" / name).read_text().split("\n")
    for line in source:
        while (text := patched.pop(0)) != line:
            assert "rT" in text or re.search(
                r"laps|sync_threads|\.meet\(\)|head = first_head|^ *\)$", text
            ), text
            if re.sub(r"(self\.)?rT, ", "", text) == line:
                break


def test_a_line_that_is_not_there_once_is_refused():
    mark = stamps.Mark("f.py", "f", "qk", "g()")
    source = "def f():\n    g()\n\n\ndef h():\n    g()\n"
    assert stamps.marked(source, [mark]).split("\n")[1:3] == ["    lap(rT, 7)", "    g()"]
    with pytest.raises(ValueError, match="line to patch once, got 0"):
        stamps.marked(source, [replace(mark, line="x()")])
    with pytest.raises(ValueError, match="line to patch once, got 2"):
        stamps.marked(source.replace("    g()", "    g()\n    g()"), [mark])
    with pytest.raises(ValueError, match="line to patch once, got 0"):
        stamps.marked(source, [replace(mark, function="k")])


def test_a_mark_with_a_value_hands_the_value_to_the_lap():
    assert stamps.Mark("f.py", "f", "ids", "g()", "row_id").statement == "lap(rT, 3, row_id)"


@pytest.mark.compiler
@pytest.mark.parametrize(
    "name",
    [
        BASE,
        LOW_LATENCY_4,
        pytest.param(LOW_LATENCY, marks=pytest.mark.slow),
        pytest.param(LOW_LATENCY_2, marks=pytest.mark.slow),
    ],
)
def test_the_stamped_copy_compiles_without_spills_to_what_was_recorded(copy, name):
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(copy), name],
        env={**environment(copy), "SPARSE_MLA_CACHE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sha256, spills, reads, waits = done.stdout.split()
    assert int(spills) == 0
    assert int(reads) >= 15
    folder = "kernels/base/" if name == BASE else "kernels/low_latency/"
    waited = [mark for mark in stamps.MARKS if mark.value and mark.file.startswith(folder)]
    assert int(waits) >= len(waited) > 0
    about, _ = stages.load(stages.shipped())
    if about["versions"]["dsl"] != dsl_version():
        pytest.skip("another version of the DSL compiles to other code")
    rows, heads = stages.signatures()[name]
    assert about["machine_code"][name] == {Signature(rows, heads, heads, WIDTH, rows).key: sha256}


# ---- stamps to figures --------------------------------------------------------------------------


def outputs(rows, heads, split, cta_heads, clocks, last=lambda launch: CLOCKS * launch - 500):
    """Outputs `[2, rows, heads, 512]` whose stamps are `clocks(launch, row, tile, cta, warp)`."""
    latent = np.full((2, rows, heads, 512), 0x7FC0, np.uint16)
    columns = 512 // split
    for launch, row, tile, cta, warp in np.ndindex(2, rows, heads // cta_heads, split, 8):
        words = np.zeros(stamps.WORDS, np.int32)
        words[: len(stamps.TIMED_STAGES)] = clocks(launch, row, tile, cta, warp)
        words[[stamps.CLOCK, stamps.SM]] = last(launch), cta
        head = latent[launch, row, tile * cta_heads + warp]
        head[cta * columns : cta * columns + 2 * stamps.WORDS] = words.view(np.uint16)
    return latent


@pytest.mark.parametrize(("split", "cta_heads"), [(2, 16), (4, 16), (8, 32)])
def test_stamps_are_read_where_the_copy_writes_them(split, cta_heads):
    def clocks(launch, row, tile, cta, warp):
        number = (((launch * 3 + row) * 2 + tile) * split + cta) * 8 + warp
        return 100_000 + 32 * number + np.arange(len(stamps.TIMED_STAGES))

    latent = outputs(3, 2 * cta_heads, split, cta_heads, clocks)
    words = stages.stamped_words(latent, split, cta_heads, (1, 5))
    assert (words[1, :, :, stamps.CLOCK] == CLOCKS - 500).all()
    found = stages.laps(words)
    assert found.shape == (2, 3 * 2 * split, 2, len(stamps.TIMED_STAGES))
    for launch, k, w in np.ndindex(found.shape[:3]):
        row, tile, cta = k // (2 * split), k // split % 2, k % split
        assert (found[launch, k, w] == clocks(launch, row, tile, cta, (1, 5)[w])).all()


@pytest.mark.parametrize("bits", [0xBF80, 0x3F80, 0x0080, 0x0000])  # -1, 1, 2^-126, 0
def test_outputs_without_stamps_are_refused(bits):
    latent = np.full((1, 1, 16, 512), bits, np.uint16)
    with pytest.raises(ValueError, match="must be stamps"):
        stages.laps(stages.stamped_words(latent, 4, 16, (0, 1)))


def test_the_clock_s_rate_is_that_between_launches_on_one_sm():
    """Other SMs count from elsewhere; a counter of 32 bits may pass its end."""
    words = np.zeros((3, 2, 1, stamps.WORDS), np.int32)
    starts = {7: 2**32 - 100, 8: 5000, 9: 123}
    for launch, sms in enumerate(((7, 8), (8, 7), (9, 7))):
        for cta, sm in enumerate(sms):
            clock = np.uint32((starts[sm] + 9000 * launch) % 2**32)
            words[launch, cta, 0, [stamps.CLOCK, stamps.SM]] = clock.view(np.int32), sm
    assert stages.clock_mhz(words, 5.0) == 1800.0
    assert stages.clock_mhz(words[:1], 5.0) is None


def synthetic(schedule=BASE, point=CHECKPOINT, scale=1):
    """Stage k takes 100 (k + 1) clocks, in one of ten CTAs twice as long; no V is waited for."""
    found = np.tile(100 * np.arange(1, len(stamps.TIMED_STAGES) + 1) * scale, (2, 10, 2, 1))
    found[:, 3] *= 2
    found[..., stamps.TIMED_STAGES.index("values")] = 0
    return stages.summed_up(found, schedule, point, 9.0, 1000)


def test_figures_of_stamps():
    staged = synthetic()
    assert staged.stages["qk"] == Spread(800.0, 800.0, 880.0)
    assert "values" not in staged.stages
    whole = sum(
        100 * (k + 1) for k, name in enumerate(stamps.TIMED_STAGES) if k >= 2 and name != "values"
    )
    assert staged.whole.median == whole
    assert staged.slowest == 2 * whole
    assert staged.us(800.0) == 0.8
    assert replace(staged, sm_mhz=None).us(800.0) is None


def test_records_survive_the_json(tmp_path):
    results = [synthetic(), replace(synthetic(LOW_LATENCY, Point(5, 96, 0)), sm_mhz=None)]
    path = tmp_path / "new" / "stages.json"
    stages.save(path, ABOUT, results)
    assert stages.load(path) == (ABOUT, results)
    path.write_text("[]")
    with pytest.raises(ValueError, match="must be the JSON of stages"):
        stages.load(path)


def test_a_point_is_measured_by_the_middle_launches():
    """With a stand-in for the kernel: each launch's stamps are its number."""
    torch = pytest.importorskip("torch")
    from sparse_mla_verify.peers.implementation import Prepared
    from sparse_mla_verify.peers.workload import Pool

    point = Point(1, 16, 16)

    class Kernel:
        name, schedule = BASE, kernel_schedule(BASE)

        def prepare(self, work):
            assert work.point == point
            words = np.concatenate(
                [
                    outputs(1, 16, 4, 16, lambda *_, k=k: 1000 * k, lambda _, k=k: CLOCKS * k)[:1]
                    for k in range(work.sets)
                ]
            )
            latent = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
            return Prepared([lambda: None] * work.sets, latent)

    class Timer:
        def capture(self, calls):
            times = iter([99.0, *range(1, stages.TRIALS + 1)])
            return lambda: next(times)

    staged = stages._measure_point(Kernel(), point, Timer(), Pool("cpu", rows=64))
    assert staged.launch_us == 5.0  # the first does not count
    assert staged.sm_mhz == CLOCKS / stages.TRIALS  # of the replay whose stamps are read
    # Launches 24 to 39 of 64, of 4 CTAs each
    assert staged.stages["qk"] == Spread(31_500.0, 25_000.0, 38_000.0)


# ---- the page -----------------------------------------------------------------------------------


@pytest.fixture
def bench():
    times = {"base": 8.7, "low-latency": 5.3, "floor": 0.88}
    return Run({}, [Result(CHECKPOINT, 2048, times, {}, 15)])


def test_tables(tmp_path, bench):
    path = tmp_path / "stages.json"
    stages.save(path, ABOUT, [synthetic(), synthetic(LOW_LATENCY, scale=2)])
    text = stages.markdown(path, bench)
    assert "a GPU, driver 1, 2000-01-01: `the command`" in text
    assert "| 5 x 96 x 256 | `base` | `low-latency` |" in text
    assert "| QK | 0.80 (800) | 1.60 (1600) |" in text
    assert "V arrives" not in text
    whole = synthetic().whole.median / 1000
    last = 2 * whole
    rest = f"{9 - last:.2f}"
    shown = f"| 8.70 | 9.00 | {whole:.2f} | {last:.2f} | {rest} | 0.88 |"
    assert f"| 5 x 96 x 256 `base` {shown}" in text
    assert f"| sum | {0.88 + whole:.2f} |  |" in text  # base has the least of each


def test_what_was_not_measured_stays_empty(tmp_path):
    path = tmp_path / "stages.json"
    stages.save(path, ABOUT, [replace(synthetic(LOW_LATENCY_4, Point(1, 16, 0)), sm_mhz=None)])
    text = stages.markdown(path, Run({}, []))
    assert "| QK | 800 |" in text
    assert "| 1 x 16 x 0 `low-latency-4` |  | 9.00 |  |  |  |  |" in text
    assert "sum" not in text


def test_a_missing_run_is_said(tmp_path, bench, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: by a command -->\nold\n<!-- /figures -->\n")
    given = ["stages", str(tmp_path / "none.json"), "--into", str(page)]
    assert command.main(given) == 2
    assert "must be the JSON of stages, got" in capsys.readouterr().err
    assert "old" in page.read_text()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": [1]}'])
def test_a_file_that_is_none_is_an_error(content, tmp_path, capsys):
    file = tmp_path / "a.json"
    file.write_text(content)
    assert command.main(["stages", str(file)]) == 2
    assert "must be the JSON of stages" in capsys.readouterr().err


def test_a_run_needs_a_gpu(tmp_path):
    pytest.importorskip("sparse_mla_kernel")
    given = ["bench", "stages", "--out", tmp_path / "s.json"]
    done = subprocess.run(
        [sys.executable, "-m", "sparse_mla_verify", *given],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "need an NVIDIA GPU" in done.stderr
    assert not (tmp_path / "s.json").exists()


# ---- the run that ships -------------------------------------------------------------------------


@pytest.fixture
def shipped():
    return stages.load(stages.shipped())


def test_the_page_shows_the_shipped_run():
    bench = load_bench(stages.shipped().with_name("bench_latency.json"))
    text = PAGE.read_text()
    assert text == between_marks(text, stages.markdown(stages.shipped(), bench))


def test_the_shipped_run_is_of_every_point(shipped):
    about, results = shipped
    assert [(staged.schedule, staged.point) for staged in results] == list(stages.POINTS)
    assert about["machine_code"].keys() == stages.signatures().keys()
    assert all(staged.sm_mhz for staged in results)
    assert "stamped copies" in about["note"]


def test_the_shipped_stages_add_up(shipped):
    """A launch can't take less than its last CTA from the wait's end on."""
    _, results = shipped
    for staged in results:
        assert staged.whole.median <= staged.slowest
        assert staged.us(staged.slowest) < staged.launch_us
        after = [s.median for name, s in staged.stages.items() if name not in ("start", "pdl")]
        assert sum(after) == pytest.approx(staged.whole.median, rel=0.15)
        json.dumps(staged.plain(), allow_nan=False)
