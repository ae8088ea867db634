"""Sparse MLA decode, low latency: one line for each stage."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute
from cutlass.memory import SmemAllocator

from sparse_mla_kernel.kernels.launch import DecodeKernel
from sparse_mla_kernel.kernels.low_latency.exchange import accumulate_from, expect_p, push_p
from sparse_mla_kernel.kernels.low_latency.gather import (
    copied_key,
    copy_chunk,
    copy_first_keys,
    copy_values,
    keys_dealt,
    load_key_id,
    load_value_ids,
    multiplied_keys,
    own_key,
)
from sparse_mla_kernel.kernels.low_latency.layout import (
    BATCH_ROUNDS,
    BUFFERS,
    CHUNK,
    COLUMN_WARPS,
    COPY_REGISTERS,
    COPYING,
    HALVES,
    HANDED_OVER,
    KEYS_ASKED,
    MEETING,
    MMA_K,
    MULTIPLY_REGISTERS,
    MULTIPLYING,
    PAIR_KEYS,
    QUARTER_COLUMNS,
    QUERY_ASKED,
    RESIDENT_CLUSTERS,
    THREADS,
    UNIT_COLUMNS,
    WARP,
    WARP_COLUMNS,
    WARP_UNITS,
    WARPS,
    shared_layout,
)
from sparse_mla_kernel.kernels.low_latency.logits import load_logits, quarter_logits, scale_logits
from sparse_mla_kernel.kernels.low_latency.merge import (
    finish_columns,
    finish_lse,
    hand_over,
    merge_half,
    merge_vector,
    push_rows,
    push_stats,
    weigh_partials,
)
from sparse_mla_kernel.kernels.low_latency.partial import (
    PAIRS,
    accumulate,
    quantise_p,
    raised_sum,
    rescale,
    store_p,
)
from sparse_mla_kernel.kernels.low_latency.query import copy_query, query_fragments
from sparse_mla_kernel.kernels.low_latency.softmax import chunk_p, softmax_registers
from sparse_mla_kernel.ptx.copy import mbarrier_arrive_expect_tx
from sparse_mla_kernel.schedule import LOW_LATENCY, ROW_COLUMNS, TILE_HEADS, Schedule


def tiles_of(batch: int, heads: int, split: int) -> int:
    """Tiles of 16 heads in a CTA: 1 as long as all clusters run at once, and else 2 if possible."""
    tiles = heads // TILE_HEADS
    return 1 if tiles % 2 or batch * tiles <= RESIDENT_CLUSTERS[split] else 2


class LowLatencyDecode(DecodeKernel):
    """The kernel of an FP16 schedule for one batch shape; latent mode alone.

    A cluster is the ``split`` CTAs of one row and 16 or 32 heads. Both numbers give the same bits.

    Args:
        batch: Decode rows.
        heads: Query heads that are used: a multiple of 16, at most ``padded``.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        schedule: Order of rounding; its ``kernel`` is ``"low_latency"``.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        padded: int,
        width: int,
        *,
        schedule: Schedule = LOW_LATENCY,
    ) -> None:
        super().__init__(batch, heads, padded, width, schedule, "low_latency")
        self.layout = shared_layout(schedule, tiles_of(batch, heads, schedule.split))

    def shape(self) -> dict[str, Any]:
        """A cluster of ``split`` CTAs for 16 or 32 heads of each row."""
        split = self.schedule.split
        return {
            "grid": (self.heads // self.layout.heads * split, self.batch, 1),
            "block": (THREADS, 1, 1),
            "cluster": (split, 1, 1),
            "min_blocks_per_mp": 1,
        }

    @cute.kernel
    def kernel(
        self,
        mQuery: cute.Tensor,
        mKv: cute.Tensor,
        mRows: cute.Tensor,
        mValid: cute.Tensor,
        mLatent: cute.Tensor,
        mLse: cute.Tensor,
        scale_log2: Float32,
        out_scale: Float32,
    ) -> None:
        """What a CTA does, from query bytes to its share of the row; arguments as ``__call__``."""
        layout = self.layout
        schedule = self.schedule
        split = schedule.split

        # Roles
        block, row, _ = cute.arch.block_idx()
        first_head = block // split * layout.heads
        cta = cute.arch.block_idx_in_cluster()
        warp = cute.arch.warp_idx()

        # Barriers: made before anything is read that the kernel before may write. The other CTAs
        # have to see only that the barriers are made, and the fence after them ensures this, so
        # that the arrival need not release. A warp waits for the cluster before it sends anything.
        storage = SmemAllocator().allocate_array(Uint8, layout.size, byte_alignment=128)
        self._init_barriers(storage)
        cute.arch.cluster_arrive_relaxed()

        # Early launch
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        if warp >= WARPS:
            if const_expr(layout.tiles == 2):
                cute.arch.setmaxregister_decrease(COPY_REGISTERS)
            self.copy(mQuery, mKv, mRows, mValid, storage, row, first_head, cta)
        else:
            if const_expr(layout.tiles == 2):
                cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
            self.multiply(
                mKv,
                mRows,
                mValid,
                mLatent,
                mLse,
                storage,
                row,
                first_head,
                cta,
                scale_log2,
                out_scale,
            )

    @cute.jit
    def copy(
        self,
        mQuery: cute.Tensor,
        mKv: cute.Tensor,
        mRows: cute.Tensor,
        mValid: cute.Tensor,
        storage: cute.Pointer,
        row: Int32,
        first_head: Int32,
        cta: Int32,
    ) -> None:
        """The warps that copy. They copy the query, then V of all keys or this CTA's later chunks.

        The multiplying warps copy the first chunk themselves, because they have more lanes.
        """
        layout = self.layout
        schedule = self.schedule
        smem = storage.toint()
        gIds = mRows[row, None]
        cute.arch.cluster_wait()  # all CTAs have their barriers
        if cute.arch.warp_idx() == WARPS:
            query_row = Int64(row) * self.padded + first_head
            copy_query(mQuery.iterator.toint() + query_row * ROW_COLUMNS, smem, cta, layout)
        # This barrier orders instructions alone: without it the compiler moves the count's load,
        # and the wait for it, ahead of the query's copies
        cute.arch.barrier(barrier_id=QUERY_ASKED, number_of_threads=COPYING)
        loaded = mValid[row]
        rIds = cute.make_rmem_tensor(BATCH_ROUNDS, Int32)
        load_value_ids(rIds, gIds, Int32(0), layout)
        n = cutlass.max(cutlass.min(loaded, self.width), 0)
        most = keys_dealt(n, Int32(0), schedule)
        if most <= CHUNK:
            # V is needed last, so the keys go first
            cute.arch.barrier(barrier_id=KEYS_ASKED, number_of_threads=THREADS)
            copy_values(mKv, gIds, rIds, smem, cta, n, multiplied_keys(most), layout)
        else:
            keys = keys_dealt(n, cta, schedule)
            chunks = (keys + (CHUNK - 1)) // CHUNK
            row_id = load_key_id(gIds, cta, CHUNK + copied_key(), schedule)
            for c in cutlass.range(1, chunks, unroll=1):
                buffer = c % BUFFERS
                if c >= BUFFERS:
                    free = storage + (layout.free_barrier + 8 * buffer)
                    cute.arch.mbarrier_wait(free, (c - BUFFERS) // BUFFERS % 2)
                copy_chunk(mKv, row_id, smem, buffer, keys - CHUNK * c, layout)
                row_id = load_key_id(gIds, cta, CHUNK * (c + 1) + copied_key(), schedule)

    @cute.jit
    def multiply(
        self,
        mKv: cute.Tensor,
        mRows: cute.Tensor,
        mValid: cute.Tensor,
        mLatent: cute.Tensor,
        mLse: cute.Tensor,
        storage: cute.Pointer,
        row: Int32,
        first_head: Int32,
        cta: Int32,
        scale_log2: Float32,
        out_scale: Float32,
    ) -> None:
        """The warps that multiply, from the first chunk's keys to the CTA's share of the row."""
        layout = self.layout
        schedule = self.schedule
        smem = storage.toint()

        # Count and row ids: these loads don't wait for each other
        loaded = mValid[row]
        key_id = load_key_id(mRows[row, None], cta, own_key(), schedule)

        # Keys of the first chunk, and the query's fragments meanwhile
        n = cutlass.max(cutlass.min(loaded, self.width), 0)
        most = keys_dealt(n, Int32(0), schedule)
        keys = keys_dealt(n, cta, schedule)
        multiplied = multiplied_keys(most)
        copy_first_keys(mKv, key_id, smem, keys, multiplied, layout)
        if most <= CHUNK:
            cute.arch.barrier_arrive(barrier_id=KEYS_ASKED, number_of_threads=THREADS)
        cute.arch.cluster_wait()  # all CTAs have their barriers
        rQuery = cute.make_rmem_tensor((2, 2 * layout.tiles, QUARTER_COLUMNS // MMA_K), Uint32)
        cute.arch.mbarrier_wait(storage + layout.query_barrier, 0)
        query_fragments(rQuery, smem, layout)
        cute.arch.mbarrier_wait(storage + layout.first_barrier, 0)

        # The CTAs' keys together in the owned columns, or each CTA's by itself
        shared = (mLatent, mLse, storage, row, first_head, cta, keys)
        if most <= CHUNK:
            self.together(rQuery, *shared, multiplied, scale_log2, out_scale)
        else:
            self.apart(rQuery, *shared, scale_log2, out_scale)

    @cute.jit
    def _init_barriers(self, storage: cute.Pointer) -> None:
        """Each warp makes one barrier. Bytes may come before they are expected; the phase waits."""
        layout = self.layout
        warp = cute.arch.warp_idx()
        arrivals, size = Int32(1), Int32(0)
        for i in cutlass.range_constexpr(len(layout.barriers)):
            arrivals = Int32(layout.barriers[i][0]) if warp == i else arrivals
            size = Int32(layout.barriers[i][1]) if warp == i else size
        with cute.arch.elect_one():
            barrier = storage + (layout.query_barrier + 8 * warp)
            cute.arch.mbarrier_init(barrier, arrivals)
            cute.arch.mbarrier_init_fence()
            if size > 0:
                mbarrier_arrive_expect_tx(barrier.toint(), size)
        cute.arch.sync_threads()

    @cute.jit
    def meet(self) -> None:
        """A barrier of the multiplying warps."""
        cute.arch.barrier(barrier_id=MEETING, number_of_threads=MULTIPLYING)

    @cute.jit
    def together(
        self,
        rQuery: cute.Tensor,
        mLatent: cute.Tensor,
        mLse: cute.Tensor,
        storage: cute.Pointer,
        row: Int32,
        first_head: Int32,
        cta: Int32,
        keys: Int32,
        multiplied: Int32,
        scale_log2: Float32,
        out_scale: Float32,
    ) -> None:
        """One chunk: P is exchanged, and this CTA sums for the columns that it owns.

        The warps with the first half of the CTAs' partials begin the sums, and the warps with the
        second half end them. A CTA may exit before the others: it has received all that they send,
        and its share of the query reached each of them before they sent their P.
        """
        layout = self.layout
        smem = storage.toint()
        warp = cute.arch.warp_idx()
        lane = cute.arch.lane_idx()
        t, _, _ = cute.arch.thread_idx()
        if t == 0:
            expect_p(smem, multiplied, layout)

        # Logits, P and their sum
        rP, rMax, rAlpha, rChunkSum, rS, rLive = softmax_registers(layout)
        quarter_logits(rQuery, smem, Int32(0), keys, layout)
        self.meet()  # logits are whole
        load_logits(rS, rLive, smem, Int32(0), layout)
        scale_logits(rS, rLive, scale_log2, layout)
        chunk_p(rMax, rAlpha, rChunkSum, rS, rLive, layout)
        quantise_p(rP, rS, layout)
        push_p(rP, smem, cta, multiplied, layout)
        row_sum = raised_sum(Float32(0.0), rAlpha, rChunkSum, layout)
        push_stats(rMax, row_sum, smem, cta, layout)

        # The partials of the owned columns, and their weights as soon as they are known
        rAcc = cute.make_rmem_tensor((4, 2 * layout.units, layout.tiles, layout.half_ctas), Float32)
        rWeight = cute.make_rmem_tensor(layout.split, Float32)
        rAcc.fill(0.0)
        cute.arch.mbarrier_wait(storage + layout.value_barrier, 0)
        cute.arch.mbarrier_wait(storage + layout.p_barrier, 0)
        accumulate_from(rAcc, smem, 0, layout.half_ctas // 2, multiplied, layout)
        cute.arch.mbarrier_wait(storage + layout.stats_barrier, 0)
        top, total, inverse = weigh_partials(rWeight, smem, out_scale, layout)

        # Weights of the lane's heads
        rHeadWeight = cute.make_rmem_tensor((layout.half_ctas, 2, layout.tiles), Float32)
        rTotal = cute.make_rmem_tensor((2, layout.tiles), Float32)
        rInverse = cute.make_rmem_tensor((2, layout.tiles), Float32)
        for m in cutlass.range_constexpr(layout.tiles):
            for r in cutlass.range_constexpr(2):
                head = TILE_HEADS * m + 8 * r + lane // 4
                rTotal[r, m] = cute.arch.shuffle_sync(total, head)
                rInverse[r, m] = cute.arch.shuffle_sync(inverse, head)
                for i in cutlass.range_constexpr(layout.half_ctas):
                    first, second = rWeight[i], rWeight[layout.half_ctas + i]
                    weight = first if warp < COLUMN_WARPS else second
                    rHeadWeight[i, r, m] = cute.arch.shuffle_sync(weight, head)
        accumulate_from(rAcc, smem, layout.half_ctas // 2, layout.half_ctas, multiplied, layout)

        # Merge
        handed_over = HANDED_OVER + warp % COLUMN_WARPS
        rRow = cute.make_rmem_tensor((4, layout.units, 2, layout.tiles), Float32)
        rRow.fill(0.0)
        if warp < COLUMN_WARPS:
            merge_half(rRow, rAcc, rHeadWeight, layout)
            hand_over(rRow, smem, False, layout)
            cute.arch.barrier_arrive(barrier_id=handed_over, number_of_threads=HALVES * WARP)
        if warp >= COLUMN_WARPS:
            cute.arch.barrier(barrier_id=handed_over, number_of_threads=HALVES * WARP)
            hand_over(rRow, smem, True, layout)
            merge_half(rRow, rAcc, rHeadWeight, layout)
            columns = cta * layout.cta_columns
            columns += warp % COLUMN_WARPS * (layout.units * UNIT_COLUMNS) + 4 * (lane % 4)
            for m in cutlass.range_constexpr(layout.tiles):
                for r in cutlass.range_constexpr(2):
                    head = first_head + TILE_HEADS * m + 8 * r + lane // 4
                    gRow = mLatent[row, head, None].iterator
                    for u in cutlass.range_constexpr(layout.units):
                        finish_columns(
                            gRow,
                            columns + UNIT_COLUMNS * u,
                            rRow[None, u, r, m],
                            rTotal[r, m],
                            rInverse[r, m],
                        )
        elif cta == 0 and warp == 0 and lane < layout.heads:
            finish_lse(mLse, row, first_head + lane, top, total)

    @cute.jit
    def apart(
        self,
        rQuery: cute.Tensor,
        mLatent: cute.Tensor,
        mLse: cute.Tensor,
        storage: cute.Pointer,
        row: Int32,
        first_head: Int32,
        cta: Int32,
        keys: Int32,
        scale_log2: Float32,
        out_scale: Float32,
    ) -> None:
        """Two chunks or more: this CTA's partial, whose columns go to their owners at the end."""
        layout = self.layout
        smem = storage.toint()
        warp = cute.arch.warp_idx()
        lane = cute.arch.lane_idx()
        chunks = (keys + (CHUNK - 1)) // CHUNK

        # The first chunk's P
        rAcc = cute.make_rmem_tensor((4, 2 * WARP_UNITS, layout.tiles), Float32)
        rP, rMax, rAlpha, rChunkSum, rS, rLive = softmax_registers(layout)
        rAcc.fill(0.0)
        quarter_logits(rQuery, smem, Int32(0), keys, layout)
        self.meet()  # logits are whole
        load_logits(rS, rLive, smem, Int32(0), layout)
        scale_logits(rS, rLive, scale_log2, layout)
        chunk_p(rMax, rAlpha, rChunkSum, rS, rLive, layout)
        quantise_p(rP, rS, layout)
        store_p(rP, rAlpha, smem, Int32(0), layout)
        row_sum = raised_sum(Float32(0.0), rAlpha, rChunkSum, layout)

        # A chunk's PV beside the next one's softmax, whose loads come before it and whose stores
        # come after it: no instruction of one waits for the other
        for c in cutlass.range(chunks - 1, unroll=1):
            following = c + 1
            full = storage + (layout.full_barrier + 8 * (following % BUFFERS))
            cute.arch.mbarrier_wait(full, c // BUFFERS % 2)
            quarter_logits(rQuery, smem, following, keys - CHUNK * following, layout)
            self.meet()  # logits, P and alpha are whole
            load_logits(rS, rLive, smem, following, layout)
            rescale(rAcc, smem, c, layout)
            for pair in cutlass.range_constexpr(PAIRS):
                accumulate(rAcc, smem, c, pair, layout)
            scale_logits(rS, rLive, scale_log2, layout)
            chunk_p(rMax, rAlpha, rChunkSum, rS, rLive, layout)
            quantise_p(rP, rS, layout)
            store_p(rP, rAlpha, smem, following, layout)
            row_sum = raised_sum(row_sum, rAlpha, rChunkSum, layout)
            cute.arch.mbarrier_arrive(storage + (layout.free_barrier + 8 * (c % BUFFERS)))
        push_stats(rMax, row_sum, smem, cta, layout)
        self.meet()  # P and alpha are whole
        final = chunks - 1
        rescale(rAcc, smem, final, layout)
        for pair in cutlass.range_constexpr(PAIRS):
            if keys - CHUNK * final > PAIR_KEYS * pair:
                accumulate(rAcc, smem, final, pair, layout)

        # Partials to their owners, over the keys, which no CTA needs any more
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        push_rows(rAcc, smem, cta, layout)

        # Merge of the owned columns
        rWeight = cute.make_rmem_tensor(layout.split, Float32)
        cute.arch.mbarrier_wait(storage + layout.stats_barrier, 0)
        top, total, inverse = weigh_partials(rWeight, smem, out_scale, layout)
        if cta == 0 and warp == 0 and lane < layout.heads:
            finish_lse(mLse, row, first_head + lane, top, total)
        rRow = cute.make_rmem_tensor(4, Float32)
        rHeadWeight = cute.make_rmem_tensor(layout.split, Float32)
        self.meet()  # this CTA's own partial is whole
        cute.arch.mbarrier_wait(storage + layout.rows_barrier, 0)
        # Warp w has the unit w % 4 of the heads g + 8r, r = w / 4
        unit = warp % WARP_UNITS
        r = warp // WARP_UNITS
        for m in cutlass.range_constexpr(layout.tiles):
            head = TILE_HEADS * m + 8 * r + lane // 4
            head_total = cute.arch.shuffle_sync(total, head)
            head_inverse = cute.arch.shuffle_sync(inverse, head)
            for i in cutlass.range_constexpr(layout.split):
                rHeadWeight[i] = cute.arch.shuffle_sync(rWeight[i], head)
            gRow = mLatent[row, first_head + head, None].iterator
            for owner_warp in cutlass.range_constexpr(layout.owner_warps):
                block = (2 * m + r) * WARP_UNITS + unit
                merge_vector(rRow, rHeadWeight, smem, block, Int32(owner_warp), layout)
                column = cta * layout.cta_columns + WARP_COLUMNS * owner_warp
                column += UNIT_COLUMNS * unit + 4 * (lane % 4)
                finish_columns(gRow, column, rRow, head_total, head_inverse)
