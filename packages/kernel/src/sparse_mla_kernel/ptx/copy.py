"""Asynchronous copies from global to shared memory, and the mbarriers that count them."""

from __future__ import annotations

from cutlass import Int32, Int64, Uint16, cute
from cutlass.cute.arch import inline_ptx


@cute.jit
def copy_async_b128(address: Int32, source: Int64, size_bytes: Int32) -> None:
    """Copy 16 bytes of global memory to shared memory, or zero them, without waiting.

    Args:
        address: Where to, 16-byte aligned.
        source: Where from, 16-byte aligned.
        size_bytes: 16, or 0: nothing is read and the 16 bytes become zero.
    """
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[address, source, size_bytes],
    )


@cute.jit
def arrive_after_copies(barrier: Int32) -> None:
    """Arrive on an mbarrier once this thread's :func:`copy_async_b128` so far have landed."""
    inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier])


@cute.jit
def bulk_copy_to_shared(address: Int32, source: Int64, size_bytes: int, barrier: Int32) -> None:
    """Copy ``size_bytes`` of global memory to shared memory, completing on an mbarrier.

    Args:
        address: Where to, 16-byte aligned.
        source: Where from, 16-byte aligned.
        size_bytes: A multiple of 16; as many bytes are counted off the mbarrier's transactions.
        barrier: The mbarrier.
    """
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[address, source, Int32(size_bytes), barrier],
    )


@cute.jit
def bulk_multicast_to_shared(
    address: Int32, source: Int64, size_bytes: int, barrier: Int32, ctas: Uint16
) -> None:
    """As :func:`bulk_copy_to_shared`, to the same place in every CTA of the cluster in ``ctas``.

    Args:
        address: Where to, in each of those CTAs, 16-byte aligned.
        source: Where from, 16-byte aligned.
        size_bytes: A multiple of 16.
        barrier: The mbarrier, in each of those CTAs.
        ctas: One bit a cluster rank.
    """
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[address, source, Int32(size_bytes), barrier, ctas],
    )


@cute.jit
def fence_proxy_async_shared() -> None:
    """Order this thread's ordinary shared memory accesses before later bulk copies."""
    inline_ptx("fence.proxy.async.shared::cta;")


@cute.jit
def mbarrier_arrive_expect_tx(barrier: Int32, bytes_expected: Int32) -> None:
    """Expect as many more bytes on an mbarrier, and arrive on it."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[barrier, bytes_expected],
    )
