"""Every wrong argument of a launch is an error that names it, and nothing is launched.

``run_sparse`` leaves to the compiled launcher what that checks anyway. So the launcher is tested
too, with tensors that say that they are on a GPU: a machine without one launches nothing.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sparse_mla_kernel import (
    BASE,
    LOW_LATENCY,
    Artifact,
    CompiledSparse,
    Schedule,
    cross_compile,
    run_sparse,
    sparse_decode,
)
from sparse_mla_kernel.checks import architecture_of, resolve_device
from sparse_mla_kernel.host import launch as api

BATCH, HEADS, PADDED, WIDTH, CAP, N = 2, 16, 32, 8, 3, 5


def _never(*_: object) -> None:
    pytest.fail("launched")


KERNEL = CompiledSparse(
    BATCH,
    HEADS,
    PADDED,
    WIDTH,
    CAP,
    torch.device("cpu"),
    BASE,
    Artifact("sm_90a", "", b""),
    _never,
)


def arguments() -> dict[str, object]:
    return {
        "query": torch.zeros(CAP, PADDED, 576, dtype=torch.uint8),
        "kv": torch.zeros(N, 576, dtype=torch.float8_e4m3fn),
        "rows": torch.zeros(BATCH, WIDTH, dtype=torch.int32),
        "valid": torch.zeros(BATCH, dtype=torch.int32),
        "latent": torch.zeros(BATCH, PADDED, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(BATCH, PADDED),
        "scale_log2": 0.1,
        "out_scale": 1.0,
    }


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def _is_taken(name: str, tensor: torch.Tensor) -> bool:
    """Whether the launcher itself would take this for the argument."""
    short = name in ("rows", "valid") and len(tensor) < BATCH
    return short or tensor.dtype in (torch.int8, torch.uint32)


WRONG = [
    ("query", None, TypeError, "query is a NoneType; it may be a torch.Tensor"),
    ("query", zeros(CAP, PADDED, 576, dtype=torch.int8), TypeError, "query is torch.int8"),
    ("query", zeros(CAP, PADDED, 512), ValueError, r"may be \[3, 32, 576\]"),
    ("query", zeros(CAP + 1, PADDED, 576), ValueError, r"query has shape \[4, 32, 576\]"),
    ("query", zeros(CAP, 576, PADDED).mT, ValueError, "query has strides .*; it may be contiguous"),
    ("query", zeros(CAP * PADDED * 576 + 8)[8:].view(CAP, PADDED, 576), ValueError, "starts at"),
    ("kv", zeros(N, 656), ValueError, r"kv has shape \[5, 656\]; it may be \[N, 576\]"),
    ("kv", zeros(2 * N, 576)[::2], ValueError, "kv has strides"),
    ("kv", zeros(N, 576, dtype=torch.bfloat16), TypeError, "kv is torch.bfloat16"),
    ("kv", torch.empty(N, 576, dtype=torch.uint8, device="meta"), ValueError, "kv is on meta"),
    ("rows", zeros(BATCH, WIDTH, dtype=torch.int64), TypeError, "rows is torch.int64"),
    ("rows", zeros(BATCH, WIDTH, dtype=torch.uint32), TypeError, "rows is torch.uint32"),
    ("valid", zeros(BATCH, dtype=torch.uint32), TypeError, "valid is torch.uint32"),
    ("valid", 3, TypeError, "valid is a int; it may be a torch.Tensor"),
    ("valid", zeros(BATCH, 1, dtype=torch.int32), ValueError, r"valid has shape \[2, 1\]"),
    ("valid", zeros(2 * BATCH, dtype=torch.int32)[::2], ValueError, "valid has strides"),
    ("rows", zeros(BATCH, WIDTH + 1, dtype=torch.int32), ValueError, r"it may be \[>=2, 8\]"),
    ("rows", zeros(BATCH - 1, WIDTH, dtype=torch.int32), ValueError, r"it may be \[>=2, 8\]"),
    ("valid", zeros(BATCH - 1, dtype=torch.int32), ValueError, r"it may be \[>=2\]"),
    (
        "latent",
        zeros(BATCH, PADDED, 512, dtype=torch.float16),
        TypeError,
        "latent is torch.float16",
    ),
    ("latent", zeros(BATCH, HEADS, 512, dtype=torch.bfloat16), ValueError, "latent has shape"),
    ("latent", None, TypeError, "latent is a NoneType; it may be a torch.Tensor"),
    ("lse", zeros(BATCH, PADDED, dtype=torch.float64), TypeError, "lse is torch.float64"),
    ("lse", zeros(PADDED, BATCH, dtype=torch.float32).mT, ValueError, "lse has strides"),
    ("scale_log2", float("nan"), ValueError, "scale_log2 is nan; it may be any finite float32"),
    ("scale_log2", 1e39, ValueError, "scale_log2 is 1e[+]39"),
    ("scale_log2", True, TypeError, "scale_log2 is a bool; it may be a float"),
    ("out_scale", "1", TypeError, "out_scale is a str; it may be a float"),
]


@pytest.mark.parametrize(("name", "value", "error", "says"), WRONG)
def test_wrong_argument(
    name: str,
    value: object,
    error: type[Exception],
    says: str,
    launch: Callable[..., None],
) -> None:
    with pytest.raises(error, match=says):
        run_sparse(replace(KERNEL, launch=launch), **{**arguments(), name: value})


TAKEN = [
    *(case for case in WRONG if case[0] in ("scale_log2", "out_scale")),
    *(case for case in WRONG if isinstance(case[1], torch.Tensor) and _is_taken(*case[:2])),
]


@pytest.mark.parametrize(("name", "value", "error", "says"), TAKEN)
def test_what_the_launcher_would_take(
    name: str, value: object, error: type[Exception], says: str
) -> None:
    """These it would launch with; they don't reach it."""
    with pytest.raises(error, match=says):
        run_sparse(KERNEL, **{**arguments(), name: value})


def test_right_arguments_are_launched_once() -> None:
    launched: list[tuple] = []
    kernel = replace(KERNEL, launch=lambda *given: launched.append(given))
    named = arguments()
    run_sparse(kernel, **named)
    [given] = launched
    assert [tuple(t.shape) for t in given[:6]] == [tuple(t.shape) for t in list(named.values())[:6]]
    assert [t.data_ptr() for t in given[:6]] == [t.data_ptr() for t in list(named.values())[:6]]
    assert (given[0].dtype, given[1].dtype) == (torch.uint8, torch.uint8)
    assert given[6:] == (0.1, 1.0)


@pytest.mark.parametrize("scale", [1, torch.tensor(0.5).numpy()[()], -3.4028234663852886e38])
def test_scales_of_other_types(scale: object) -> None:
    launched: list[tuple] = []
    kernel = replace(KERNEL, launch=lambda *given: launched.append(given))
    run_sparse(kernel, **{**arguments(), "out_scale": scale})
    assert launched[0][7] == float(scale)
    assert type(launched[0][7]) is float


def test_an_error_of_the_launch_itself_is_not_swallowed() -> None:
    tries: list[int] = []

    def fails(*_: object) -> None:
        tries.append(1)
        raise RuntimeError("CUDA")

    with pytest.raises(RuntimeError, match="CUDA"):
        run_sparse(replace(KERNEL, launch=fails), **arguments())
    assert len(tries) == 1


# ---- what the launcher checks -------------------------------------------------------------------


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would launch over no memory at all")


@no_gpu
def test_the_launcher_takes_right_arguments(
    launch: Callable[..., None], on_gpu: Callable[..., object]
) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)cuda"):  # past its checks, it finds no GPU
        launch(*map(on_gpu, arguments().values()))


@no_gpu
@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        *(
            (name, value, {})
            for name, value, _, says in WRONG
            if isinstance(value, torch.Tensor)
            and value.device.type == "cpu"
            and says != "starts at"
            and not _is_taken(name, value)
        ),
        *((name, None, {"address": (1 << 20) + 8}) for name in ("query", "kv", "latent")),
        *((name, None, {"address": (1 << 20) + 2}) for name in ("rows", "valid", "lse")),
        *((name, None, {"device": 1}) for name in ("kv", "rows", "valid", "latent", "lse")),
    ],
)
def test_the_launcher_refuses(
    name: str,
    value: torch.Tensor | None,
    where: dict[str, int],
    launch: Callable[..., None],
    on_gpu: Callable[..., object],
) -> None:
    named = arguments()
    wrong = on_gpu(named[name] if value is None else value, **where)
    given = {key: on_gpu(right) for key, right in named.items()} | {name: wrong}
    argument = rf"(?s)(Mismatched|Misaligned) .*argument #{list(named).index(name)}"
    with pytest.raises((TypeError, ValueError), match=argument):
        launch(*given.values())


# ---- other entry points -------------------------------------------------------------------------


def test_wrong_kernel() -> None:
    with pytest.raises(TypeError, match="kernel is a str; it may be what compile_sparse returned"):
        run_sparse("kernel", **arguments())


def test_too_many_cache_rows() -> None:
    """An expanded row would do, but is not contiguous; a meta tensor has the size and no memory."""
    kernel = replace(KERNEL, device=torch.device("meta"))
    meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in arguments().items()
    }
    meta["kv"] = torch.empty(2**31, 576, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="kv has 2147483648 rows"):
        run_sparse(kernel, **meta)


def test_decode_needs_a_cuda_device() -> None:
    named = arguments()
    with pytest.raises(ValueError, match="device is cpu; it may be a CUDA device"):
        sparse_decode(
            named["query"],
            named["kv"],
            named["rows"],
            named["valid"],
            scale_log2=0.1,
            out_scale=1.0,
        )


@pytest.mark.parametrize(("name", "dims"), [("query", 3), ("rows", 2)])
def test_decode_with_a_missing_dimension(name: str, dims: int) -> None:
    named = arguments()
    named[name] = named[name][0]
    with pytest.raises(ValueError, match=f"{name} has shape .*; it may have {dims} dimensions"):
        sparse_decode(
            named["query"],
            named["kv"],
            named["rows"],
            named["valid"],
            scale_log2=0.1,
            out_scale=1.0,
        )


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device(1) == torch.device("cuda:1")
    with pytest.raises(TypeError, match="device is a NoneType"):
        resolve_device(None)
    with pytest.raises(ValueError, match="device is 'gpu'; it may be a CUDA device"):
        resolve_device("gpu")
    with pytest.raises(ValueError, match="device is cpu; it may be a CUDA device"):
        architecture_of(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_no_cuda_device() -> None:
    with pytest.raises(RuntimeError, match="torch finds no usable CUDA device here"):
        architecture_of(torch.device("cuda:0"))


def test_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 8\.0; it may have 9\.0, 10\.0"):
        architecture_of(torch.device("cuda:0"))


def test_the_operator_knows_its_shapes() -> None:
    named = arguments()
    meta = [named[name].to("meta") for name in ("query", "kv", "rows", "valid")]
    latent, lse = torch.ops.sparse_mla.decode(*meta, 0.1, 1.0)
    assert latent.shape == (CAP, PADDED, 512)
    assert latent.dtype == torch.bfloat16
    assert lse.shape == (CAP, PADDED)
    assert lse.dtype == torch.float32
    same = torch.ops.sparse_mla.decode(*meta, 0.1, 1.0, None, "low-latency")
    assert same[0].shape == latent.shape
    with pytest.raises(ValueError, match="schedule is 'fast'; it may be one of base,"):
        torch.ops.sparse_mla.decode(*meta, 0.1, 1.0, None, "fast")
    with pytest.raises(ValueError, match="query has shape"):
        torch.ops.sparse_mla.decode(meta[0][0], *meta[1:], 0.1, 1.0)


def test_the_operator_takes_a_schedule_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []

    def decode(
        *tensors: torch.Tensor, schedule: Schedule, **others: object
    ) -> tuple[torch.Tensor, ...]:
        taken.append(schedule)
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(api, "sparse_decode", decode)
    tensors = [arguments()[name] for name in ("query", "kv", "rows", "valid")]
    for more in ((), (None, "low-latency-4")):
        torch.ops.sparse_mla.decode(*tensors, 0.1, 1.0, *more)
    assert taken == [BASE, replace(LOW_LATENCY, split=4)]
    with pytest.raises(ValueError, match="schedule is 'fast'; it may be one of base, low-latency,"):
        torch.ops.sparse_mla.decode(*tensors, 0.1, 1.0, None, "fast")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (
            (65535, 128, 128, 16, 65535),
            r"padded is 128; batch x padded x 576 is \d+; it may be at most",
        ),
        ((65535, 16, 16, 40000, 65535), r"width is 40000; batch x width is \d+; it may be at most"),
    ],
)
def test_sizes_past_32_bit_offsets_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        cross_compile(*sizes)
