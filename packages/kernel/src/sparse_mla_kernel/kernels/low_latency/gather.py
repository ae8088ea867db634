"""Gather: row ids to a CTA's own keys, and to its columns of every CTA's V, in shared memory.

Keys are dealt in runs of 8, so that the CTAs' chunk ``c`` is the list's positions
``64 split c .. 64 split (c + 1) - 1``: run r of them belongs to CTA ``r % split``.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from sparse_mla_kernel.io.rows import cache_row, is_cached
from sparse_mla_kernel.kernels.base.layout import ROW_STRIDE_BYTES
from sparse_mla_kernel.kernels.low_latency.layout import (
    BATCH_ROUNDS,
    CHUNK,
    COPY_WARPS,
    GATHER_KEYS,
    KEY_BYTES,
    KEY_LANES,
    PAIR_KEYS,
    WARP_KEYS,
    WARPS,
    SharedLayout,
)
from sparse_mla_kernel.ptx.copy import (
    arrive_after_copies,
    bulk_copy_to_shared,
    copy_async_b128,
    fence_proxy_async_shared,
    mbarrier_arrive_expect_tx,
)
from sparse_mla_kernel.ptx.shared_memory import store_shared_b32, store_zero_shared_b128
from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, Schedule


@cute.jit
def keys_dealt(n: Int32, cta: Int32, schedule: cutlass.Constexpr[Schedule]) -> Int32:
    """How many of a row's ``n`` keys CTA ``cta`` gets, if runs of ``deal`` are dealt in turn."""
    round_keys = schedule.deal * schedule.split
    in_last_round = cutlass.min(n % round_keys - cta * schedule.deal, schedule.deal)
    return n // round_keys * schedule.deal + cutlass.max(in_last_round, 0)


@cute.jit
def multiplied_keys(count: Int32) -> Int32:
    """How many keys of a chunk PV multiplies, 32 or 64, if ``count`` keys are left."""
    return Int32(CHUNK) if count > PAIR_KEYS else Int32(PAIR_KEYS)


@cute.jit
def load_key_id(
    gIds: cute.Tensor, cta: Int32, key: Int32, schedule: cutlass.Constexpr[Schedule]
) -> Int32:
    """The row id of the CTA's key ``key``.

    The load does not wait for the count. Past the count it reads some id of the list that is not
    used.
    """
    run = key // GATHER_KEYS * schedule.split + cta
    return _id_at(gIds, run * GATHER_KEYS + key % GATHER_KEYS)


@cute.jit
def _id_at(gIds: cute.Tensor, position: Int32) -> Int32:
    return gIds[cutlass.min(position, gIds.shape[0] - 1)]


@cute.jit
def own_key() -> Int32:
    """The key of the first chunk whose row id this lane of the multiplying warps knows."""
    return GATHER_KEYS * cute.arch.warp_idx() + cute.arch.lane_idx() // KEY_LANES


@cute.jit
def copy_first_keys(
    mKv: cute.Tensor,
    row_id: Int32,
    smem: Int32,
    count: Int32,
    multiplied: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: copy the first chunk's keys ``8w .. 8w + 7``, and say which of them count.

    The row of an id outside ``[0, N)`` is never read, and its key is not live. Keys past the count
    are not live either.
    Their rows are zeroed as far as PV multiplies, since P = 0 does not silence a NaN beside it.

    Args:
        mKv: ``[N, 576]`` bytes.
        row_id: Of :func:`own_key`.
        smem: Base address of the shared memory that ``layout`` divides.
        count: Keys that the CTA has.
        multiplied: Keys that PV multiplies.
    """
    lane = cute.arch.lane_idx()
    key = own_key()
    live = Int32(0)
    named = Int32(0)
    if key < count and is_cached(mKv, row_id):
        live = Int32(1)
        named = row_id
    if GATHER_KEYS * cute.arch.warp_idx() < multiplied:
        # Contiguous lanes touch fewer cache lines, so that a copy makes fewer requests.
        keys = smem + layout.keys + GATHER_KEYS * cute.arch.warp_idx() * ROW_STRIDE_BYTES
        cache = Int64(mKv.iterator.toint())
        for i in cutlass.range_constexpr(GATHER_KEYS):
            row = cute.arch.shuffle_sync(named, KEY_LANES * i)
            size = 16 * cute.arch.shuffle_sync(live, KEY_LANES * i)
            source = cache + Int64(row) * ROW_COLUMNS + 16 * lane
            copy_async_b128(keys + i * ROW_STRIDE_BYTES + 16 * lane, source, size)
        column = KEY_BYTES + 16 * (lane % KEY_LANES)
        source = cache + Int64(named) * ROW_COLUMNS + column
        copy_async_b128(smem + layout.keys + key * ROW_STRIDE_BYTES + column, source, 16 * live)
    if lane % KEY_LANES == 0:
        store_shared_b32(smem + layout.live + 4 * key, live)
    arrive_after_copies(smem + layout.first_barrier)


# ---- what the copying warps do ------------------------------------------------------------------


@cute.jit
def load_value_ids(
    rIds: cute.Tensor,
    gIds: cute.Tensor,
    batch: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """The row ids of the slices of V that this lane of the copying warps copies in a batch.

    Args:
        rIds: ``[BATCH_ROUNDS]`` int32, out.
        gIds: The row's list.
        batch: Which batch.
    """
    for i in cutlass.range_constexpr(BATCH_ROUNDS):
        rIds[i] = _id_at(gIds, _value_place(batch, i, layout))


@cute.jit
def _value_place(
    batch: Int32, i: cutlass.Constexpr[int], layout: cutlass.Constexpr[SharedLayout]
) -> Int32:
    """The list's position whose slice of V this lane copies in round ``i`` of a batch."""
    turn = (batch * BATCH_ROUNDS + i) * COPY_WARPS + cute.arch.warp_idx() - WARPS
    return turn * layout.split + cute.arch.lane_idx() // layout.value_lanes


@cute.jit
def copy_values(
    mKv: cute.Tensor,
    gIds: cute.Tensor,
    rIds: cute.Tensor,
    smem: Int32,
    cta: Int32,
    n: Int32,
    multiplied: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Copy the columns that CTA ``cta`` owns of all CTAs' keys, zeroed as keys are.

    Args:
        mKv: ``[N, 576]`` bytes.
        gIds: The row's list.
        rIds: The first batch's ids, from :func:`load_value_ids`; used up.
        smem: Base address of the shared memory that ``layout`` divides.
        cta: This CTA's place in the split.
        n: The row's keys, of all CTAs: one chunk of each at most.
        multiplied: Keys of each CTA that PV multiplies.
    """
    column = 16 * (cute.arch.lane_idx() % layout.value_lanes)
    rNext = cute.make_rmem_tensor(BATCH_ROUNDS, Int32)
    for batch in cutlass.range(multiplied // (BATCH_ROUNDS * COPY_WARPS), unroll=1):
        load_value_ids(rNext, gIds, batch + 1, layout)
        for i in cutlass.range_constexpr(BATCH_ROUNDS):
            place = _value_place(batch, i, layout)
            size = Int32(0)
            source = Int64(mKv.iterator.toint())
            if place < n and is_cached(mKv, rIds[i]):
                size = Int32(16)
                source += Int64(rIds[i]) * ROW_COLUMNS + layout.cta_columns * cta + column
            run = place // GATHER_KEYS
            key = run // layout.split * GATHER_KEYS + place % GATHER_KEYS
            slot = run % layout.split * CHUNK + key
            target = smem + layout.values + slot * layout.value_stride_bytes + column
            copy_async_b128(target, source, size)
        for i in cutlass.range_constexpr(BATCH_ROUNDS):
            rIds[i] = rNext[i]
    arrive_after_copies(smem + layout.value_barrier)


@cute.jit
def copied_key() -> Int32:
    """The key of a later chunk that this lane of the copying warps knows of."""
    return WARP_KEYS * (cute.arch.warp_idx() - WARPS) + cute.arch.lane_idx() % WARP_KEYS


@cute.jit
def copy_chunk(
    mKv: cute.Tensor,
    row_id: Int32,
    smem: Int32,
    buffer: Int32,
    count: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Copy a later chunk's keys, by a bulk copy for each, and say which of them count.

    Args:
        mKv: ``[N, 576]`` bytes.
        row_id: Of :func:`copied_key`.
        smem: Base address of the shared memory that ``layout`` divides.
        buffer: The chunk's buffer, which all warps have multiplied.
        count: Keys that the CTA has from the chunk's first on.
    """
    lane = cute.arch.lane_idx()
    key = copied_key()
    rows = smem + layout.keys + buffer * (CHUNK * ROW_STRIDE_BYTES)
    barrier = smem + layout.full_barrier + 8 * buffer
    live = Int32(0)
    named = Int32(-1)
    if key < count and is_cached(mKv, row_id):
        live = Int32(1)
        named = row_id
    if lane < WARP_KEYS:
        store_shared_b32(smem + layout.live + 4 * (buffer * CHUNK + key), live)
        if live == 0 and key < multiplied_keys(count):
            for i in cutlass.range(LATENT_COLUMNS // 16, unroll=1):
                store_zero_shared_b128(rows + key * ROW_STRIDE_BYTES + 16 * i)
        # The buffer was read, and perhaps zeroed, by ordinary accesses.
        fence_proxy_async_shared()
        mbarrier_arrive_expect_tx(barrier, live * ROW_COLUMNS)
    cute.arch.sync_warp()

    # One lane makes each copy, and the operands are uniform: no loop over lanes is needed.
    first = WARP_KEYS * (cute.arch.warp_idx() - WARPS)
    for i in cutlass.range_constexpr(WARP_KEYS):
        row = cute.arch.shuffle_sync(named, i)
        if row >= 0:
            source = cache_row(mKv, row)
            with cute.arch.elect_one():
                bulk_copy_to_shared(
                    rows + (first + i) * ROW_STRIDE_BYTES, source, ROW_COLUMNS, barrier
                )
