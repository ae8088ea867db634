"""Running the kernel on PyTorch tensors."""

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
    kind_of,
)
from sparse_mla_kernel.host.compile import CompiledSparse, compile_sparse
from sparse_mla_kernel.schedule import BASE, LATENT_COLUMNS, ROW_COLUMNS, Schedule

if TYPE_CHECKING:
    from sparse_mla_kernel.mailbox.memory import DcpMailbox

#: :func:`compile_sparse` without its checks, for sizes that have passed them once.
_known = functools.cache(compile_sparse)


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
    """Launch a compiled kernel on the current PyTorch stream of its device.

    All tensors are contiguous and on the kernel's device. In push mode ``query``, ``latent`` and
    ``lse`` are None: the kernel reads the query from the mailbox and sends its results to the ranks
    that own the heads.

    Args:
        kernel: From :func:`compile_sparse`.
        query: ``[cap, padded, 576]`` E4M3 (``uint8`` or ``float8_e4m3fn``), 16-byte aligned; rows
            ``0 .. batch - 1`` and heads ``0 .. heads - 1`` are used.
        kv: ``[N, 576]`` E4M3, 16-byte aligned; N up to 2^31 - 1.
        rows: ``[>= batch, width]`` int32: each row's ids of cache rows, compacted to the front. An
            id outside ``[0, N)`` is masked.
        valid: ``[>= batch]`` int32: how many of a row's ids count; clamped to ``[0, width]``.
        latent: ``[batch, padded, 512]`` bfloat16, out; heads from ``heads`` on are not written.
        lse: ``[batch, padded]`` float32, out, natural log; ``-inf`` for a row without keys.
        scale_log2: Softmax scale x tensor scales x log2(e).
        out_scale: The V scale.
        push: This rank's mailbox if the kernel was compiled for push mode, and None otherwise.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment, device or range, or does not
            belong to the mode that the kernel was compiled for.
        PeerTimeoutError: A kernel of an earlier step waited for another rank in vain.
    """
    if push is not None or type(kernel) is not CompiledSparse or kernel.push is not None:
        _check_launch(kernel, query, kv, rows, valid, latent, lse, push)
        scales = check_scale("scale_log2", scale_log2), check_scale("out_scale", out_scale)
        assert push is not None  # _check_launch has refused None
        kernel.launch(as_bytes(kv), rows, valid, *scales, push.arguments)
        return
    # Fast path: the launcher makes most checks, check_unseen the others, and neither names the
    # wrong argument. After any error the checks below are made, which do name it.
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
    """Make all checks of :func:`run_sparse`'s arguments, but for those of the scales."""
    if not isinstance(kernel, CompiledSparse):
        raise TypeError(f"kernel must be what compile_sparse returned, got {kind_of(kernel)}")
    k, batch, padded = kernel, kernel.batch, kernel.padded
    results = (("query", query), ("latent", latent), ("lse", lse))
    _check_mode(kernel, push, results)
    bound = [
        ("kv", kv, BYTES, ("N", ROW_COLUMNS), 16),
        ("rows", rows, (torch.int32,), (f">= {batch}", k.width), 4),
        ("valid", valid, (torch.int32,), (f">= {batch}",), 4),
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
    """Raise unless the arguments belong to the mode that the kernel was compiled for.

    In push mode ``push`` is the mailbox that the kernel was compiled for and each of ``results`` is
    None; in latent mode ``push`` is None.
    """
    if kernel.push is None:
        if push is not None:
            raise ValueError(
                f"push must be None for a kernel compiled without push, got {kind_of(push)}"
            )
        return
    from sparse_mla_kernel.mailbox.layout import MailboxLayout
    from sparse_mla_kernel.mailbox.memory import DcpMailbox

    if not isinstance(push, DcpMailbox):
        raise TypeError(f"push must be this rank's DcpMailbox, got {kind_of(push)}")
    box = MailboxLayout(kernel.padded, *kernel.push)
    if push.box != box or push.device != kernel.device:
        raise ValueError(f"push must be {box} on {kernel.device}, got {push.box} on {push.device}")
    for name, tensor in results:
        if tensor is not None:
            raise ValueError(f"{name} must be None in push mode, got {kind_of(tensor)}")
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
    """Sparse MLA decode of a batch: compile the kernel if need be, allocate the results, run.

    Args:
        query: ``[batch, padded, 576]`` E4M3 (``uint8`` or ``float8_e4m3fn``) on a CUDA device.
        kv: ``[N, 576]`` E4M3.
        rows: ``[>= batch, width]`` int32: each row's ids of cache rows. An id outside ``[0, N)`` is
            masked.
        valid: ``[>= batch]`` int32: how many of a row's ids count; clamped to ``[0, width]``.
        scale_log2: Softmax scale x tensor scales x log2(e).
        out_scale: The V scale.
        heads: Query heads that are used, a multiple of 16; all of them if left out.
        schedule: The order of rounding. A row's bits depend on the schedule, not on the batch.

    Returns:
        ``(latent, lse)``: ``[batch, padded, 512]`` bfloat16, and ``[batch, padded]`` float32,
        natural log. A row without keys has 0 and ``-inf``; so has a head from ``heads`` on.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment, device or range.
        RuntimeError: PyTorch finds no CUDA device on this computer.
    """
    check_dimensions(query, rows)
    batch, padded, _ = query.shape
    used = padded if heads is None else heads
    sizes = batch, used, padded, rows.shape[1], batch, query.device
    if type(used) is int and type(schedule) is Schedule:
        kernel = _known(*sizes, schedule=schedule)
    else:
        # compile_sparse refuses heads = 16.0. _known would not refuse it after heads = 16, because
        # functools.cache takes equal arguments for the same.
        kernel = compile_sparse(*sizes, schedule=schedule)
    latent = query.new_empty((batch, padded, LATENT_COLUMNS), dtype=torch.bfloat16)
    lse = query.new_empty((batch, padded), dtype=torch.float32)
    if used < padded:
        latent[:, used:].zero_()
        lse[:, used:].fill_(-torch.inf)
    run_sparse(kernel, query, kv, rows, valid, latent, lse, scale_log2, out_scale)
    return latent, lse
