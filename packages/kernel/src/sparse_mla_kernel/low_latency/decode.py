"""Sparse MLA decode, low latency: one line a stage."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr, cute
from cutlass.memory import SmemAllocator

from sparse_mla_kernel.checks import check_geometry, check_schedule
from sparse_mla_kernel.layouts import ROW_STRIDE_BYTES
from sparse_mla_kernel.low_latency.gather import gather_chunk, keys_dealt, load_id
from sparse_mla_kernel.low_latency.layouts import (
    BUFFERS,
    QUARTER_COLUMNS,
    STEP,
    THREADS,
    WARP_COLUMNS,
    WARPS,
    shared_layout,
)
from sparse_mla_kernel.low_latency.logits import quarter_logits
from sparse_mla_kernel.low_latency.merge import (
    merged_columns,
    push_rows,
    push_stats,
    unit_column,
    unit_head,
    weigh_partials,
)
from sparse_mla_kernel.low_latency.partial import accumulate, rescale
from sparse_mla_kernel.low_latency.query import (
    THREAD_VECTORS,
    load_query,
    query_fragments,
    store_query,
)
from sparse_mla_kernel.low_latency.softmax import WARP_HEADS, raise_sum, store_p
from sparse_mla_kernel.lse import lse_log2, lse_nat
from sparse_mla_kernel.primitives import (
    div_rn,
    mbarrier_arrive_expect_tx,
    store_global_b32x2,
)
from sparse_mla_kernel.schedule import LOW_LATENCY, ROW_COLUMNS, TILE_HEADS, Schedule


class LowLatencyDecode:
    """The kernel of an FP16 schedule for one batch shape; latent mode alone.

    A cluster is the ``split`` CTAs of one (16 heads, row), or those of two tiles of 16 heads, which
    share their gathers, if their number is even and a cluster of 8 holds them.

    Args:
        batch: Decode rows.
        heads: Query heads that are used: a multiple of 16, at most ``padded``.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        schedule: Order of rounding; its ``mma`` is ``"f16"``.

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
        check_geometry(batch, heads, padded, width)
        check_schedule(schedule, "f16")
        self.batch = batch
        self.heads = heads
        self.padded = padded
        self.width = width
        self.schedule = schedule
        self.shares = heads // TILE_HEADS % 2 == 0 and schedule.split <= 4
        self.cluster = schedule.split * (2 if self.shares else 1)
        self.layout = shared_layout(schedule)

    @cute.jit
    def __call__(
        self,
        mQuery: cute.Tensor,
        mKv: cute.Tensor,
        mRows: cute.Tensor,
        mValid: cute.Tensor,
        mLatent: cute.Tensor,
        mLse: cute.Tensor,
        scale_log2: Float32,
        out_scale: Float32,
        stream: object,
    ) -> None:
        """Launch on ``stream``, as a programmatic dependent of what runs there.

        Args:
            mQuery: ``[cap, padded, 576]`` E4M3 bytes.
            mKv: ``[N, 576]`` E4M3 bytes.
            mRows: ``[>= batch, width]`` int32.
            mValid: ``[>= batch]`` int32.
            mLatent: ``[batch, padded, 512]`` BF16, out.
            mLse: ``[batch, padded]`` f32, out.
            scale_log2: Softmax scale x tensor scales x log2(e).
            out_scale: The V scale.
            stream: A DSL stream handle.
        """
        self.kernel(mQuery, mKv, mRows, mValid, mLatent, mLse, scale_log2, out_scale).launch(
            grid=(self.heads // TILE_HEADS * self.schedule.split, self.batch, 1),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

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
        """What a CTA does, from the query bytes to its share of the row; arguments as above."""
        layout = self.layout
        schedule = self.schedule
        split = schedule.split
        chunk = schedule.chunk

        # Roles
        block, row, _ = cute.arch.block_idx()
        tile = block // split
        rank = cute.arch.block_idx_in_cluster()
        cta = rank % split
        first_rank = rank - cta
        warp = cute.arch.warp_idx()

        # Barriers, before anything that a predecessor writes is read
        storage = SmemAllocator().allocate_array(Uint8, layout.size, byte_alignment=128)
        smem = storage.toint()
        self._init_barriers(storage)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        # Early launch
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # Count, row ids and query: three loads that don't wait for each other
        gIds = mRows[row, None]
        loaded = mValid[row]
        row_id = load_id(gIds, cta, Int32(0), schedule)
        rWords = cute.make_rmem_tensor((4, THREAD_VECTORS), Uint32)
        first_head = Int64(row) * self.padded + tile * TILE_HEADS
        load_query(rWords, mQuery.iterator.toint() + first_head * ROW_COLUMNS)

        # First chunk: of two CTAs that share it, one asks for keys 0 .. 31, the other for the rest
        n = cutlass.max(cutlass.min(loaded, self.width), 0)
        keys = keys_dealt(n, cta, schedule)
        chunks = (keys + (chunk - 1)) // chunk
        asks = Boolean(True)
        multicast = Uint16(0)
        if const_expr(self.shares):
            asks = warp // (WARPS // 2) == rank // split
            multicast = Uint16((Int32(1) << cta) | (Int32(1) << (cta + split)))
        if chunks > 0:
            gather_chunk(mKv, row_id, smem, Int32(0), keys, multicast, asks, layout, self.shares)
        row_id = load_id(gIds, cta, Int32(chunk), schedule)
        store_query(rWords, smem, layout)
        cute.arch.sync_threads()  # the query is whole
        rQuery = cute.make_rmem_tensor((2, 2, QUARTER_COLUMNS // STEP), Uint32)
        query_fragments(rQuery, smem, layout)

        # Chunks
        rAcc = cute.make_rmem_tensor((4, WARP_COLUMNS // 8), Float32)
        rMax = cute.make_rmem_tensor(WARP_HEADS, Float32)
        rSum = cute.make_rmem_tensor(WARP_HEADS, Float32)
        rAlpha = cute.make_rmem_tensor(WARP_HEADS, Float32)
        rChunkSum = cute.make_rmem_tensor(WARP_HEADS, Float32)
        rAcc.fill(0.0)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)
        for c in cutlass.range(chunks, unroll=1):
            buffer = c % BUFFERS
            kv = smem + layout.kv + buffer * (chunk * ROW_STRIDE_BYTES)
            count = keys - c * chunk
            last = c + 1 == chunks
            cute.arch.mbarrier_wait(
                storage + (layout.gather_barrier + 8 * buffer), c // BUFFERS % 2
            )
            quarter_logits(rQuery, smem, kv, count, layout)
            cute.arch.sync_threads()  # logits are whole, the other buffer is free
            if not last:
                # Not shared: that would take the other CTA's word that its buffer is free.
                gather_chunk(
                    mKv, row_id, smem, c + 1, count - chunk, multicast, True, layout, False
                )
            row_id = load_id(gIds, cta, (c + 2) * chunk, schedule)
            store_p(rMax, rAlpha, rChunkSum, smem, buffer, scale_log2, layout)
            cute.arch.sync_threads()  # P and alpha are whole
            raise_sum(rSum, rAlpha, rChunkSum)
            if last:
                push_stats(rMax, rSum, smem, cta, first_rank, layout)
            if c > 0:
                rescale(rAcc, smem, layout)
            for u in cutlass.range_constexpr(2):
                accumulate(rAcc, smem, kv, count, u, layout)
                if last:
                    push_rows(rAcc, smem, cta, first_rank, u, layout)
        if chunks == 0:
            push_stats(rMax, rSum, smem, cta, first_rank, layout)
            for u in cutlass.range_constexpr(2):
                push_rows(rAcc, smem, cta, first_rank, u, layout)

        self.merge(mLatent, mLse, storage, row, tile, cta, out_scale)

    @cute.jit
    def _init_barriers(self, storage: cute.Pointer) -> None:
        """A gather's counts the lanes that ask; the merge's are armed before any peer can push."""
        layout = self.layout
        t, _, _ = cute.arch.thread_idx()
        if t == 0:
            for buffer in cutlass.range_constexpr(BUFFERS):
                barrier = storage + (layout.gather_barrier + 8 * buffer)
                cute.arch.mbarrier_init(barrier, self.schedule.chunk)
            cute.arch.mbarrier_init(storage + layout.stats_barrier, 1)
            cute.arch.mbarrier_init(storage + layout.rows_barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if t == 0:
            smem = storage.toint()
            mbarrier_arrive_expect_tx(smem + layout.stats_barrier, Int32(layout.stats_bytes))
            mbarrier_arrive_expect_tx(smem + layout.rows_barrier, Int32(layout.rows_bytes))

    @cute.jit
    def merge(
        self,
        mLatent: cute.Tensor,
        mLse: cute.Tensor,
        storage: cute.Pointer,
        row: Int32,
        tile: Int32,
        cta: Int32,
        out_scale: Float32,
    ) -> None:
        """Write this CTA's columns of the tile's 16 heads, and as CTA 0 the LSE.

        Warp w has unit w of every sender's warp. Nothing of the cluster is read here but this CTA's
        own shared memory, so a CTA may exit before its peers.
        """
        layout = self.layout
        smem = storage.toint()
        warp = cute.arch.warp_idx()
        head = unit_head(warp)
        rWeight = cute.make_rmem_tensor(layout.split, Float32)
        cute.arch.mbarrier_wait(storage + layout.stats_barrier, 0)
        top, total = weigh_partials(rWeight, smem, head, layout)
        inverse = div_rn(out_scale, total)
        if cta == 0 and warp % 4 == 0 and cute.arch.lane_idx() % 4 == 0:
            mLse[row, tile * TILE_HEADS + head] = lse_nat(lse_log2(top, total))
        cute.arch.sync_threads()  # this CTA's own partial is whole
        cute.arch.mbarrier_wait(storage + layout.rows_barrier, 0)
        gRow = mLatent[row, tile * TILE_HEADS + head, None].iterator
        for owner_warp in cutlass.range_constexpr(layout.owner_warps):
            low, high = merged_columns(rWeight, total, inverse, smem, owner_warp, layout)
            column = cta * layout.cta_columns + WARP_COLUMNS * owner_warp + unit_column(warp)
            store_global_b32x2((gRow + column).toint(), low, high)
