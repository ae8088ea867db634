"""Checks of arguments: each error names the argument, what it must be and what it was."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sparse_mla_kernel import BASE, LOW_LATENCY
from sparse_mla_kernel.checks import (
    architecture_of,
    as_bytes,
    as_scale,
    check_arch,
    check_cache_rows,
    check_cap,
    check_cuda,
    check_geometry,
    check_int,
    check_push,
    check_scale,
    check_schedule,
    check_tensor,
    check_unseen,
    kind_of,
    one_of,
    resolve_device,
)
from sparse_mla_kernel.schedule.registry import LATENT, PUSH

CPU, META = torch.device("cpu"), torch.device("meta")
MOST = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 16, 16, 1),
        (65535, 16, 16, 1),
        (1, 96, 96, MOST),
        (3, 16, 16, 715827882),  # 3 x 715827882 = 2^31 - 2
        (1, 16, 3728270, 1),  # x 576 = 2^31 - 128
    ],
)
def test_the_extremes_of_the_sizes_are_allowed(sizes: tuple[int, int, int, int]) -> None:
    check_geometry(*sizes)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((0, 16, 16, 1), "batch must be from 1 to 65535, got 0"),
        ((65536, 16, 16, 1), "batch must be from 1 to 65535, got 65536"),
        ((1, 0, 16, 1), "heads must be a positive multiple of 16, got 0"),
        ((1, -16, 16, 1), "heads must be a positive multiple of 16, got -16"),
        ((1, 90, 96, 1), "heads must be a positive multiple of 16, got 90"),
        ((1, 32, 31, 1), "heads must be at most padded, 31, got 32"),
        ((1, 16, 16, 0), "width must be 1 or more, got 0"),
        (
            (1, 16, 16, 2**31),
            "batch x width must be at most 2147483647 (2^31 - 1), got 1 x 2147483648 = 2147483648",
        ),
        (
            (2, 16, 16, 2**30),
            "batch x width must be at most 2147483647 (2^31 - 1), got 2 x 1073741824 = 2147483648",
        ),
        (
            (1, 16, 3728271, 1),
            "batch x padded x 576 must be at most 2147483647 (2^31 - 1), "
            "got 1 x 3728271 x 576 = 2147484096",
        ),
        (
            (65535, 128, 128, 16),
            "batch x padded x 576 must be at most 2147483647 (2^31 - 1), "
            "got 65535 x 128 x 576 = 4831764480",
        ),
    ],
)
def test_sizes_out_of_range(sizes: tuple[int, int, int, int], says: str) -> None:
    with pytest.raises(ValueError, match=exactly(says)):
        check_geometry(*sizes)


@pytest.mark.parametrize("position", range(4))
def test_every_size_is_an_int(position: int) -> None:
    sizes: list[Any] = [1, 16, 16, 1]
    sizes[position] = 16.0
    name = ("batch", "heads", "padded", "width")[position]
    with pytest.raises(TypeError, match=exactly(f"{name} must be an int, got 16.0 (float)")):
        check_geometry(*sizes)


@pytest.mark.parametrize(
    ("value", "got"),
    [(1.0, "1.0 (float)"), (True, "True (bool)"), (None, "None (None)"), ("1", "'1' (str)")],
)
def test_what_is_not_an_int(value: object, got: str) -> None:
    with pytest.raises(TypeError, match=exactly(f"ranks must be an int, got {got}")):
        check_int("ranks", value)


def test_a_q_mailbox_holds_the_batch() -> None:
    check_cap(5, 5)
    with pytest.raises(ValueError, match=exactly("cap must be at least batch, 5, got 4")):
        check_cap(4, 5)
    with pytest.raises(TypeError, match=exactly("cap must be an int, got None (None)")):
        check_cap(None, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("push", [(96, 1, 5), (12, 8, 5), (3, 32, 5)])
def test_push_sizes_that_fit(push: tuple[int, int, int]) -> None:
    check_push(push, 96, 5)


@pytest.mark.parametrize(
    ("push", "error", "says"),
    [
        (
            [12, 8, 5],
            TypeError,
            "push must be None or (owner_heads, ranks, cap), got [12, 8, 5]",
        ),
        ((12, 8), TypeError, "push must be None or (owner_heads, ranks, cap), got (12, 8)"),
        ((12.0, 8, 5), TypeError, "push's owner_heads must be an int, got 12.0 (float)"),
        ((12, "8", 5), TypeError, "push's ranks must be an int, got '8' (str)"),
        ((12, 8, None), TypeError, "push's cap must be an int, got None (None)"),
        ((96, 0, 5), ValueError, "push's ranks must be from 1 to 32, got 0"),
        ((3, 33, 5), ValueError, "push's ranks must be from 1 to 32, got 33"),
        ((15, 6, 5), ValueError, "push must give owner_heads x ranks = heads, 96, got 90"),
        ((12, 8, 4), ValueError, "push's cap must be the cap of the q mailbox, 5, got 4"),
        ((12, 8, 6), ValueError, "push's cap must be the cap of the q mailbox, 5, got 6"),
    ],
)
def test_push_sizes_that_do_not_fit(push: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=exactly(says)):
        check_push(push, 96, 5)


def test_a_schedule_is_this_packages_own() -> None:
    class Schedule:
        """Another package's."""

        kernel = "base"

    name = f"{__name__}.test_a_schedule_is_this_packages_own.<locals>.Schedule"
    says = exactly(f"schedule must be a sparse_mla_kernel.Schedule, got {name}")
    with pytest.raises(TypeError, match=says):
        check_schedule(Schedule())
    with pytest.raises(TypeError, match=r"^schedule must be .*, got builtins.str$"):
        check_schedule("base", "e4m3")


def test_a_schedule_of_another_kernel() -> None:
    for schedule, other in ((BASE, "low_latency"), (LOW_LATENCY, "base")):
        check_schedule(schedule)
        check_schedule(schedule, schedule.kernel)
        says = f"schedule.kernel must be {other!r} here, got {schedule.kernel!r}"
        with pytest.raises(ValueError, match=exactly(says)):
            check_schedule(schedule, other)


def test_a_schedule_whose_kernel_lacks_the_mode() -> None:
    for schedule, mode in ((BASE, LATENT), (BASE, PUSH), (LOW_LATENCY, LATENT)):
        check_schedule(schedule, mode=mode)
    says = "schedule.kernel must be 'base' in push mode, got 'low_latency'"
    with pytest.raises(ValueError, match=exactly(says)):
        check_schedule(LOW_LATENCY, mode=PUSH)


# ---- scales and bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1, -2.5, FLOAT32_MAX, -FLOAT32_MAX, np.float32(0.25)])
def test_scales(value: float) -> None:
    for scale in (check_scale("out_scale", value), as_scale(value)):
        assert type(scale) is float
        assert scale == float(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.5e38, -3.5e38])
def test_scales_that_a_float32_cannot_be(value: float) -> None:
    for name, check in (("out_scale", lambda x: check_scale("out_scale", x)), ("value", as_scale)):
        says = f"{name} must be finite as a float32, got {value}"
        with pytest.raises(ValueError, match=exactly(says)):
            check(value)


@pytest.mark.parametrize(("value", "got"), [(True, "bool"), ("1", "str"), (None, "None")])
def test_scales_that_are_no_numbers(value: object, got: str) -> None:
    for name, check in (("out_scale", lambda x: check_scale("out_scale", x)), ("value", as_scale)):
        with pytest.raises(TypeError, match=exactly(f"{name} must be a real number, got {got}")):
            check(value)


def test_e4m3_as_bytes() -> None:
    numbers = torch.tensor([1.0, -2.0, 448.0]).to(torch.float8_e4m3fn)
    as_they_are = as_bytes(numbers)
    assert as_they_are.dtype is torch.uint8
    assert as_they_are.tolist() == [0x38, 0xC0, 0x7E]
    assert as_they_are.data_ptr() == numbers.data_ptr()
    assert as_bytes(as_they_are) is as_they_are
    with pytest.raises(TypeError, match=exactly("tensor must be a torch.Tensor, got None")):
        as_bytes(None)
    says = "tensor must be torch.uint8 or torch.float8_e4m3fn, got torch.int8"
    with pytest.raises(TypeError, match=exactly(says)):
        as_bytes(as_they_are.view(torch.int8))


# ---- tensors ------------------------------------------------------------------------------------


def unseen(**change: object) -> None:
    given: dict[str, Any] = {
        "query": torch.zeros(2, 16, 576, dtype=torch.uint8, device="meta"),
        "kv": torch.zeros(MOST, 576, dtype=torch.uint8, device="meta"),
        "rows": torch.zeros(2, 8, dtype=torch.int32, device="meta"),
        "valid": torch.zeros(2, dtype=torch.int32, device="meta"),
        "batch": 2,
        "device": META,
    }
    check_unseen(**given | change)


@pytest.mark.parametrize(
    "change",
    [
        {"device": CPU},
        {"batch": 3, "valid": torch.zeros(3, dtype=torch.int32)},
        {"batch": 3, "rows": torch.zeros(3, 8, dtype=torch.int32)},
        {"rows": torch.zeros(2, 8, dtype=torch.uint32)},
        {"valid": torch.zeros(2, dtype=torch.uint32)},
        {"rows": torch.zeros(2, 8).int().long(), "valid": torch.zeros(2).int().long()},
        {"kv": torch.zeros(MOST + 1, 576, dtype=torch.uint8, device="meta")},
    ],
)
def test_what_a_launcher_does_not_see(change: dict[str, Any]) -> None:
    unseen()
    unseen(batch=1)
    says = "query, kv, rows and valid must be what the kernel was compiled for, got others"
    with pytest.raises(ValueError, match=exactly(says)):
        unseen(**change)


def test_an_id_names_every_cache_row() -> None:
    check_cache_rows(torch.empty(MOST, 1, device="meta"))
    says = exactly("kv must have at most 2147483647 rows (2^31 - 1), got 2147483648")
    with pytest.raises(ValueError, match=says):
        check_cache_rows(torch.empty(MOST + 1, 1, device="meta"))


@pytest.mark.parametrize(
    ("tensor", "error", "says"),
    [
        (None, TypeError, "lse must be a torch.Tensor, got None"),
        ([0.0], TypeError, "lse must be a torch.Tensor, got list"),
        (torch.zeros(5, 96).double(), TypeError, "lse must be torch.float32, got torch.float64"),
        (torch.zeros(5, 95), ValueError, "lse must have shape [5, 96], got [5, 95]"),
        (torch.zeros(5, 96, 1), ValueError, "lse must have shape [5, 96], got [5, 96, 1]"),
        (torch.zeros(5), ValueError, "lse must have shape [5, 96], got [5]"),
        (torch.zeros(5, 96, device="meta"), ValueError, "lse must be on cpu, got meta"),
        (
            torch.zeros(5, 192)[:, ::2],
            ValueError,
            "lse must be contiguous with shape [5, 96], got strides [192, 2]",
        ),
    ],
)
def test_a_wrong_tensor(tensor: object, error: type[Exception], says: str) -> None:
    kind = {"dtypes": (torch.float32,), "device": CPU, "align_bytes": 4}
    check_tensor("lse", torch.zeros(5, 96), shape=(5, 96), **kind)
    with pytest.raises(error, match=exactly(says)):
        check_tensor("lse", tensor, shape=(5, 96), **kind)


def test_open_sizes() -> None:
    kind = {"dtypes": (torch.float32,), "device": CPU, "align_bytes": 4}
    for rows in (5, 6):
        check_tensor("x", torch.zeros(rows, 3), shape=(">= 5", "N"), **kind)
    says = exactly("x must have shape [>= 5, N], got [4, 3]")
    with pytest.raises(ValueError, match=says):
        check_tensor("x", torch.zeros(4, 3), shape=(">= 5", "N"), **kind)


def test_alignment() -> None:
    kind = {"dtypes": (torch.uint8,), "shape": (16,), "device": CPU}
    memory = torch.zeros(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    check_tensor("kv", memory[start : start + 16], align_bytes=16, **kind)
    check_tensor("kv", memory[start + 8 : start + 24], align_bytes=8, **kind)
    address = memory.data_ptr() + start + 8
    says = f"kv must start at a multiple of 16 bytes, got address {address:#x}"
    with pytest.raises(ValueError, match=exactly(says)):
        check_tensor("kv", memory[start + 8 : start + 24], align_bytes=16, **kind)


# ---- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_architectures(arch: str) -> None:
    check_arch(arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", None])
def test_other_architectures(arch: object) -> None:
    says = f"arch must be sm_90a, sm_100a, sm_103a or sm_120a, got {arch!r}"
    with pytest.raises(ValueError, match=exactly(says)):
        check_arch(arch)


def test_devices() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device(META) == META
    assert resolve_device(1) == torch.device("cuda:1")
    says = "device must be a torch.device, str or int, got "
    with pytest.raises(TypeError, match=exactly(says + "None")):
        resolve_device(None)
    with pytest.raises(TypeError, match=exactly(says + "bool")):
        resolve_device(True)
    with pytest.raises(
        ValueError, match=exactly("device must be a device such as 'cuda:0', got 'gpu'")
    ):
        resolve_device("gpu")


def test_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert resolve_device("cuda") == torch.device("cuda:3")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("cpu") == CPU


@pytest.mark.parametrize("check", [check_cuda, architecture_of])
def test_other_devices(check: Callable[[torch.device], object]) -> None:
    with pytest.raises(ValueError, match=exactly("device must be a CUDA device, got cpu")):
        check(CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize("check", [check_cuda, architecture_of])
def test_no_cuda_device(check: Callable[[torch.device], object]) -> None:
    says = exactly(
        "device must be a CUDA device that PyTorch can use, got cuda:0, "
        "and PyTorch finds none on this computer"
    )
    with pytest.raises(RuntimeError, match=says):
        check(torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a")],
)
def test_the_architecture_of_a_device(
    capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert architecture_of(torch.device("cuda:0")) == arch


def test_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    says = "device must have compute capability 9.0, 10.0, 10.3 or 12.0, got cuda:0 with 8.0"
    with pytest.raises(ValueError, match=exactly(says)):
        architecture_of(torch.device("cuda:0"))


# ---- words --------------------------------------------------------------------------------------


def test_words() -> None:
    assert one_of(["a"]) == "a"
    assert one_of(iter("ab")) == "a or b"
    assert one_of((1, 2, 3)) == "1, 2 or 3"
    assert [kind_of(value) for value in (None, 1, torch.zeros(1))] == ["None", "int", "Tensor"]
