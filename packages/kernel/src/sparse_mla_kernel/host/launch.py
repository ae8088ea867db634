"""Running the kernel on torch tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from sparse_mla_kernel.checks import (
    BYTES,
    as_bytes,
    as_scale,
    check_cache_rows,
    check_dimensions,
    check_scale,
    check_tensor,
    check_unseen,
)
from sparse_mla_kernel.host.compile import CompiledSparse, compile_sparse
from sparse_mla_kernel.host.policy import NAMED
from sparse_mla_kernel.schedule import BASE, LATENT_COLUMNS, ROW_COLUMNS, Schedule

if TYPE_CHECKING:
    from sparse_mla_kernel.mailbox.memory import DcpMailbox


def run_sparse(
    kernel: CompiledSparse,
    query: torch.Tensor | None,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    latent: torch.Tensor | None,
    lse: torch.Tensor | None,
    scale_log2: float,
    out_scale: float,
    push: DcpMailbox | None = None,
) -> None:
    """Launch a compiled kernel on torch's current stream of its device.

    All tensors are contiguous and on the kernel's device. In push mode ``query``, ``latent`` and
    ``lse`` are None: the query comes out of the mailbox, the results go to the heads' owners.

    Args:
        kernel: From :func:`compile_sparse`.
        query: ``[cap, padded, 576]`` E4M3 (``uint8`` or ``float8_e4m3fn``), 16-byte aligned; rows
            ``0 .. batch - 1`` and heads ``0 .. heads - 1`` are used.
        kv: ``[N, 576]`` E4M3, 16-byte aligned; N up to 2^31 - 1.
        rows: ``[>= batch, width]`` int32: each row's ids of cache rows, compacted to the front. An
            id outside ``[0, N)`` is masked.
        valid: ``[>= batch]`` int32: how many of them count; clamped to ``[0, width]``.
        latent: ``[batch, padded, 512]`` bfloat16, out; heads from ``heads`` on are not written.
        lse: ``[batch, padded]`` float32, out, natural log; ``-inf`` for a row without keys.
        scale_log2: Softmax scale x tensor scales x log2(e).
        out_scale: The V scale.
        push: This rank's mailbox if the kernel was compiled for push mode, and else None.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment, device or range, or is not
            for the kernel's mode.
        PeerTimeoutError: An earlier step lost a rank.
    """
    if push is not None or type(kernel) is not CompiledSparse or kernel.push is not None:
        _check_launch(kernel, query, kv, rows, valid, latent, lse, push)
        scales = check_scale("scale_log2", scale_log2), check_scale("out_scale", out_scale)
        assert push is not None  # as _check_launch saw
        kernel.launch(as_bytes(kv), rows, valid, *scales, push.arguments)
        return
    # The launcher checks most itself. Whatever it or the rest finds, the checks below name.
    try:
        query_bytes, kv_bytes = as_bytes(query), as_bytes(kv)
        scales = as_scale(scale_log2), as_scale(out_scale)
        check_unseen(query_bytes, kv_bytes, rows, valid, kernel.batch, kernel.device)
        kernel.launch(query_bytes, kv_bytes, rows, valid, latent, lse, *scales)
    except Exception as error:
        failed = error
    else:
        return
    _check_launch(kernel, query, kv, rows, valid, latent, lse, push)
    check_scale("scale_log2", scale_log2)
    check_scale("out_scale", out_scale)
    raise failed


def _check_launch(
    kernel: CompiledSparse,
    query: torch.Tensor | None,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    latent: torch.Tensor | None,
    lse: torch.Tensor | None,
    push: DcpMailbox | None,
) -> None:
    """Raise what :func:`run_sparse` says of its arguments, but for the scales."""
    if not isinstance(kernel, CompiledSparse):
        raise TypeError(
            f"kernel is a {type(kernel).__name__}; it may be what compile_sparse returned"
        )
    k, batch, padded = kernel, kernel.batch, kernel.padded
    results = (("query", query), ("latent", latent), ("lse", lse))
    _check_mode(kernel, push, results)
    bound = [
        ("kv", kv, BYTES, ("N", ROW_COLUMNS), 16),
        ("rows", rows, (torch.int32,), (f">={batch}", k.width), 4),
        ("valid", valid, (torch.int32,), (f">={batch}",), 4),
    ]
    if push is None:
        bound += [
            ("query", query, BYTES, (k.cap, padded, ROW_COLUMNS), 16),
            ("latent", latent, (torch.bfloat16,), (batch, padded, LATENT_COLUMNS), 16),
            ("lse", lse, (torch.float32,), (batch, padded), 4),
        ]
    for name, tensor, dtypes, shape, align in bound:
        check_tensor(name, tensor, dtypes=dtypes, shape=shape, device=k.device, align_bytes=align)
    check_cache_rows(kv)


def _check_mode(
    kernel: CompiledSparse,
    push: DcpMailbox | None,
    results: tuple[tuple[str, torch.Tensor | None], ...],
) -> None:
    """The mailbox is there if and only if the kernel was compiled for one, and it is that one."""
    if kernel.push is None:
        if push is not None:
            raise ValueError("push may be None: the kernel was compiled without it")
        return
    from sparse_mla_kernel.mailbox.layout import MailboxLayout
    from sparse_mla_kernel.mailbox.memory import DcpMailbox

    if not isinstance(push, DcpMailbox):
        raise TypeError(f"push is a {type(push).__name__}; it may be this rank's DcpMailbox")
    box = MailboxLayout(kernel.padded, *kernel.push)
    if push.box != box or push.device != kernel.device:
        raise ValueError(f"push is {push.box} on {push.device}; it may be {box} on {kernel.device}")
    for name, tensor in results:
        if tensor is not None:
            raise ValueError(f"{name} is given; it may be None in push mode")
    push.check()


def sparse_decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    *,
    scale_log2: float,
    out_scale: float,
    heads: int | None = None,
    schedule: Schedule = BASE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse MLA decode of a batch: compile if need be, allocate, run.

    Args:
        query: ``[batch, padded, 576]`` E4M3 (``uint8`` or ``float8_e4m3fn``) on a CUDA device.
        kv: ``[N, 576]`` E4M3.
        rows: ``[>= batch, width]`` int32: each row's ids of cache rows. An id outside ``[0, N)`` is
            masked.
        valid: ``[>= batch]`` int32: how many of a row's ids count; clamped to ``[0, width]``.
        scale_log2: Softmax scale x tensor scales x log2(e).
        out_scale: The V scale.
        heads: Query heads that are used, a multiple of 16; all of them if left out.
        schedule: Order of rounding. A row's bits depend on it and not on the batch.

    Returns:
        ``(latent, lse)``: ``[batch, padded, 512]`` bfloat16, and ``[batch, padded]`` float32,
        natural log. A row without keys, and a head from ``heads`` on, is 0 and ``-inf``.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment, device or range.
        RuntimeError: There is no usable CUDA device.
    """
    check_dimensions(query, rows)
    batch, padded, _ = query.shape
    used = padded if heads is None else heads
    sizes = batch, used, padded, rows.shape[1], batch, query.device
    if type(used) is int and type(schedule) is Schedule:
        kernel = _known(*sizes, schedule)
    else:  # to be refused: 16.0 and True equal integers, and would be found
        kernel = compile_sparse(*sizes, schedule=schedule)
    latent = query.new_empty((batch, padded, LATENT_COLUMNS), dtype=torch.bfloat16)
    lse = query.new_empty((batch, padded), dtype=torch.float32)
    if used < padded:
        latent[:, used:].zero_()
        lse[:, used:].fill_(-torch.inf)
    run_sparse(kernel, query, kv, rows, valid, latent, lse, scale_log2, out_scale)
    return latent, lse


def _named(schedule: str) -> Schedule:
    if schedule not in NAMED:
        raise ValueError(f"schedule is {schedule!r}; it may be one of {', '.join(NAMED)}")
    return NAMED[schedule]


@functools.cache
def _known(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    device: torch.device,
    schedule: Schedule,
) -> CompiledSparse:
    """:func:`compile_sparse`, whose checks are not made again."""
    return compile_sparse(batch, heads, padded, width, cap, device, schedule=schedule)


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
    """:func:`sparse_decode` as ``torch.ops.sparse_mla.decode``, for ``torch.compile``.

    Arguments as there, but ``schedule``: a name in :data:`sparse_mla_kernel.host.policy.NAMED`.

    Raises:
        ValueError: ``schedule`` is no such name, or as there.
        TypeError: As there.
        RuntimeError: As there.
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
