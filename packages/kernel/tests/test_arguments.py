"""Every wrong argument of a launch is an error that names it, and nothing is launched."""

from dataclasses import replace

import pytest
import torch

from sparse_mla_kernel import BASE, Artifact, CompiledSparse, run_sparse, sparse_decode
from sparse_mla_kernel.checks import architecture_of, resolve_device

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
    ("lse", zeros(BATCH, PADDED, dtype=torch.float64), TypeError, "lse is torch.float64"),
    ("lse", zeros(PADDED, BATCH, dtype=torch.float32).mT, ValueError, "lse has strides"),
    ("scale_log2", float("nan"), ValueError, "scale_log2 is nan; it may be any finite float32"),
    ("scale_log2", 1e39, ValueError, "scale_log2 is 1e[+]39"),
    ("out_scale", "1", TypeError, "out_scale is a str; it may be a float"),
]


@pytest.mark.parametrize(("name", "value", "error", "says"), WRONG)
def test_wrong_argument(name: str, value: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        run_sparse(KERNEL, **{**arguments(), name: value})


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
