"""Sparse MLA decode: a cluster for each row and 16 heads, and one line for each stage."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.memory import SmemAllocator

from sparse_mla_kernel.checks import check_cap, check_push
from sparse_mla_kernel.kernels.base.gather import split_keys
from sparse_mla_kernel.kernels.base.layout import PV_TILES, THREADS, shared_layout
from sparse_mla_kernel.kernels.base.logits import scaled_logits
from sparse_mla_kernel.kernels.base.merge import MailboxSink, RowSink, TensorSink, push_partial
from sparse_mla_kernel.kernels.base.partial import accumulate, raise_sum, rescale, store_p
from sparse_mla_kernel.kernels.base.query import MailboxQuery, QuerySource, TensorQuery
from sparse_mla_kernel.kernels.base.softmax import raise_max, store_warp_max
from sparse_mla_kernel.kernels.launch import DecodeKernel
from sparse_mla_kernel.mailbox.device import DeviceMailbox
from sparse_mla_kernel.mailbox.layout import MailboxLayout
from sparse_mla_kernel.ptx.copy import mbarrier_arrive_expect_tx
from sparse_mla_kernel.ptx.shared_memory import store_shared_b32
from sparse_mla_kernel.schedule import BASE, TILE_HEADS, Schedule


class SparseDcpDecode(DecodeKernel):
    """The kernel for one batch shape. Its grid is ``(heads / 16 * split, batch, 1)``.

    Args:
        batch: Decode rows.
        heads: Query heads that are used: a multiple of 16, at most ``padded``.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        push: ``(owner heads, ranks, cap)`` for push mode: the query comes out of a mailbox of so
            many rows, and each merged row goes into the mailbox of the rank that owns the head.
        schedule: Order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        padded: int,
        width: int,
        push: tuple[int, int, int] | None = None,
        *,
        schedule: Schedule = BASE,
    ) -> None:
        super().__init__(batch, heads, padded, width, schedule, "base")
        if push is not None:
            check_push(push, heads, push[2])
            check_cap(push[2], batch)
        self.push = push
        self.box = None if push is None else MailboxLayout(padded, *push)
        self.layout = shared_layout(schedule, push=push is not None)

    def shape(self) -> dict[str, Any]:
        """A cluster of ``split`` CTAs for each tile of 16 heads of each row."""
        split = self.schedule.split
        return {
            "grid": (self.heads // TILE_HEADS * split, self.batch, 1),
            "block": (THREADS, 1, 1),
            "cluster": (split, 1, 1),
        }

    @cute.jit
    def push_decode(
        self,
        mKv: cute.Tensor,
        mRows: cute.Tensor,
        mValid: cute.Tensor,
        scale_log2: Float32,
        out_scale: Float32,
        mail: DeviceMailbox,
        stream: object,
    ) -> None:
        """Launch in push mode: the query and the merged rows are in mailboxes.

        Args:
            mKv: As :meth:`__call__`, like all arguments but ``mail``.
            mRows: See ``mKv``.
            mValid: See ``mKv``.
            scale_log2: See ``mKv``.
            out_scale: See ``mKv``.
            mail: This rank's mailbox.
            stream: See ``mKv``.
        """
        self.push_kernel(mKv, mRows, mValid, scale_log2, out_scale, mail).launch(
            stream=stream, use_pdl=True, **self.shape()
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
        """The entry of latent mode: query and rows in tensors; arguments as :meth:`__call__`."""
        query, sink = TensorQuery(mQuery), TensorSink(mLatent, mLse)
        self.attend(query, mKv, mRows, mValid, sink, scale_log2, out_scale)

    @cute.kernel
    def push_kernel(
        self,
        mKv: cute.Tensor,
        mRows: cute.Tensor,
        mValid: cute.Tensor,
        scale_log2: Float32,
        out_scale: Float32,
        mail: DeviceMailbox,
    ) -> None:
        """The entry of push mode: query and rows in mailboxes; arguments as :meth:`push_decode`."""
        query = MailboxQuery(mail, self.box)  # type: ignore[arg-type]  # given in push mode
        self.attend(query, mKv, mRows, mValid, MailboxSink(query), scale_log2, out_scale)

    @cute.jit
    def attend(
        self,
        query: QuerySource,
        mKv: cute.Tensor,
        mRows: cute.Tensor,
        mValid: cute.Tensor,
        sink: RowSink,
        scale_log2: Float32,
        out_scale: Float32,
    ) -> None:
        """What a CTA does, from the query bytes to its share of the row."""
        layout = self.layout
        split = self.schedule.split
        chunk = self.schedule.chunk

        # Roles
        block, row, _ = cute.arch.block_idx()
        tile = block // split
        cta = cute.arch.block_idx_in_cluster()
        warp = cute.arch.warp_idx()

        # Barriers: made before anything is read that the kernel before may write
        storage = SmemAllocator().allocate_array(cutlass.Uint8, layout.size, byte_alignment=128)
        smem = storage.toint()
        self._init_barriers(storage)
        cute.arch.cluster_arrive()

        # Early launch
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # Split
        n = cutlass.max(cutlass.min(mValid[row], self.width), 0)
        begin, end = split_keys(n, cta, split)
        gIds = mRows[row, None]

        # Query and place of the rows
        query.open(row, tile)
        sink.open(row, tile, cta, layout)
        query.receive(mKv, gIds, smem, begin, end, layout)
        gather = query.gather

        # Chunks
        rAcc = cute.make_rmem_tensor((4, PV_TILES), Float32)
        rMax = cute.make_rmem_tensor(2, Float32)
        rSum = cute.make_rmem_tensor(2, Float32)
        rAlpha = cute.make_rmem_tensor(2, Float32)
        rLogit = cute.make_rmem_tensor(4, Float32)
        rAcc.fill(0.0)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)
        rLogit.fill(0.0)
        for c in cutlass.range((end - begin + (chunk - 1)) // chunk, unroll=1):
            start = begin + c * chunk
            count = cutlass.min(end - start, chunk)
            gather(mKv, gIds, smem, start, count, c, layout)
            cute.arch.mbarrier_wait(storage + layout.gather_barrier, c % 2)
            if warp < layout.logit_warps:
                scaled_logits(rLogit, smem, count, scale_log2, layout)
                store_warp_max(rLogit, smem, layout)
            cute.arch.sync_threads()  # warp_max is whole
            raise_max(rMax, rAlpha, smem, layout)
            if warp < layout.logit_warps:
                store_p(rLogit, rMax, smem, layout)
            rescale(rAcc, rAlpha)
            cute.arch.sync_threads()  # P and warp_sum are whole
            raise_sum(rSum, rAlpha, smem, layout)
            accumulate(rAcc, smem, count, layout)
            cute.arch.sync_threads()  # the chunk's buffers are free

        # Merge: after this wait every CTA of the cluster has armed its barrier
        cute.arch.cluster_wait()
        push_partial(rAcc, rMax, rSum, smem, cta, layout)
        query.release(cta, layout)
        cute.arch.mbarrier_wait(storage + layout.merge_barrier, 0)
        self.merge(sink, smem, out_scale)

    @cute.jit
    def _init_barriers(self, storage: cute.Pointer) -> None:
        """Make both barriers, and arm the merge's before any other CTA can push."""
        t, _, _ = cute.arch.thread_idx()
        if t == 0:
            if const_expr(self.push is not None):
                store_shared_b32(storage.toint() + self.layout.lost, Int32(0))
            cute.arch.mbarrier_init(storage + self.layout.gather_barrier, self.schedule.chunk)
            cute.arch.mbarrier_init(storage + self.layout.merge_barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if t == 0:
            mbarrier_arrive_expect_tx(
                storage.toint() + self.layout.merge_barrier, Int32(self.layout.merge_bytes)
            )

    @cute.jit
    def merge(self, sink: RowSink, smem: Int32, out_scale: Float32) -> None:
        """Merge the partials of the columns that this CTA owns; the rows go where ``sink`` says."""
        sink.finish(smem, out_scale, self.layout)
