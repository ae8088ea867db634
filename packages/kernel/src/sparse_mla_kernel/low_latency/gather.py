"""Gather: row ids to cache rows in shared memory, shared by two CTAs that want the same rows."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, Int64, Uint16, const_expr, cute

from sparse_mla_kernel.layouts import ROW_STRIDE_BYTES
from sparse_mla_kernel.low_latency.layouts import BUFFERS, GATHER_KEYS, WARP_KEYS, SharedLayout
from sparse_mla_kernel.primitives import (
    bulk_copy_to_shared,
    bulk_multicast_to_shared,
    fence_proxy_async_shared,
    mbarrier_arrive_expect_tx,
    store_shared_b32,
    store_zero_shared_b128,
)
from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, Schedule


@cute.jit
def keys_dealt(n: Int32, cta: Int32, schedule: cutlass.Constexpr[Schedule]) -> Int32:
    """How many of a row's ``n`` keys CTA ``cta`` has, dealt in turn in runs of ``deal``."""
    round_keys = schedule.deal * schedule.split
    in_last_round = cutlass.min(n % round_keys - cta * schedule.deal, schedule.deal)
    return n // round_keys * schedule.deal + cutlass.max(in_last_round, 0)


@cute.jit
def load_id(
    gIds: cute.Tensor, cta: Int32, first: Int32, schedule: cutlass.Constexpr[Schedule]
) -> Int32:
    """This lane's row id of a chunk: of the CTA's key ``first + 8 warp + lane % 8``.

    Does not wait for the count: an id past it is read, within the list's width, and not used.
    """
    key = first + GATHER_KEYS * cute.arch.warp_idx() + cute.arch.lane_idx() % GATHER_KEYS
    position = (key // schedule.deal * schedule.split + cta) * schedule.deal + key % schedule.deal
    row_id = Int32(-1)
    if position < gIds.shape[0]:
        row_id = gIds[position]
    return row_id


@cute.jit
def gather_chunk(
    mKv: cute.Tensor,
    row_id: Int32,
    smem: Int32,
    chunk: Int32,
    count: Int32,
    multicast: Uint16,
    asks: Boolean,
    layout: cutlass.Constexpr[SharedLayout],
    shared: cutlass.Constexpr[bool],
) -> None:
    """Warp w: ask for the chunk's keys ``8w .. 8w + 7``.

    A row id outside ``[0, N)`` is never read: its key is marked as not live. V rows that no copy
    fills are zeroed as far as PV multiplies, since P = 0 does not silence a NaN beside it.

    Args:
        mKv: ``[N, 576]`` bytes.
        row_id: From :func:`load_id`.
        smem: Base address of the shared memory that ``layout`` divides.
        chunk: The chunk's number, which decides its buffer.
        count: Keys that the CTA has from the chunk's first on; 64 or more if the chunk is full.
        multicast: The CTAs that want the same rows, as a bit each.
        asks: Whether this CTA's warp asks, or the other CTA's does. Both expect the rows.
        shared: Whether there is another CTA.
    """
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()
    buffer = chunk % BUFFERS
    first = buffer * 64 + GATHER_KEYS * warp
    rows = smem + layout.kv + first * ROW_STRIDE_BYTES
    barrier = smem + layout.gather_barrier + 8 * buffer

    key = GATHER_KEYS * warp + lane % GATHER_KEYS
    live = Int32(0)
    if key < count and row_id >= 0 and Int64(row_id) < Int64(mKv.shape[0]):
        live = Int32(1)
    multiplied = Int32(64) if count > WARP_KEYS else Int32(WARP_KEYS)
    if lane < GATHER_KEYS:
        store_shared_b32(smem + layout.live + 4 * (first + lane), live)
        if live == 0 and key < multiplied:
            for i in cutlass.range_constexpr(LATENT_COLUMNS // 16):
                store_zero_shared_b128(rows + lane * ROW_STRIDE_BYTES + 16 * i)
        # The buffer was read, and perhaps zeroed, by ordinary accesses two chunks before.
        fence_proxy_async_shared()
        mbarrier_arrive_expect_tx(barrier, live * ROW_COLUMNS)
    cute.arch.sync_warp()

    # One lane a copy, its operands uniform: eight copies leave without a loop over lanes.
    named = row_id if live != 0 else Int32(-1)
    if asks:
        for i in cutlass.range_constexpr(GATHER_KEYS):
            row = cute.arch.shuffle_sync(named, i)
            if row >= 0:
                source = mKv.iterator.toint() + Int64(row) * ROW_COLUMNS
                with cute.arch.elect_one():
                    target = rows + i * ROW_STRIDE_BYTES
                    if const_expr(shared):
                        bulk_multicast_to_shared(target, source, ROW_COLUMNS, barrier, multicast)
                    else:
                        bulk_copy_to_shared(target, source, ROW_COLUMNS, barrier)
