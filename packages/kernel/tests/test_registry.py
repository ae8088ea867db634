"""What the registry says of the kernels is so."""

from __future__ import annotations

import importlib
from itertools import product
from pathlib import Path

import pytest

import sparse_mla_kernel
from sparse_mla_kernel import BASE, LOW_LATENCY, Schedule
from sparse_mla_kernel.kernels.base.layout import shared_layout as base_layout
from sparse_mla_kernel.kernels.low_latency.layout import shared_layout as low_latency_layout
from sparse_mla_kernel.schedule.registry import ARCHITECTURES, KERNELS, LATENT, PUSH

FOLDER = Path(sparse_mla_kernel.__file__).parent / "kernels"
STEPS = ("decode", "gather", "layout", "logits", "merge", "partial", "query", "softmax")


def schedules(name: str) -> list[Schedule]:
    kernel = KERNELS[name]
    fields = product(kernel.split, kernel.chunk, kernel.qk_chains, kernel.deal)
    return [Schedule(s, c, q, kernel=name, deal=d) for s, c, q, d in fields]


def test_every_folder_of_kernels_is_registered() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/decode.py")} == KERNELS.keys()


@pytest.mark.parametrize("name", KERNELS)
def test_the_steps_have_the_same_file_names_in_every_kernel(name: str) -> None:
    assert {f"{step}.py" for step in STEPS} <= {path.name for path in (FOLDER / name).iterdir()}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_the_class_that_it_names(name: str) -> None:
    module = importlib.import_module(f"sparse_mla_kernel.kernels.{name}.decode")
    assert isinstance(getattr(module, KERNELS[name].decode), type)


def test_the_shared_memory_is_the_most_that_a_layout_takes() -> None:
    base = [base_layout(s, push=push).size for s in schedules("base") for push in (False, True)]
    assert KERNELS["base"].shared_bytes == max(base)
    low_latency = [
        low_latency_layout(s, tiles).size for s in schedules("low_latency") for tiles in (1, 2)
    ]
    assert KERNELS["low_latency"].shared_bytes == max(low_latency)


def test_what_has_run_is_among_what_compiles() -> None:
    for kernel in KERNELS.values():
        assert set(kernel.runs_on) <= set(kernel.compiles_for) <= set(ARCHITECTURES.values())


def test_the_shipped_schedules_name_their_kernel() -> None:
    assert (BASE.kernel, BASE.mma, BASE.entry.modes) == ("base", "e4m3", (LATENT, PUSH))
    assert (LOW_LATENCY.kernel, LOW_LATENCY.mma, LOW_LATENCY.entry.modes) == (
        "low_latency",
        "f16",
        (LATENT,),
    )
