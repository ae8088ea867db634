"""Cross-compiling, and the errors of sizes that the kernel can't have."""

import re
from dataclasses import replace

import pytest

from sparse_mla_kernel import (
    BASE,
    LOW_LATENCY,
    MailboxLayout,
    Schedule,
    SparseDcpDecode,
    cross_compile,
    cross_compile_step,
)
from sparse_mla_kernel import schedule as schedule_module
from sparse_mla_kernel.kernels.base.layout import THREADS, shared_layout
from sparse_mla_kernel.kernels.low_latency import layout as low_latency_layouts
from sparse_mla_kernel.kernels.low_latency.decode import LowLatencyDecode

SIZES = {"batch": 2, "heads": 32, "padded": 48, "width": 128, "cap": 4}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_compiles_without_a_gpu(arch: str) -> None:
    artifact = cross_compile(**SIZES, arch=arch)
    assert artifact.arch == arch
    assert artifact.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in artifact.ptx
    assert f".reqntid {THREADS}" in artifact.ptx


def test_the_same_source_gives_the_same_cubin() -> None:
    assert cross_compile(**SIZES).code_sha256 == cross_compile(**SIZES).code_sha256


def test_nothing_spills() -> None:
    artifact = cross_compile(**SIZES)
    assert re.search(r"\bEXIT\b", artifact.sass())
    assert "STL" not in artifact.sass()
    assert ".local" not in artifact.ptx


def test_emulated_and_native_mma() -> None:
    """Hopper has no E4M3 mma.sync: its assembler multiplies in FP16. Blackwell's sm_120 has one."""
    assert "QMMA" not in cross_compile(**SIZES).sass()
    assert "HMMA" not in cross_compile(**SIZES, arch="sm_120a").sass()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"batch": 0}, ValueError, "batch is 0; it may be 1 to 65535"),
        ({"batch": 65536}, ValueError, "batch is 65536"),
        ({"batch": 1.0}, TypeError, "batch is 1.0, a float"),
        ({"batch": True}, TypeError, "batch is True, a bool"),
        ({"heads": 0}, ValueError, "heads is 0; it may be a positive multiple of 16"),
        ({"heads": 24}, ValueError, "heads is 24; it may be a positive multiple of 16"),
        ({"heads": 64}, ValueError, "heads is 64; it may be at most padded, which is 48"),
        ({"width": 0}, ValueError, "width is 0; it may be 1 or more"),
        ({"cap": 1}, ValueError, "cap is 1; it may be batch or more, and batch is 2"),
        ({"arch": "sm_80"}, ValueError, "arch is 'sm_80'; it may be sm_90a, sm_100a"),
    ],
)
def test_sizes_out_of_range(change: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        cross_compile(**{**SIZES, **change})


@pytest.mark.parametrize("field", ["split", "chunk", "qk_chains"])
def test_schedules_out_of_range(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be one of .* for kernel 'base', got 0"):
        Schedule(**{field: 0})


@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk", [32, 64, 128])
def test_the_merge_mailbox_holds_every_partial(split: int, chunk: int) -> None:
    layout = shared_layout(Schedule(split=split, chunk=chunk))
    assert layout.merge_bytes == 16 * 512 * 4 + split * 16 * 8
    assert layout.size <= 227 * 1024


@pytest.mark.parametrize("schedule", [Schedule(split=8, chunk=32, qk_chains=3), Schedule(split=1)])
def test_other_schedules_compile(schedule: Schedule) -> None:
    assert (
        cross_compile(**SIZES, schedule=schedule).code_sha256 != cross_compile(**SIZES).code_sha256
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_low_latency_compiles_without_a_gpu(arch: str) -> None:
    sass = cross_compile(**SIZES, arch=arch, schedule=LOW_LATENCY).sass()
    assert "HMMA.16816.F32" in sass
    assert "QMMA" not in sass


@pytest.mark.parametrize(("batch", "heads"), [(1, 48), (40, 96)])
@pytest.mark.parametrize("split", [2, 4, 8])
def test_low_latency_does_not_spill(split: int, batch: int, heads: int) -> None:
    schedule = replace(LOW_LATENCY, split=split)
    assert "STL" not in cross_compile(batch, heads, 96, 2048, batch, schedule=schedule).sass()


@pytest.mark.parametrize(
    ("batch", "heads", "split", "tiles"),
    [(1, 96, 8, 1), (2, 128, 8, 2), (5, 48, 8, 1), (6, 80, 4, 1), (5, 96, 4, 1), (12, 96, 2, 2)],
)
def test_a_cta_has_two_tiles_of_heads_where_one_would_not_run_at_once(
    batch: int, heads: int, split: int, tiles: int
) -> None:
    decode = LowLatencyDecode(batch, heads, 128, 128, schedule=replace(LOW_LATENCY, split=split))
    assert decode.layout.tiles == tiles
    assert decode.layout.heads == 16 * tiles


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("split", [2, 4, 8])
def test_low_latency_fits_the_shared_memory_of_an_sm(split: int, tiles: int) -> None:
    layout = low_latency_layouts.shared_layout(replace(LOW_LATENCY, split=split), tiles)
    assert layout.size <= 227 * 1024
    # What takes the place of keys and logits, once they are not needed, fits there
    assert 4 * layout.heads * 512 <= layout.logit - layout.keys
    assert 4 * layout.heads * layout.cta_columns <= layout.p - layout.logit
    assert split * 64 * layout.value_stride_bytes <= layout.logit - layout.values


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kernel": "bf16"}, "kernel must be 'base' or 'low_latency', got 'bf16'"),
        ({"kernel": "low_latency"}, "qk_chains must be one of 4 for kernel 'low_latency', got 2"),
        ({"deal": 8}, "deal must be one of 0 for kernel 'base', got 8"),
    ],
)
def test_fields_that_do_not_go_together(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Schedule(**change)


def test_low_latency_has_no_push_mode() -> None:
    with pytest.raises(
        ValueError, match=r"schedule\.kernel must be 'base' in push mode, got 'low_latency'"
    ):
        cross_compile(2, 48, 48, 128, 4, push=(12, 4, 4), schedule=LOW_LATENCY)


def test_a_schedule_is_this_packages_own() -> None:
    class Schedule:
        """Another package's."""

    with pytest.raises(
        TypeError, match=r"schedule must be a sparse_mla_kernel\.Schedule, got a .*Schedule"
    ):
        cross_compile(**SIZES, schedule=Schedule())
    with pytest.raises(TypeError, match=r"split must be an int, got 4\.0 \(float\)"):
        schedule_module.Schedule(split=4.0)


def test_each_kernel_runs_its_own_kind_of_schedule() -> None:
    with pytest.raises(
        ValueError, match=r"schedule\.kernel must be 'base' here, got 'low_latency'"
    ):
        SparseDcpDecode(2, 32, 48, 128, schedule=LOW_LATENCY)
    with pytest.raises(
        ValueError, match=r"schedule\.kernel must be 'low_latency' here, got 'base'"
    ):
        LowLatencyDecode(2, 32, 48, 128, schedule=BASE)
    with pytest.raises(ValueError, match=r"schedule\.kernel must be 'base' in push mode, got 'low"):
        cross_compile_step(2, 16, MailboxLayout(96, 12, 8, 5), schedule=LOW_LATENCY)
    with pytest.raises(ValueError, match="arch is 'sm_80'; it may be sm_90a"):
        cross_compile_step(2, 16, MailboxLayout(96, 12, 8, 5), "sm_80")
    with pytest.raises(TypeError, match="box is a NoneType; it may be a MailboxLayout"):
        cross_compile_step(2, 16, None)


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ((-1, 2, 3, 4), ValueError, "padded is -1; it may be 1 or more"),
        ((1.5, 1, 1, 1), TypeError, r"padded is 1\.5, a float"),
        ((10, 12, 8, 5), ValueError, "padded is 10; it may be all ranks' 96 heads or more"),
    ],
)
def test_mailboxes_out_of_range(sizes: tuple, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        MailboxLayout(*sizes)
