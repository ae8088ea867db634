"""One decode step under decode context parallelism, on PyTorch tensors, without a collective.

A step is three kernels on the current stream: the query exchange, the decode with push, and the
owner merge. :func:`dcp_decode` allocates the results and launches the step; :func:`run_dcp`
launches it into tensors that the caller has. Ranks that share a GPU need :func:`query_exchange`,
:func:`push_decode` and :func:`owner_merge`, which launch one kernel each.
"""

from __future__ import annotations

import torch

from sparse_mla_kernel.checks import (
    BYTES,
    as_bytes,
    as_scale,
    check_cache_rows,
    check_cap,
    check_dimensions,
    check_int,
    check_scale,
    check_tensor,
    check_unseen,
    kind_of,
)
from sparse_mla_kernel.dcp.compile import CompiledStep, compile_step
from sparse_mla_kernel.mailbox.memory import DcpMailbox
from sparse_mla_kernel.schedule import BASE, LATENT_COLUMNS, ROW_COLUMNS, Schedule


def compile_dcp(
    mailbox: DcpMailbox, batch: int, width: int, *, schedule: Schedule = BASE
) -> CompiledStep:
    """Compile and load a step's kernels, once a process, device, shape and mailbox layout.

    Args:
        mailbox: This rank's mailbox.
        batch: Decode rows, at most the mailbox's ``cap``; the same on every rank.
        width: Row ids that a row's list holds.
        schedule: The order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or the device can't run the kernels.
        RuntimeError: PyTorch finds no CUDA device on this computer.
    """
    _check_mailbox(mailbox)
    for name, value in (("batch", batch), ("width", width)):
        check_int(name, value)
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    check_cap(mailbox.box.cap, batch)
    return compile_step(batch, width, mailbox.box, mailbox.device, schedule)


def query_exchange(kernels: CompiledStep, mailbox: DcpMailbox, query: torch.Tensor) -> None:
    """Store this rank's query heads into every rank's mailbox.

    Args:
        kernels: From :func:`compile_dcp`.
        mailbox: This rank's mailbox.
        query: ``[batch, owner_heads, 576]`` E4M3 (``uint8`` or ``float8_e4m3fn``), 16-byte aligned.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment or device.
        PeerTimeoutError: A kernel of an earlier step waited for another rank in vain.
    """
    _check_step(kernels, mailbox)
    _check_query(kernels, query)
    kernels.query_exchange(as_bytes(query), mailbox.arguments)


def push_decode(
    kernels: CompiledStep,
    mailbox: DcpMailbox,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    scale_log2: float,
    out_scale: float,
) -> None:
    """Wait for all ranks' queries, attend to this rank's keys, send each head's row to its owner.

    Args:
        kernels: From :func:`compile_dcp`.
        mailbox: This rank's mailbox.
        kv: ``[N, 576]`` E4M3 cache rows of this rank.
        rows: ``[>= batch, width]`` int32: each row's ids of cache rows, compacted to the front.
        valid: ``[>= batch]`` int32: how many of a row's ids count; clamped to ``[0, width]``.
        scale_log2: Softmax scale x tensor scales x log2(e).
        out_scale: The V scale.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment, device or range.
        PeerTimeoutError: A kernel of an earlier step waited for another rank in vain.
    """
    _check_step(kernels, mailbox)
    _check_keys(kernels, kv, rows, valid)
    scales = check_scale("scale_log2", scale_log2), check_scale("out_scale", out_scale)
    kernels.push_decode(as_bytes(kv), rows, valid, *scales, mailbox.arguments)


def owner_merge(
    kernels: CompiledStep, mailbox: DcpMailbox, latent: torch.Tensor, lse: torch.Tensor
) -> None:
    """Wait for all ranks' partials of this rank's heads and merge them, which ends the step.

    Args:
        kernels: From :func:`compile_dcp`.
        mailbox: This rank's mailbox.
        latent: ``[batch, owner_heads, 512]`` bfloat16, out.
        lse: ``[batch, owner_heads]`` float32, out, natural log; ``-inf`` where no rank has a key.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment or device.
        PeerTimeoutError: A kernel of an earlier step waited for another rank in vain.
    """
    _check_step(kernels, mailbox)
    _check_outputs(kernels, latent, lse)
    kernels.owner_merge(latent, lse, mailbox.arguments)


def run_dcp(
    kernels: CompiledStep,
    mailbox: DcpMailbox,
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    latent: torch.Tensor,
    lse: torch.Tensor,
    scale_log2: float,
    out_scale: float,
) -> None:
    """Launch one whole step on the current PyTorch stream.

    Every rank of the group calls this function, with its own heads and its own keys. A CUDA graph
    can capture the call, because the mailbox's parity lies on the device; :func:`compile_dcp` has
    to be called before the capture.

    Args:
        kernels: From :func:`compile_dcp`.
        mailbox: This rank's mailbox.
        query: ``[batch, owner_heads, 576]`` E4M3 (``uint8`` or ``float8_e4m3fn``), 16-byte aligned.
        kv: ``[N, 576]`` E4M3 cache rows of this rank.
        rows: ``[>= batch, width]`` int32: each row's ids of cache rows, compacted to the front.
        valid: ``[>= batch]`` int32: how many of a row's ids count; clamped to ``[0, width]``.
        latent: ``[batch, owner_heads, 512]`` bfloat16, out.
        lse: ``[batch, owner_heads]`` float32, out, natural log; ``-inf`` where no rank has a key.
        scale_log2: Softmax scale x tensor scales x log2(e).
        out_scale: The V scale.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment, device or range.
        PeerTimeoutError: A kernel of an earlier step waited for another rank in vain.
    """
    _check_step(kernels, mailbox)
    # Fast path: the launcher makes most checks, check_unseen the others, and neither names the
    # wrong argument. After any error the checks below are made, which do name it.
    try:
        query_bytes, kv_bytes = as_bytes(query), as_bytes(kv)
        scales = as_scale(scale_log2), as_scale(out_scale)
        check_unseen(query_bytes, kv_bytes, rows, valid, kernels.batch, kernels.device)
        keys = kv_bytes, rows, valid
        kernels.step(query_bytes, *keys, latent, lse, *scales, mailbox.arguments)
    except Exception as error:
        failed = error
    else:
        return
    _check_query(kernels, query)
    _check_keys(kernels, kv, rows, valid)
    _check_outputs(kernels, latent, lse)
    check_scale("scale_log2", scale_log2)
    check_scale("out_scale", out_scale)
    raise failed


def dcp_decode(
    mailbox: DcpMailbox,
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    *,
    scale_log2: float,
    out_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse MLA decode of this rank's heads over the keys of all ranks.

    Compiles the step if need be, allocates the results and runs the step. Every rank of the group
    calls this function with a batch of the same size.

    Args:
        mailbox: This rank's mailbox.
        query: ``[batch, owner_heads, 576]`` E4M3 (``uint8`` or ``float8_e4m3fn``), this rank's
            heads.
        kv: ``[N, 576]`` E4M3 cache rows of this rank.
        rows: ``[>= batch, width]`` int32: each row's ids of cache rows. An id outside ``[0, N)`` is
            masked.
        valid: ``[>= batch]`` int32: how many of a row's ids count; clamped to ``[0, width]``.
        scale_log2: Softmax scale x tensor scales x log2(e).
        out_scale: The V scale.

    Returns:
        ``(latent, lse)``: ``[batch, owner_heads, 512]`` bfloat16, and ``[batch, owner_heads]``
        float32, natural log. A head for which no rank has a key has 0 and ``-inf``. A rank's row
        that is not finite is left out of the merge and counted in ``mailbox.dropped()``.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: An argument has another shape, stride, alignment, device or range.
        RuntimeError: PyTorch finds no CUDA device on this computer.
        PeerTimeoutError: A kernel of an earlier step waited for another rank in vain. If that
            happens in this step, the step gives NaN, and ``mailbox.check()`` raises the error once
            the step has run.
    """
    _check_mailbox(mailbox)
    check_dimensions(query, rows)
    kernels = compile_dcp(mailbox, query.shape[0], rows.shape[1])
    shape = (kernels.batch, kernels.box.owner_heads)
    latent = query.new_empty((*shape, LATENT_COLUMNS), dtype=torch.bfloat16)
    lse = query.new_empty(shape, dtype=torch.float32)
    run_dcp(kernels, mailbox, query, kv, rows, valid, latent, lse, scale_log2, out_scale)
    return latent, lse


def _check_mailbox(mailbox: DcpMailbox) -> None:
    if not isinstance(mailbox, DcpMailbox):
        raise TypeError(f"mailbox must be a DcpMailbox, got {kind_of(mailbox)}")


def _check_step(kernels: CompiledStep, mailbox: DcpMailbox) -> None:
    """Raise unless the kernels were compiled for this mailbox and no earlier step lost a rank."""
    if not isinstance(kernels, CompiledStep):
        raise TypeError(f"kernels must be what compile_dcp returned, got {kind_of(kernels)}")
    _check_mailbox(mailbox)
    if mailbox.box != kernels.box or mailbox.device != kernels.device:
        raise ValueError(
            "mailbox must be as the kernels were compiled for, "
            f"{kernels.box} on {kernels.device}, got {mailbox.box} on {mailbox.device}"
        )
    mailbox.check()


def _check_query(k: CompiledStep, query: torch.Tensor) -> None:
    shape = (k.batch, k.box.owner_heads, ROW_COLUMNS)
    check_tensor("query", query, dtypes=BYTES, shape=shape, device=k.device, align_bytes=16)


def _check_keys(k: CompiledStep, kv: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> None:
    for name, tensor, dtypes, shape, align in (
        ("kv", kv, BYTES, ("N", ROW_COLUMNS), 16),
        ("rows", rows, (torch.int32,), (f">= {k.batch}", k.width), 4),
        ("valid", valid, (torch.int32,), (f">= {k.batch}",), 4),
    ):
        check_tensor(name, tensor, dtypes=dtypes, shape=shape, device=k.device, align_bytes=align)
    check_cache_rows(kv)


def _check_outputs(k: CompiledStep, latent: torch.Tensor, lse: torch.Tensor) -> None:
    shape = (k.batch, k.box.owner_heads)
    for name, tensor, dtype, sizes, align in (
        ("latent", latent, torch.bfloat16, (*shape, LATENT_COLUMNS), 16),
        ("lse", lse, torch.float32, shape, 4),
    ):
        check_tensor(name, tensor, dtypes=(dtype,), shape=sizes, device=k.device, align_bytes=align)
