"""Compiling the decode: its sizes are checked before anything is compiled."""

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from sparse_mla_kernel import (
    BASE,
    LOW_LATENCY,
    Schedule,
    compile_sparse,
    cross_compile,
    precompile_sparse,
)
from sparse_mla_kernel.host import build
from sparse_mla_kernel.host.sizes import DecodeSizes

SIZES: dict[str, Any] = {"batch": 2, "heads": 32, "padded": 48, "width": 128, "cap": 4}

WRONG = [
    ({"batch": 0}, ValueError, "batch must be from 1 to 65535, got 0"),
    ({"batch": 65536, "cap": 65536}, ValueError, "batch must be from 1 to 65535, got 65536"),
    ({"batch": 1.0}, TypeError, r"batch must be an int, got 1\.0 \(float\)"),
    ({"batch": True}, TypeError, r"batch must be an int, got True \(bool\)"),
    ({"heads": 0}, ValueError, "heads must be a positive multiple of 16, got 0"),
    ({"heads": 24}, ValueError, "heads must be a positive multiple of 16, got 24"),
    ({"heads": 64}, ValueError, "heads must be at most padded, 48, got 64"),
    ({"width": 0}, ValueError, "width must be 1 or more, got 0"),
    ({"cap": 1}, ValueError, "cap must be at least batch, 2, got 1"),
    ({"push": (16, 3, 4)}, ValueError, "push must give owner_heads x ranks = heads, 32, got 48"),
    ({"push": (16, 2, 5)}, ValueError, "push's cap must be the cap of the q mailbox, 4, got 5"),
    (
        {"schedule": "base"},
        TypeError,
        r"schedule must be a sparse_mla_kernel\.Schedule, got builtins\.str",
    ),
    (
        {"schedule": LOW_LATENCY, "push": (16, 2, 4)},
        ValueError,
        r"schedule\.kernel must be 'base' in push mode, got 'low_latency'",
    ),
    (
        {"batch": 65535, "cap": 65535, "heads": 128, "padded": 128},
        ValueError,
        r"batch x padded x 576 must be at most 2147483647 \(2\^31 - 1\), "
        "got 65535 x 128 x 576 = 4831764480",
    ),
]


@pytest.fixture(
    params=[
        pytest.param(lambda **given: compile_sparse(device="cpu", **given), id="compile_sparse"),
        pytest.param(lambda **given: precompile_sparse(arch="sm_90a", **given), id="precompile"),
        pytest.param(cross_compile, id="cross_compile"),
    ]
)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Each function that compiles a decode; none of them may get so far as to compile."""
    monkeypatch.setattr(build, "compile_entry", lambda *_: pytest.fail("compiled"))
    return request.param


@pytest.mark.parametrize(("change", "error", "says"), WRONG)
def test_sizes_out_of_range(
    change: dict[str, Any], error: type[Exception], says: str, compiler: Callable
) -> None:
    with pytest.raises(error, match=f"^{says}$"):
        compiler(**SIZES | change)


@pytest.mark.parametrize("compiler", [cross_compile, precompile_sparse])
def test_the_architecture_is_checked(compiler: Callable) -> None:
    says = "^arch must be sm_90a, sm_100a, sm_103a or sm_120a, got 'sm_80'$"
    with pytest.raises(ValueError, match=says):
        compiler(**SIZES, arch="sm_80")


def test_the_device_is_checked() -> None:
    with pytest.raises(ValueError, match=r"^device must be a CUDA device, got cpu$"):
        compile_sparse(**SIZES, device="cpu")
    with pytest.raises(ValueError, match=r"^device must be a device such as 'cuda:0', got 'gpu'$"):
        compile_sparse(**SIZES, device="gpu")


def test_sizes_are_told_apart_by_every_field() -> None:
    """Equal sizes are one kernel: they share it within a process, and its entry on disk."""
    sizes = DecodeSizes(**SIZES)
    assert (sizes.push, sizes.schedule) == (None, BASE)
    assert DecodeSizes(**SIZES) == sizes
    assert hash(DecodeSizes(**SIZES)) == hash(sizes)
    others: dict[str, Any] = {
        "batch": 3,
        "heads": 16,
        "padded": 64,
        "width": 64,
        "cap": 5,
        "push": (16, 2, 4),
        "schedule": Schedule(split=2),
    }
    assert list(others) == [field.name for field in fields(DecodeSizes)]
    for name, value in others.items():
        other = replace(sizes, **{name: value})
        assert other != sizes
        assert asdict(other) != asdict(sizes)


@pytest.mark.compiler
def test_the_same_source_gives_the_same_machine_code() -> None:
    assert cross_compile(**SIZES).code_sha256 == cross_compile(**SIZES).code_sha256
