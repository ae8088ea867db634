"""Gather: row ids to cache rows in shared memory, by one bulk copy for each row."""

from __future__ import annotations

import cutlass
from cutlass import Int32, const_expr, cute

from sparse_mla_kernel.io.rows import cache_row, is_cached
from sparse_mla_kernel.kernels.base.layout import MMA_K, ROW_STRIDE_BYTES, SharedLayout
from sparse_mla_kernel.ptx.copy import (
    bulk_copy_to_shared,
    fence_proxy_async_shared,
    mbarrier_arrive_expect_tx,
)
from sparse_mla_kernel.ptx.shared_memory import store_shared_b32, store_zero_shared_b128
from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, TILE_HEADS


@cute.jit
def split_keys(n: Int32, cta: Int32, split: cutlass.Constexpr[int]) -> tuple[Int32, Int32]:
    """CTA ``cta`` attends to the keys ``[begin, end)`` of a row's ``n`` keys."""
    per = (n + (split - 1)) // split
    begin = cutlass.min(n, cta * per)
    return begin, cutlass.min(n, begin + per)


@cute.jit
def gather_chunk(
    mKv: cute.Tensor,
    gIds: cute.Tensor,
    gQuery: cute.Tensor | None,
    smem: Int32,
    begin: Int32,
    count: Int32,
    first: cutlass.Boolean,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Thread ``t < chunk`` asks for key ``begin + t`` and, in the first chunk, for head ``t`` too.

    A row id outside ``[0, N)`` is never read: its key is marked as not live. V rows that no copy
    fills are zeroed up to the next whole MMA step, since P = 0 does not silence a NaN beside it.

    Args:
        mKv: ``[N, 576]`` bytes.
        gIds: ``[width]`` int32, this row's ids.
        gQuery: ``[16, 576]`` bytes, this tile's query rows. None in push mode, where they are
            waited for.
        smem: Base address of the shared memory that ``layout`` divides.
        begin: Position in ``gIds`` of the chunk's first key.
        count: Keys in the chunk, at most ``chunk``.
        first: Whether this is the CTA's first chunk.
    """
    t, _, _ = cute.arch.thread_idx()
    barrier = smem + layout.gather_barrier
    if t < layout.schedule.chunk:
        row_id = Int32(-1)
        if t < count:
            row_id = gIds[begin + t]
        live = Int32(0)
        if is_cached(mKv, row_id):
            live = Int32(1)
        store_shared_b32(smem + layout.live + 4 * t, live)

        row_address = smem + layout.kv + t * ROW_STRIDE_BYTES
        if live == 0 and t < (count + (MMA_K - 1)) // MMA_K * MMA_K:
            for i in cutlass.range_constexpr(LATENT_COLUMNS // 16):
                store_zero_shared_b128(row_address + 16 * i)

        expected = live * ROW_COLUMNS
        if const_expr(gQuery is not None):
            brings_query = first and t < TILE_HEADS
            if brings_query:
                expected += ROW_COLUMNS
        # The buffer was read, and perhaps zeroed, by ordinary accesses in the chunk before.
        fence_proxy_async_shared()
        mbarrier_arrive_expect_tx(barrier, expected)
        if live != 0:
            source = cache_row(mKv, row_id)
            bulk_copy_to_shared(row_address, source, ROW_COLUMNS, barrier)
        if const_expr(gQuery is not None):  # noqa: SIM102 (the compiler's if, then the GPU's)
            if brings_query:
                source = gQuery.iterator.toint() + t * ROW_COLUMNS  # type: ignore[union-attr]
                head_address = smem + layout.query + t * ROW_STRIDE_BYTES
                bulk_copy_to_shared(head_address, source, ROW_COLUMNS, barrier)
