import numpy as np
import pytest

from sparse_mla_verify.gpu_runs.gpu import GpuRunner, Inputs, device_name
from sparse_mla_verify.gpu_runs.launch_checks import (
    FAR_ROWS,
    LAUNCH_CHECKS,
    LIMIT_ROW,
    chained_cases,
    named,
)
from sparse_mla_verify.gpu_runs.sanitize import ROWS, short_cases
from sparse_mla_verify.inputs.schedules import REFERENCE
from sparse_mla_verify.measure.poisoned import run_poisoned
from sparse_mla_verify.measure.predict import predict

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_name() is None, reason="no NVIDIA GPU on this computer"),
]


@pytest.mark.parametrize("schedule", REFERENCE)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpu) for name in LAUNCH_CHECKS])
def test_check_on_the_gpu(name, schedule):
    check = LAUNCH_CHECKS[name](schedule=schedule)
    assert check.same, check.first
    assert check.elements > 100_000


@pytest.mark.parametrize("schedule", REFERENCE)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_gpu)
        for name in (
            "head-counts/48",
            "counts/edges",
            "nan-used/keys-and-query",
            "dominant/off-grid",
        )
    ],
)
def test_the_gpu_writes_the_predicted_bits(name, schedule):
    case = named(name, schedule)
    output = run_poisoned(GpuRunner(), case)
    latent, lse = predict(case)
    assert (output.unwritten, output.strayed, output.rerun.differing) == (0, 0, 0)
    assert np.array_equal(output.latent, latent)
    assert np.array_equal(output.lse, lse)


@pytest.mark.gpu
@pytest.mark.skipif(device_name() is None, reason="no NVIDIA GPU on this computer")
@pytest.mark.parametrize("schedule", REFERENCE)
def test_the_loaded_cubin_is_the_cross_compiled_one(schedule):
    from sparse_mla_verify.audit.collect import cross_compiled
    from sparse_mla_verify.gpu_runs.gpu import host

    case = named("head-counts/16", schedule)
    arch = f"{host().arch}a"
    assert (
        Inputs(case).kernel.artifact.code_sha256 == cross_compiled(case.signature, arch).code_sha256
    )


def test_the_far_cache_passes_the_limit_on_both_sides():
    assert LIMIT_ROW * 576 < 2**31 < (LIMIT_ROW + 1) * 576
    assert FAR_ROWS > 3_728_271


def test_the_chained_cache_is_whole_and_finite():
    writer, reader = chained_cases()
    latent, _ = predict(writer)
    assert reader.kv.nbytes == latent.nbytes
    assert np.all(reader.kv & 0x7F != 0x7F)
    assert len(np.unique(reader.kv, axis=0)) > 100
    # What stands there before the writer has run is something else.
    assert not np.any(reader.kv.view(np.uint16) == 0x7FA5)


def test_the_sanitizer_run_is_short_and_covers_the_edges():
    cases = short_cases()
    assert {case.name for case in cases} == ROWS.keys()
    assert sum(case.tiles for case in cases) < 60
    assert 0 in np.concatenate([case.counts for case in cases])
    assert any(case.padded > case.heads for case in cases)
