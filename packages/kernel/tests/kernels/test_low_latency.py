"""The low-latency kernel: what it compiles to, its tiles, and its shared memory."""

from dataclasses import replace
from typing import Any

import pytest

from sparse_mla_kernel import BASE, LOW_LATENCY, cross_compile
from sparse_mla_kernel.kernels.low_latency.decode import LowLatencyDecode
from sparse_mla_kernel.kernels.low_latency.layout import shared_layout

SIZES: dict[str, Any] = {"batch": 2, "heads": 32, "padded": 48, "width": 128, "cap": 4}


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_compiles_without_a_gpu(arch: str) -> None:
    sass = cross_compile(**SIZES, arch=arch, schedule=LOW_LATENCY).sass()
    assert "HMMA.16816.F32" in sass
    assert "QMMA" not in sass


@pytest.mark.compiler
@pytest.mark.parametrize(("batch", "heads"), [(1, 48), (40, 96)])
@pytest.mark.parametrize("split", [2, 4, 8])
def test_nothing_spills(split: int, batch: int, heads: int) -> None:
    schedule = replace(LOW_LATENCY, split=split)
    artifact = cross_compile(batch, heads, 96, 2048, batch, schedule=schedule)
    sass = artifact.sass()
    assert "HMMA.16816.F32" in sass  # the disassembly is one
    assert "STL" not in sass
    assert ".local" not in artifact.ptx


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
def test_the_shared_memory_of_an_sm_is_enough(split: int, tiles: int) -> None:
    layout = shared_layout(replace(LOW_LATENCY, split=split), tiles)
    assert layout.size <= 227 * 1024
    # What takes the place of keys and logits, once they are not needed, fits there.
    assert 4 * layout.heads * 512 <= layout.logit - layout.keys
    assert 4 * layout.heads * layout.cta_columns <= layout.p - layout.logit
    assert split * 64 * layout.value_stride_bytes <= layout.logit - layout.values


def test_the_kernel_runs_its_own_kind_of_schedule() -> None:
    says = r"^schedule\.kernel must be 'low_latency' here, got 'base'$"
    with pytest.raises(ValueError, match=says):
        LowLatencyDecode(2, 32, 48, 128, schedule=BASE)


def test_there_is_no_push_mode() -> None:
    says = r"^schedule\.kernel must be 'base' in push mode, got 'low_latency'$"
    with pytest.raises(ValueError, match=says):
        cross_compile(2, 48, 48, 128, 4, push=(12, 4, 4), schedule=LOW_LATENCY)
