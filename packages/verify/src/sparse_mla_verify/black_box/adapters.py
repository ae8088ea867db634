"""Calling the kernel of someone else, and adapters for some known kernels.

The calling convention is that of the reference's `decode`, without schedule and machine:

    kernel(query, kv, rows, valid, *, scale_log2, out_scale) -> (latent, lse)

query `[B, H, 576]` and kv `[N, 576]` are E4M3 bytes (uint8), rows `[B, W]` and valid `[B]` int32;
latent `[B, H, 512]` may be BF16, FP16, FP32 or FP64, lse `[B, H]` FP32 or FP64. The arrays are
numpy's, or PyTorch's on a device: the function's attribute `tensors` says so (`"cpu"`, `"cuda"`).
"""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import BASE, LOW_LATENCY, decode
from sparse_mla_verify.inputs.cases import LATENT, Case
from sparse_mla_verify.measure.bits import bits_of
from sparse_mla_verify.models.counterfactuals import BY_NAME, decoded

Kernel = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a kernel gave: latent `[B, H, 512]` and lse `[B, H]` as float64, and their bits."""

    latent: NDArray[np.float64]
    lse: NDArray[np.float64]
    latent_bits: NDArray[Any]
    lse_bits: NDArray[Any]

    @property
    def is_bf16(self) -> bool:
        """Whether latents have 16 bits, which are then read as BF16."""
        return self.latent_bits.dtype == np.uint16


def load(name: str) -> Kernel:
    """The function that `package.module:function` names.

    `counterfactual:p-bf16` and the like are the models of `counterfactuals`, as if they were
    kernels; `sparse_mla_verify.black_box.adapters:flashmla` and the like are below.

    Raises ValueError for another form of name, or one of nothing that can be called.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"kernel must be of the form package.module:function, got {name!r}")
    if module == "counterfactual":
        return counterfactual(function)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"kernel must be importable, got {name!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"kernel must be a function, got {name!r}: a {type(found).__name__}")
    kernel: Kernel = found
    return kernel


def call(kernel: Kernel, case: Case) -> Answer:
    """A kernel's answer to a case, of which it sees the rows and heads that are used.

    Raises ValueError when the answer's shapes are not those of the convention.
    """
    scales = case.arguments
    arrays = tuple(scales.pop(name).copy() for name in ("query", "kv", "rows", "valid"))
    device = getattr(kernel, "tensors", None)
    given = arrays if device is None else tuple(_tensor(a, device) for a in arrays)
    latent, lse = kernel(*given, **scales)
    latent, lse = _array(latent), _array(lse)
    wanted = ((case.batch, case.heads, LATENT), (case.batch, case.heads))
    if (latent.shape, lse.shape) != wanted:
        raise ValueError(
            f"the kernel's answer must be of shapes {wanted}, got {latent.shape}, {lse.shape}"
        )
    with np.errstate(invalid="ignore"):
        values = latent.astype(np.float64), lse.astype(np.float64)
    return Answer(*values, bits_of(latent), bits_of(lse))


def _tensor(array: NDArray[Any], device: str) -> Any:
    import torch

    return torch.from_numpy(array).to(device)


def _array(x: Any) -> NDArray[Any]:
    """An array of numpy, of whatever came; BF16 as `ml_dtypes` has it."""
    if isinstance(x, np.ndarray):
        return x
    x = x.detach().cpu()
    if str(x.dtype) == "torch.bfloat16":
        import torch

        return np.asarray(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.asarray(x.numpy())


# Kernels by name


def _takes(device: str) -> Callable[[Kernel], Kernel]:
    """Mark a kernel as one that takes PyTorch's tensors on a device."""

    def mark(kernel: Kernel) -> Kernel:
        kernel.tensors = device  # type: ignore[attr-defined]
        return kernel

    return mark


def counterfactual(name: str) -> Kernel:
    """A counterfactual of the base schedule's contract, in the place of a kernel.

    Raises ValueError for a name that is not a counterfactual's.
    """
    if name not in BY_NAME:
        raise ValueError(
            f"kernel must be a counterfactual, one of {', '.join(BY_NAME)}, got {name!r}"
        )

    def kernel(query: Any, kv: Any, rows: Any, valid: Any, **scales: Any) -> tuple[Any, Any]:
        heads = query.shape[1]
        case = Case("", name, "", query, kv, rows, valid, **scales, heads=heads)
        latent, lse = decoded(BY_NAME[name], case, "SM90")
        return latent.view(ml_dtypes.bfloat16), lse.view(np.float32)

    return kernel


def reference(query: Any, kv: Any, rows: Any, valid: Any, **scales: Any) -> tuple[Any, Any]:
    """This project's reference, base schedule, in the place of its kernel."""
    return decode(query, kv, rows, valid, **scales, schedule=BASE)


def reference_low_latency(
    query: Any, kv: Any, rows: Any, valid: Any, **scales: Any
) -> tuple[Any, Any]:
    """This project's reference, low-latency schedule."""
    return decode(query, kv, rows, valid, **scales, schedule=LOW_LATENCY)


@_takes("cuda")
def ours(query: Any, kv: Any, rows: Any, valid: Any, **scales: Any) -> tuple[Any, Any]:
    """This project's kernel, through its public function; base schedule."""
    import sparse_mla_kernel

    result: tuple[Any, Any] = sparse_mla_kernel.sparse_decode(query, kv, rows, valid, **scales)
    return result


@_takes("cuda")
def ours_low_latency(query: Any, kv: Any, rows: Any, valid: Any, **scales: Any) -> tuple[Any, Any]:
    """This project's kernel, low-latency schedule."""
    import sparse_mla_kernel

    result: tuple[Any, Any] = sparse_mla_kernel.sparse_decode(
        query, kv, rows, valid, **scales, schedule=sparse_mla_kernel.LOW_LATENCY
    )
    return result


@_takes("cpu")
def pytorch(query: Any, kv: Any, rows: Any, valid: Any, **scales: Any) -> tuple[Any, Any]:
    """Plain PyTorch in BF16 with an FP32 softmax, on the CPU."""
    import torch

    from sparse_mla_verify.peers.pytorch import attention

    p, values, lse = attention(
        query, kv, rows, valid, scale_log2=scales["scale_log2"], dtype=torch.bfloat16
    )
    latent = (p.float() @ values.float()) * scales["out_scale"]
    return latent.to(torch.bfloat16), lse.float()


FLASHMLA_FOLDER = "FLASHMLA_DIR"  # environment variable, the benchmark's too: its two files


@functools.cache
def _flashmla() -> Any:
    import os

    from sparse_mla_verify.peers import flashmla as peer

    folder = os.environ.get(FLASHMLA_FOLDER)
    found, why = peer.find(Path(folder) if folder else None)
    if found is None:
        raise ImportError(f"FlashMLA is not there: {why}")
    return found


@_takes("cuda")
def flashmla(query: Any, kv: Any, rows: Any, valid: Any, **scales: Any) -> tuple[Any, Any]:
    """FlashMLA's sparse FP8 decode: heads padded to 64 or 128, its own cache format, scales of 1.

    FlashMLA has no V scale. Its BF16 output is multiplied by a V scale that isn't 1, and rounded
    again. An id past a row's count is replaced by -1, which FlashMLA masks.
    """
    import torch

    from sparse_mla_verify.peers import flashmla as peer

    batch, heads, _ = query.shape
    width = peer.list_width(rows.shape[1])
    ids = torch.full((batch, width), -1, dtype=torch.int32, device=rows.device)
    place = torch.arange(rows.shape[1], device=rows.device)
    ids[:, : rows.shape[1]] = torch.where(place < valid[:, None], rows, -1)
    pages = -(-len(kv) // peer.PAGE_ROWS) * peer.PAGE_ROWS
    whole = torch.zeros((pages, kv.shape[1]), dtype=torch.uint8, device=kv.device)
    whole[: len(kv)] = kv
    schedule, _ = _flashmla().interface.get_mla_metadata()
    latent, lse = _flashmla().interface.flash_mla_with_kvcache(
        peer.padded_query(query[None], peer.padded_heads(heads))[0],
        peer.flashmla_cache(whole),
        None,
        None,
        LATENT,
        schedule,
        softmax_scale=scales["scale_log2"] * math.log(2),
        is_fp8_kvcache=True,
        indices=ids[:, None, :],
    )
    latent = latent[:, 0, :heads]
    if scales["out_scale"] != 1.0:
        latent = (latent.float() * scales["out_scale"]).to(torch.bfloat16)
    return latent, lse[:, :heads, 0]
