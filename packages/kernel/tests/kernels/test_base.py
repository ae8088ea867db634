"""The base kernel: what it compiles to, and its shared memory."""

from typing import Any

import pytest

from sparse_mla_kernel import BASE, LOW_LATENCY, Schedule, SparseDcpDecode, cross_compile
from sparse_mla_kernel.kernels.base.layout import THREADS, shared_layout

SIZES: dict[str, Any] = {"batch": 2, "heads": 32, "padded": 48, "width": 128, "cap": 4}


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_compiles_without_a_gpu(arch: str) -> None:
    artifact = cross_compile(**SIZES, arch=arch)
    assert artifact.arch == arch
    assert artifact.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in artifact.ptx
    assert f".reqntid {THREADS}" in artifact.ptx


@pytest.mark.compiler
def test_nothing_spills() -> None:
    artifact = cross_compile(**SIZES)
    sass = artifact.sass()
    assert "HMMA" in sass  # the disassembly is one
    assert "STL" not in sass
    assert ".local" not in artifact.ptx


@pytest.mark.compiler
def test_emulated_and_native_mma() -> None:
    """Hopper has no E4M3 mma.sync: its assembler multiplies in FP16. Blackwell's sm_120 has one."""
    hopper, blackwell = (cross_compile(**SIZES, arch=arch).sass() for arch in ("sm_90a", "sm_120a"))
    assert "HMMA" in hopper
    assert "QMMA" not in hopper
    assert "QMMA" in blackwell
    assert "HMMA" not in blackwell


@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk", [32, 64, 128])
def test_the_merge_mailbox_holds_every_partial(split: int, chunk: int) -> None:
    layout = shared_layout(Schedule(split=split, chunk=chunk))
    assert layout.merge_bytes == 16 * 512 * 4 + split * 16 * 8
    assert layout.size <= 227 * 1024


@pytest.mark.compiler
@pytest.mark.parametrize("schedule", [Schedule(split=8, chunk=32, qk_chains=3), Schedule(split=1)])
def test_other_schedules_compile(schedule: Schedule) -> None:
    assert (
        cross_compile(**SIZES, schedule=schedule).code_sha256 != cross_compile(**SIZES).code_sha256
    )


def test_the_kernel_runs_its_own_kind_of_schedule() -> None:
    assert SparseDcpDecode(2, 32, 48, 128).schedule is BASE
    says = r"^schedule\.kernel must be 'base' here, got 'low_latency'$"
    with pytest.raises(ValueError, match=says):
        SparseDcpDecode(2, 32, 48, 128, schedule=LOW_LATENCY)
