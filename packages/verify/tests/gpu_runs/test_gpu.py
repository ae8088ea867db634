"""The host's side of GPU runs, with the reference in the kernel's place on CPU tensors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparse_mla_reference import decode
from sparse_mla_verify.gpu_runs import gpu, launch_checks
from sparse_mla_verify.measure.poisoned import run_poisoned
from sparse_mla_verify.measure.predict import predict


class StandInKernel:
    """`compile_sparse` and `run_sparse` over CPU tensors; `fault` changes what a call writes."""

    def __init__(self):
        self.fault = lambda call, latent, lse: None
        self.calls = 0

    def compile(self, batch, heads, padded, width, cap, device, *, schedule):
        sizes = {"batch": batch, "heads": heads, "padded": padded, "width": width, "cap": cap}
        return SimpleNamespace(**sizes, artifact=SimpleNamespace(code_sha256=f"{batch}-{heads}"))

    def run(self, kernel, query, kv, rows, valid, latent, lse, scale_log2, out_scale):
        k = kernel
        assert query.shape == (k.cap, k.padded, 576)
        assert (query.dtype, kv.dtype) == (torch.uint8, torch.uint8)
        assert (rows.dtype, rows.shape[1]) == (torch.int32, k.width)
        assert (latent.shape, lse.shape) == ((k.batch, k.padded, 512), (k.batch, k.padded))
        assert (latent.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        assert latent.is_contiguous()
        out_latent, out_lse = decode(
            query.numpy()[: k.batch, : k.heads],
            kv.numpy(),
            rows.numpy(),
            valid.numpy(),
            scale_log2=scale_log2,
            out_scale=out_scale,
        )
        out_latent, out_lse = out_latent.view(np.uint16).copy(), out_lse.copy()
        self.fault(self.calls, out_latent, out_lse)
        self.calls += 1
        latent.view(torch.int16).numpy().view(np.uint16)[:, : k.heads] = out_latent
        lse.numpy()[:, : k.heads] = out_lse


@pytest.fixture
def kernel(monkeypatch):
    kernel = StandInKernel()
    monkeypatch.setattr(gpu, "compile_sparse", kernel.compile)
    monkeypatch.setattr(gpu, "run_sparse", kernel.run)
    return kernel


@pytest.fixture
def small(monkeypatch, few):
    """Small cases in the place of the checks' own."""
    monkeypatch.setattr(launch_checks, "batch_of_64", lambda: few[1])
    monkeypatch.setattr(launch_checks, "REPLAYS", 3)


def test_a_runner_gives_the_bits_and_keeps_the_code(kernel, few):
    runner = gpu.GpuRunner("cpu")
    for case in few:
        output = run_poisoned(runner, case)
        latent, lse = predict(case)
        assert np.array_equal(output.latent, latent)
        assert np.array_equal(output.lse, lse)
        assert (output.unwritten, output.strayed, output.rerun.differing) == (0, 0, 0)
    assert runner.artifacts.keys() == {case.signature.key for case in few}


def flip_the_third(call, latent, lse):
    if call == 2:
        latent.flat[-1] ^= 1


@pytest.mark.parametrize("fault", [None, flip_the_third])
@pytest.mark.parametrize("check", [launch_checks.batch_independence, launch_checks.runs_agree])
def test_a_check_sees_one_flipped_bit(kernel, small, check, fault):
    if fault:
        kernel.fault = fault
    found = check("cpu")
    assert found.elements > 0
    assert found.differing == (1 if fault else 0)
    assert found.same == (fault is None)


@pytest.mark.parametrize("wraps", [False, True])
def test_far_rows_see_an_offset_that_wraps(kernel, monkeypatch, wraps):
    limit, total = 1000, 6000
    monkeypatch.setattr(launch_checks, "LIMIT_ROW", limit)
    monkeypatch.setattr(launch_checks, "FAR_ROWS", total)
    run = kernel.run

    def wrapping(k, query, kv, rows, *rest):
        assert kv.shape[0] == total
        assert bool((rows > limit).any() and (rows < limit).any() and (rows == limit).any())
        run(k, query, kv, rows % limit if wraps else rows, *rest)

    monkeypatch.setattr(gpu, "run_sparse", wrapping)
    assert launch_checks.far_rows("cpu").same == (not wraps)


def test_host_names_no_version_it_does_not_know():
    assert gpu._version("nvidia-cutlass-dsl") != "unknown"
    assert gpu._version("no-such-distribution") == "unknown"
