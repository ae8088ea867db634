"""The query of a tile: its 16 rows come with the first keys, or earlier out of the mailbox."""

from __future__ import annotations

from typing import Protocol

import cutlass
from cutlass import Boolean, Int32, Uint32, cute

from sparse_mla_kernel.io.query import rearm_query, receive_query
from sparse_mla_kernel.kernels.base.gather import gather_chunk
from sparse_mla_kernel.kernels.base.layout import ROW_STRIDE_BYTES, THREADS, SharedLayout
from sparse_mla_kernel.mailbox.device import DeviceMailbox, read_parity
from sparse_mla_kernel.mailbox.layout import MailboxLayout
from sparse_mla_kernel.ptx.cluster import map_shared, store_cluster_b32
from sparse_mla_kernel.ptx.shared_memory import load_shared_b32
from sparse_mla_kernel.schedule import ROW_COLUMNS, TILE_HEADS


class QuerySource(Protocol):
    """Where a CTA's query rows come from. The pipeline calls the methods in their order here."""

    def open(self, row: Int32, tile: Int32) -> None:
        """Find the tile's query rows of a row of the batch."""

    def receive(
        self,
        mKv: cute.Tensor,
        gIds: cute.Tensor,
        smem: Int32,
        begin: Int32,
        end: Int32,
        layout: SharedLayout,
    ) -> None:
        """Bring the query rows into shared memory, if they don't come with the first chunk."""

    def gather(
        self,
        mKv: cute.Tensor,
        gIds: cute.Tensor,
        smem: Int32,
        begin: Int32,
        count: Int32,
        chunk: Int32,
        layout: SharedLayout,
    ) -> None:
        """Ask for a chunk's keys, and for the query rows if they come with them."""

    def release(self, cta: Int32, layout: SharedLayout) -> None:
        """Every CTA of the cluster has read the query rows."""


class TensorQuery:
    """Query rows in a tensor. They are copied beside the keys of the first chunk.

    Args:
        mQuery: ``[cap, padded, 576]`` E4M3 bytes.
    """

    def __init__(self, mQuery: cute.Tensor) -> None:
        self.mQuery = mQuery

    @cute.jit
    def open(self, row: Int32, tile: Int32) -> None:
        """The rows are those of the tile."""
        self.gQuery = cute.local_tile(self.mQuery, (1, TILE_HEADS, ROW_COLUMNS), (row, tile, 0))

    def receive(self, *_: object) -> None:
        """Nothing to wait for yet."""

    @cute.jit
    def gather(
        self,
        mKv: cute.Tensor,
        gIds: cute.Tensor,
        smem: Int32,
        begin: Int32,
        count: Int32,
        chunk: Int32,
        layout: cutlass.Constexpr[SharedLayout],
    ) -> None:
        """The query rows come with the first chunk."""
        gather_chunk(mKv, gIds, self.gQuery, smem, begin, count, chunk == 0, layout)

    def release(self, *_: object) -> None:
        """Nothing reads a tensor's rows again, and nothing has to be put back."""


class MailboxQuery:
    """Query rows in this rank's mailbox. The keys of the first chunk are asked for before them.

    Args:
        mail: This rank's mailbox.
        box: Its layout.
    """

    def __init__(self, mail: DeviceMailbox, box: MailboxLayout) -> None:
        self.mail = mail
        self.box = box

    @cute.jit
    def open(self, row: Int32, tile: Int32) -> None:
        """The rows lie in the half of the mailbox that the step's parity names."""
        self.row, self.tile = row, tile
        self.parity = read_parity(self.mail)

    @cute.jit
    def receive(
        self,
        mKv: cute.Tensor,
        gIds: cute.Tensor,
        smem: Int32,
        begin: Int32,
        end: Int32,
        layout: cutlass.Constexpr[SharedLayout],
    ) -> None:
        """Ask for the first chunk's keys, then wait for the query rows."""
        if begin < end:
            count = cutlass.min(end - begin, layout.schedule.chunk)
            gather_chunk(mKv, gIds, None, smem, begin, count, False, layout)
        lost = receive_query(
            self.mail,
            self.parity,
            self.row,
            self.tile * TILE_HEADS,
            smem + layout.query,
            ROW_STRIDE_BYTES,
            TILE_HEADS,
            THREADS,
            self.box,
        )
        cute.arch.sync_threads()  # the query is whole
        cute.arch.cluster_wait()  # every CTA has cleared its word `lost`
        _announce_lost(lost, smem, layout)
        # Relaxed: all that precedes it is loads whose words are already in shared memory.
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def gather(
        self,
        mKv: cute.Tensor,
        gIds: cute.Tensor,
        smem: Int32,
        begin: Int32,
        count: Int32,
        chunk: Int32,
        layout: cutlass.Constexpr[SharedLayout],
    ) -> None:
        """The first chunk has been asked for."""
        if chunk > 0:
            gather_chunk(mKv, gIds, None, smem, begin, count, False, layout)

    @cute.jit
    def release(self, cta: Int32, layout: cutlass.Constexpr[SharedLayout]) -> None:
        """Put the sentinel back over this CTA's share of the rows."""
        first_head = self.tile * TILE_HEADS
        shares = layout.schedule.split
        rearm_query(
            self.mail,
            self.parity,
            self.row,
            first_head,
            cta,
            shares,
            TILE_HEADS,
            THREADS,
            self.box,
        )


@cute.jit
def _announce_lost(lost: Boolean, smem: Int32, layout: cutlass.Constexpr[SharedLayout]) -> None:
    """Tell every CTA of the cluster if this thread gave up. All CTAs have started before."""
    if lost:
        for peer in cutlass.range_constexpr(layout.schedule.split):
            store_cluster_b32(map_shared(smem + layout.lost, peer), Int32(1))
        cute.arch.fence_acq_rel_cluster()  # the cluster barrier that follows is relaxed


@cute.jit
def was_lost(smem: Int32, layout: cutlass.Constexpr[SharedLayout]) -> Boolean:
    """Whether any thread of the cluster gave up on the query; all CTAs have announced it before."""
    return load_shared_b32(smem + layout.lost) != Uint32(0)
