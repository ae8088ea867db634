"""The stage trace, as far as a machine without a GPU goes: builds, comparison, recording."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparse_mla_reference import CONTRACT, bf16, e4m3
from sparse_mla_reference.softmax import bias
from sparse_mla_verify.__main__ import main
from sparse_mla_verify.audit.collect import dsl_version
from sparse_mla_verify.gpu_runs import present
from sparse_mla_verify.inputs.schedules import BASE, LOW_LATENCY, REFERENCE
from sparse_mla_verify.measure.predict import predict
from sparse_mla_verify.processes.patched_kernel import environment
from sparse_mla_verify.stage_trace import command, debug_build, kernel_run
from sparse_mla_verify.stage_trace.areas import NOT_STORED, OUTPUTS, STORED, Areas
from sparse_mla_verify.stage_trace.comparison import (
    compare_stages,
    first_differing,
    place,
    reference_stages,
)
from sparse_mla_verify.stage_trace.kernel_run import KernelRun
from sparse_mla_verify.stage_trace.small_cases import case_named, small_cases

# Compiles the debug build of a schedule with each choice of stages: hash, stores, spills.
COMPILE = """
import json, sys
import sparse_mla_kernel
from sparse_mla_kernel import stage_stores
from sparse_mla_verify.gpu_runs.gpu import signature_arguments
from sparse_mla_verify.inputs.schedules import kernel_schedule
from sparse_mla_verify.stage_trace.small_cases import case_named
folder, case, schedule, choices = sys.argv[1:]
assert sparse_mla_kernel.__file__.startswith(folder), sparse_mla_kernel.__file__
for stages in json.loads(choices):
    stage_stores.STORED = tuple(stages)
    sizes = signature_arguments(case_named(case, schedule).signature)
    made = sparse_mla_kernel.cross_compile(*sizes, "sm_90a", schedule=kernel_schedule(schedule))
    sass = made.sass()
    print(made.code_sha256, sass.count("STG"), sass.count("STL") + sass.count("LDL"))
"""


def compiled(folder, case, schedule, choices):
    """Hash, stores to global memory and spills of each choice of stages."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(folder), case, schedule, json.dumps(choices)],
        env={**environment(folder), "SPARSE_MLA_CACHE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(sha256, int(stores), int(spills)) for sha256, stores, spills in lines]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    pytest.importorskip("sparse_mla_kernel")
    return debug_build.debug_build(tmp_path_factory.mktemp("debug"))


@pytest.fixture(scope="module")
def few_keys():
    return small_cases(LOW_LATENCY)[0]


@pytest.fixture(scope="module")
def expected(few_keys):
    return reference_stages(few_keys)


# ---- the debug build ----------------------------------------------------------------------------


def test_every_stage_is_stored_by_both_kernels():
    helpers = debug_build._HELPERS
    base, low = helpers.split("# ---- low latency")
    for stage in STORED:
        assert f'put(stores, "{stage}"' in base
        assert f'put(stores, "{stage}"' in low or f'"{stage}", rS' in str(debug_build.CHANGES)


def test_a_line_that_is_not_there_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("sparse_mla_kernel")
    for k, change in enumerate(debug_build.CHANGES):
        broken = replace(change, old=change.old + "no such line")
        changes = (*debug_build.CHANGES[:k], broken, *debug_build.CHANGES[k + 1 :])
        monkeypatch.setattr(debug_build, "CHANGES", changes)
        with pytest.raises(ValueError, match="must have the line to patch once, got 0 of it"):
            debug_build.debug_build(tmp_path / str(k))


def test_an_unknown_stage_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"stages must be of logits, .*, got \['weights'\]"):
        debug_build.debug_build(tmp_path, ["p", "weights"])


def test_the_kernels_that_ship_store_no_stage(build):
    """The package has neither the module nor a word of it; the copy has both."""
    kernel = pytest.importorskip("sparse_mla_kernel")

    def files_with_stores(package):
        assert len(list(package.rglob("*.py"))) > 40
        return {
            str(file.relative_to(package))
            for file in package.rglob("*.py")
            if "stage_stores" in file.read_text() or file.name == debug_build.MODULE
        }

    assert files_with_stores(Path(kernel.__file__).parent) == set()
    changed = {change.file for change in debug_build.CHANGES}
    assert files_with_stores(build / "sparse_mla_kernel") == {debug_build.MODULE, *changed}


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("case", "schedule"),
    [("small/few-keys", BASE), ("small/two-tiles", LOW_LATENCY)],
)
def test_the_debug_build_compiles(build, case, schedule):
    """With no stage chosen its code is that of the kernel that ships, instruction for instruction.

    With all of them it has more stores to global memory.
    """
    from sparse_mla_verify.audit.collect import cross_compiled

    none, every = compiled(build, case, schedule, [[], list(STORED)])
    shipped = cross_compiled(case_named(case, schedule).signature, "sm_90a")
    assert none[:2] == (shipped.code_sha256, shipped.sass().count("STG"))
    assert every[1] >= none[1] + len(STORED)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("schedule", [BASE, LOW_LATENCY])
def test_a_build_of_each_stage_alone_compiles(build, schedule):
    """Each has its own stores, which together are those of the build of all stages."""
    choices = [[], list(STORED), *[[stage] for stage in STORED]]
    none, every, *alone = compiled(build, "small/few-keys", schedule, choices)
    assert len({sha256 for sha256, _, _ in (none, every, *alone)}) == 2 + len(STORED)
    assert all(stores > none[1] for _, stores, _ in alone)
    assert every[1] - none[1] == sum(stores - none[1] for _, stores, _ in alone)


# ---- where stages lie ---------------------------------------------------------------------------


def test_areas_share_no_word():
    areas = Areas(batch=2, heads=32, split=8, width=300)
    words = np.zeros(areas.words, np.uint32)
    for number, array in enumerate(areas.cut(words).values()):
        assert not array.any()
        array[...] = number + 1
    assert words.all()
    assert areas.slots == 320
    assert areas.shape("partial") == (2, 32, 8, 512)


# ---- the comparison -----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", REFERENCE)
def test_the_references_outputs_are_those_of_decode(schedule):
    case = small_cases(schedule)[0]
    stages = reference_stages(case)
    latent, lse = predict(case)
    assert np.array_equal(stages["latent"], latent)
    assert np.array_equal(stages["lse"], lse)
    assert set(stages) == {*STORED, *OUTPUTS}


def test_masked_keys_have_no_weight(few_keys, expected):
    masked = np.flatnonzero((few_keys.rows[0, :300] < 0) | (few_keys.rows[0, :300] > 10**6))
    assert len(masked) > 30
    minus_infinity = np.float32(-np.inf).view(np.uint32)
    own = expected["logits"] != NOT_STORED
    assert (expected["logits"] == minus_infinity).sum() == 32 * np.count_nonzero(
        (few_keys.rows[0, :300] < 0) | (few_keys.rows[0, :300] >= len(few_keys.kv))
    )
    assert own.sum() == 32 * (300 + 37)
    assert not expected["p"][expected["logits"] == minus_infinity].any()


def test_the_same_stages_differ_nowhere(few_keys, expected):
    differences = compare_stages(few_keys, expected, expected)
    assert [d.stage for d in differences] == [*STORED, *OUTPUTS]
    assert all(d.elements and not d.differing and not d.first for d in differences)
    assert first_differing(differences) is None


def quantised_sum(p, schedule, machine):
    rounded = machine.operand(e4m3.encode(p)).astype(np.float32)
    return CONTRACT.chunk_sum(rounded, schedule, machine)


PLANTED: dict[str, dict[str, Any]] = {
    "logits": {"logit": lambda dots, scale, machine: np.nextafter(dots * scale, np.float32(9e9))},
    "max": {"running_max": lambda s, used, before: CONTRACT.running_max(s + 1, used, before)},
    "p": {"bias": partial(bias, p_scale_log2=float(np.log2(447.0)))},
    "sum": {"chunk_sum": quantised_sum},
    "p_bytes": {"quantise": lambda p, machine: e4m3.encode(p, rounding="rz")},
    "partial": {"pv": lambda *given: bf16.encode(CONTRACT.pv(*given)).astype(np.float32)},
    "lse": {"natural": lambda lse2, machine: lse2},
    "latent": {"round_out": lambda row, machine: bf16.encode(row, rounding="rz")},
}


@pytest.mark.parametrize("stage", PLANTED)
def test_a_planted_fault_is_named_at_its_stage(few_keys, expected, stage):
    actual = reference_stages(few_keys, replace(CONTRACT, **PLANTED[stage]))
    differences = compare_stages(few_keys, actual, expected)
    assert first_differing(differences) == stage
    first = next(d for d in differences if d.stage == stage)
    assert first.differing > 0
    assert "expected 0x" in first.first


def test_every_stage_and_output_has_a_planted_fault():
    assert set(PLANTED) == {*STORED, *OUTPUTS}


def test_a_differing_element_is_named_with_both_bit_patterns(few_keys, expected):
    actual = {name: array.copy() for name, array in expected.items()}
    actual["p"][1, 5, 3, 4] ^= 1
    actual["p"][1, 6, 3, 4] ^= 1
    want, got = expected["p"][1, 5, 3, 4], actual["p"][1, 5, 3, 4]
    differences = compare_stages(few_keys, actual, expected, ["p"])
    assert [d.stage for d in differences] == ["p", *OUTPUTS]
    assert differences[0].differing == 2
    # Of 37 keys in runs of 8, the fifth of CTA 3 is key 28.
    where = "row 1, head 5, CTA 3, chunk 0, key 28"
    assert differences[0].first == f"{where}: expected 0x{want:08X}, got 0x{got:08X}"
    assert "\n" not in str(differences[0])


def test_a_word_that_is_not_stored_differs(few_keys, expected):
    actual = {name: array.copy() for name, array in expected.items()}
    actual["partial"][0, 0, 0, 7] = NOT_STORED
    differences = compare_stages(few_keys, actual, expected)
    assert first_differing(differences) == "partial"
    said = next(d.first for d in differences if d.stage == "partial")
    assert said.startswith("row 0, head 0, CTA 0, column 7: expected 0x")
    assert said.endswith("got nothing stored")


def test_a_word_past_the_keys_differs(few_keys, expected):
    actual = {name: array.copy() for name, array in expected.items()}
    actual["logits"][1, 0, 7, 0] = 0  # of 37 keys in runs of 8, the last CTAs have none
    differences = compare_stages(few_keys, actual, expected)
    assert (differences[0].stage, differences[0].differing) == ("logits", 1)
    assert "past the CTA's keys: expected nothing stored, got 0x00000000" in differences[0].first


def test_arrays_of_another_width_are_refused(few_keys, expected):
    actual = {**expected, "p": expected["p"].astype(np.uint8)}
    with pytest.raises(ValueError, match=r"actual\['p'\] must be uint32 .*, got uint8"):
        compare_stages(few_keys, actual, expected)


def test_an_unknown_stage_is_not_compared(few_keys, expected):
    with pytest.raises(ValueError, match=r"^stages must be of logits, .*, got \['nope'\]$"):
        compare_stages(few_keys, expected, expected, ("nope",))


@pytest.mark.parametrize("absent", ["p", "lse"])
@pytest.mark.parametrize("argument", ["actual", "expected"])
def test_a_missing_stage_is_refused(few_keys, expected, argument, absent):
    less = {name: array for name, array in expected.items() if name != absent}
    given = {"actual": expected, "expected": expected, argument: less}
    says = f"^{argument} must have {', '.join(expected)}, got {', '.join(less)}$"
    with pytest.raises(ValueError, match=says):
        compare_stages(few_keys, **given)


def test_a_stage_that_is_not_compared_may_be_missing(few_keys, expected):
    chosen = {name: expected[name] for name in ("sum", *OUTPUTS)}
    differences = compare_stages(few_keys, chosen, chosen, ("sum",))
    assert [d.stage for d in differences] == ["sum", *OUTPUTS]


@pytest.mark.parametrize("stage", [*STORED, *OUTPUTS])
def test_stages_of_another_case_are_refused(few_keys, expected, stage):
    other = {**expected, stage: expected[stage][:1]}
    says = rf"^expected\['{stage}'\] must be \[2, .*\] for {few_keys.name}, got \[1, .*\]$"
    with pytest.raises(ValueError, match=says):
        compare_stages(few_keys, other, other)


def test_a_key_of_a_later_chunk_is_named_by_its_place_in_the_list():
    case = small_cases(BASE)[1]
    # 2000 keys, 500 a CTA: the 131st of CTA 2 is key 1130, in its third chunk.
    assert place(case, "logits", (0, 3, 2, 130)) == "row 0, head 3, CTA 2, chunk 2, key 1130"


class Launch:
    """A launch on the CPU that stores what it is given behind the latent rows, and the outputs."""

    device = "cpu"

    def __init__(self, case, stages):
        self.case, self.stages = case, stages

    def launch(self, latent, lse):
        own = np.s_[: self.case.batch, : self.case.heads]
        latent.view(torch.int16).numpy()[own] = self.stages["latent"].view(np.int16)
        lse.numpy()[own] = self.stages["lse"].view(np.int32)
        behind = 2 * self.case.batch * self.case.padded * 512
        memory = torch.tensor([], dtype=torch.int32).set_(latent.untyped_storage()).numpy()
        words = np.concatenate([self.stages[stage].ravel() for stage in STORED])
        memory[behind // 4 :] = words.view(np.int32)


@pytest.mark.parametrize("padded", [32, 48])
def test_what_lies_behind_the_latent_rows_is_read(few_keys, expected, padded):
    query = np.resize(few_keys.query, (2, padded, 576))
    query[:, :32] = few_keys.query
    case = replace(few_keys, query=query)
    assert case.padded == padded
    found = kernel_run._stages(case, Launch(case, expected))
    assert first_differing(compare_stages(case, found, expected)) is None
    blank = kernel_run._stages(case, Launch(case, {k: v * 0 for k, v in expected.items()}))
    assert first_differing(compare_stages(case, blank, expected)) == "logits"


# ---- the cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", REFERENCE)
def test_a_small_case_is_found_by_its_name(schedule):
    for case in small_cases(schedule):
        found = case_named(case.name, schedule)
        assert found.digest() == case.digest()
        assert found.schedule == schedule


def test_the_small_cases_take_every_path_of_the_low_latency_kernel():
    """One chunk a CTA and several, and one tile of heads a CTA and two, on every split."""
    pytest.importorskip("sparse_mla_kernel")
    from sparse_mla_kernel.kernels.low_latency.decode import tiles_of

    for schedule in (name for name in REFERENCE if name != BASE):
        split = REFERENCE[schedule].split
        paths = {
            (tiles_of(case.batch, case.heads, split), bool(count > 64 * split))
            for case in small_cases(schedule)
            for count in case.counts
        }
        assert paths == {(1, False), (1, True), (2, False), (2, True)}, schedule


def test_a_case_of_a_family_is_found_by_its_name(cases):
    assert case_named("head-counts/16", BASE).digest() == cases["head-counts/16"].digest()
    with pytest.raises(ValueError, match=r"case must be small/few-keys, .*, got 'head-counts/17'"):
        case_named("head-counts/17", BASE)


# ---- the command --------------------------------------------------------------------------------


def test_without_a_gpu_the_command_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(present, "gpu_name", lambda: None)
    assert main(["stages", "--case", "small/few-keys"]) == 2
    assert capsys.readouterr().err == "stages needs an NVIDIA GPU and PyTorch with CUDA\n"


@pytest.mark.parametrize("given", [[], ["--case", "x"], ["--case", "small/few-keys", "--out", "F"]])
def test_wrong_options_end_with_2(given, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["stages", *given])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_usage_shows_that_a_case_or_a_file_is_required(capsys):
    with pytest.raises(SystemExit):
        main(["stages"])
    printed = capsys.readouterr().err
    assert "(--case CASE | --out OUT)" in printed
    assert "one of the arguments --case --out is required" in printed


class StandIn:
    """A debug build whose stages are the reference's, altered as the planted changes say."""

    def __init__(self, planted_step):
        self.planted_steps = replace(CONTRACT, **PLANTED[planted_step])

    def __call__(self, folder, tasks, stages, planted=()):
        steps = self.planted_steps if tuple(planted) else CONTRACT
        host = {"gpu": "a GPU", "driver": "1", "date": "2000-01-01", "dsl": "0"}
        found = {task: reference_stages(case_named(*task), steps) for task in tasks}
        return KernelRun(host, {"key": "hash"}, found)


TASKS = [("small/few-keys", BASE), ("small/few-keys", LOW_LATENCY)]


@pytest.mark.parametrize(("planted_step", "status"), [("p", 0), ("logits", 1), ("sum", 1)])
def test_a_recording_is_made(tmp_path, monkeypatch, capsys, planted_step, status):
    """Its status is 0 if the planted fault is found where it is, and 1 at another stage."""
    monkeypatch.setattr(command, "run_debug_build", StandIn(planted_step))
    monkeypatch.setattr(command, "recorded_tasks", lambda: (TASKS, TASKS[:1]))
    monkeypatch.setattr(command, "lacks_gpu", lambda name: False)
    file = tmp_path / "stages.json"
    assert main(["stages", "--out", str(file)]) == status
    recording = json.loads(file.read_text())
    assert command.holds(recording) is (status == 0)
    assert recording["planted_results"][0]["first"] == planted_step
    assert "the first stage that differs: " + planted_step in capsys.readouterr().out


def test_one_case_is_traced(monkeypatch, capsys):
    monkeypatch.setattr(command, "run_debug_build", StandIn("p"))
    monkeypatch.setattr(command, "lacks_gpu", lambda name: False)
    assert main(["stages", "--case", "small/few-keys", "--stage", "sum"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["sum", *OUTPUTS]
    assert lines[-1] == "  no bit differs"


def record_of(tasks, first, differing):
    return [
        {
            "case": case,
            "schedule": schedule,
            "elements": {"p": 9},
            "differing": {"p": differing},
            "first": first,
        }
        for case, schedule in tasks
    ]


def test_a_recording_holds_with_all_tasks_and_no_differing_bit():
    tasks, planted = command.recorded_tasks()
    assert {schedule for _, schedule in tasks} == set(REFERENCE)
    assert {schedule for _, schedule in planted} == set(REFERENCE)
    good = {
        "results": record_of(tasks, None, 0),
        "planted_results": record_of(planted, "p", 4),
    }
    assert command.holds(good)
    assert not command.holds({**good, "results": record_of(tasks[1:], None, 0)})
    assert not command.holds({**good, "results": record_of(tasks, None, 1)})
    assert not command.holds({**good, "results": record_of(tasks, "p", 1)})
    assert not command.holds({**good, "planted_results": record_of(planted, None, 0)})
    assert not command.holds({**good, "planted_results": record_of(planted, "logits", 4)})
    empty = record_of(tasks, None, 0)
    empty[3]["elements"]["p"] = 0
    assert not command.holds({**good, "results": empty})


# ---- the recording that ships -------------------------------------------------------------------

RECORDING = command.shipped()


def test_the_recording_holds():
    recording = json.loads(RECORDING.read_text())
    assert command.holds(recording)
    for result in (*recording["results"], *recording["planted_results"]):
        case = case_named(result["case"], result["schedule"])
        assert result["digest"] == case.digest()
        assert set(result["differing"]) == {*STORED, *OUTPUTS}


@pytest.mark.compiler
@pytest.mark.parametrize("schedule", REFERENCE)
def test_the_recorded_builds_are_todays(build, schedule):
    recording = json.loads(RECORDING.read_text())
    if recording["versions"]["dsl"] != dsl_version():
        pytest.skip("another version of the DSL compiles to other code")
    case = small_cases(schedule)[0]
    sha256, _, _ = compiled(build, case.name, schedule, [list(STORED)])[0]
    assert recording["machine_code"][case.signature.key] == sha256
