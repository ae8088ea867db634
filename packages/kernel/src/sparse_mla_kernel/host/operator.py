"""The decode as a PyTorch operator, ``torch.ops.sparse_mla.decode``, for ``torch.compile``."""

from __future__ import annotations

import torch

from sparse_mla_kernel.checks import check_dimensions, one_of
from sparse_mla_kernel.host.launch import sparse_decode
from sparse_mla_kernel.host.policy import NAMED
from sparse_mla_kernel.schedule import LATENT_COLUMNS, Schedule


@torch.library.custom_op("sparse_mla::decode", mutates_args=())
def decode_op(
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    scale_log2: float,
    out_scale: float,
    heads: int | None = None,
    schedule: str = "base",
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sparse_decode` as an operator, whose schedule has a name.

    Args:
        query: ``[batch, padded, 576]`` E4M3 (``uint8`` or ``float8_e4m3fn``) on a CUDA device.
        kv: ``[N, 576]`` E4M3.
        rows: ``[>= batch, width]`` int32: each row's ids of cache rows.
        valid: ``[>= batch]`` int32: how many of a row's ids count.
        scale_log2: Softmax scale x tensor scales x log2(e).
        out_scale: The V scale.
        heads: Query heads that are used, a multiple of 16; all of them if left out.
        schedule: A name in :data:`sparse_mla_kernel.host.policy.NAMED`.

    Returns:
        ``(latent, lse)``: ``[batch, padded, 512]`` bfloat16, and ``[batch, padded]`` float32,
        natural log.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment, device or range, or no
            schedule has this name.
        RuntimeError: PyTorch finds no CUDA device on this computer.
    """
    return sparse_decode(
        query,
        kv,
        rows,
        valid,
        scale_log2=scale_log2,
        out_scale=out_scale,
        heads=heads,
        schedule=_named(schedule),
    )


# PyTorch calls this with the operator's own arguments, so that the signature has to be the same.
@decode_op.register_fake
def _(
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    scale_log2: float,
    out_scale: float,
    heads: int | None = None,
    schedule: str = "base",
) -> tuple[torch.Tensor, torch.Tensor]:
    check_dimensions(query, rows)
    _named(schedule)
    batch, padded, _ = query.shape
    return (
        query.new_empty((batch, padded, LATENT_COLUMNS), dtype=torch.bfloat16),
        query.new_empty((batch, padded), dtype=torch.float32),
    )


def _named(schedule: str) -> Schedule:
    if schedule not in NAMED:
        raise ValueError(f"schedule must be {one_of(NAMED)}, got {schedule!r}")
    return NAMED[schedule]
