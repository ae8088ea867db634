"""Query exchange: each rank's heads into every rank's q mailbox, and out of it.

A stage of the step has two ends: ``QueryExchange`` is the sender's kernel; ``receive_query`` and
``rearm_query`` are the reader's part of the decode kernel.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from sparse_mla_kernel.kernels.base.layout import ROW_STRIDE_BYTES, THREADS, WARP, SharedLayout
from sparse_mla_kernel.mailbox.device import (
    DeviceMailbox,
    peer_mailbox,
    query_address,
    query_word,
    read_parity,
)
from sparse_mla_kernel.mailbox.layout import QUERY_SENTINEL, MailboxLayout
from sparse_mla_kernel.mailbox.waits import Stage, gives_up
from sparse_mla_kernel.ptx.cluster import map_shared, store_cluster_b32
from sparse_mla_kernel.ptx.global_memory import load_global_b32x4
from sparse_mla_kernel.ptx.shared_memory import load_shared_b32, store_shared_b32x4
from sparse_mla_kernel.ptx.system import load_relaxed_sys_b32x4, store_relaxed_sys_b32x4
from sparse_mla_kernel.schedule import ROW_COLUMNS, TILE_HEADS

VECTOR_BYTES = 16
ROW_VECTORS = ROW_COLUMNS // VECTOR_BYTES
TILE_VECTORS = TILE_HEADS * ROW_VECTORS


class QueryExchange:
    """The sender's kernel. A CTA stores one row's heads of this rank into one peer's mailbox.

    Args:
        batch: Decode rows.
        box: The mailbox's layout.
    """

    def __init__(self, batch: int, box: MailboxLayout) -> None:
        self.batch = batch
        self.box = box
        self.vectors = box.owner_heads * ROW_VECTORS
        self.passes = -(-self.vectors // THREADS)
        self.threads = -(-self.vectors // (self.passes * WARP)) * WARP

    @cute.jit
    def __call__(self, mQuery: cute.Tensor, mail: DeviceMailbox, stream: object) -> None:
        """Launch on ``stream``, as a programmatic dependent of what runs there.

        Args:
            mQuery: ``[batch, owner_heads, 576]`` E4M3 bytes, this rank's heads.
            mail: This rank's mailbox.
            stream: A DSL stream handle.
        """
        self.kernel(mQuery, mail).launch(
            grid=(self.batch, self.box.ranks, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mQuery: cute.Tensor, mail: DeviceMailbox) -> None:
        """Store the CTA's heads, 16 bytes at a time, each word on its own the news of itself."""
        box = self.box
        t, _, _ = cute.arch.thread_idx()
        row, peer, _ = cute.arch.block_idx()

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        source = mQuery[row, None, None].iterator.toint()
        first_head = mail.rank * box.owner_heads
        base = peer_mailbox(mail, peer)
        target = query_address(base, read_parity(mail), row, first_head, box)
        for i in cutlass.range_constexpr(self.passes):
            vector = t + i * self.threads
            if vector < self.vectors:
                offset = VECTOR_BYTES * vector
                words = load_global_b32x4(source + offset)
                store_relaxed_sys_b32x4(target + offset, *[query_word(word) for word in words])


@cute.jit
def receive_query(
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    tile: Int32,
    smem: Int32,
    layout: cutlass.Constexpr[SharedLayout],
    box: cutlass.Constexpr[MailboxLayout],
) -> Boolean:
    """Wait for the tile's 16 query rows and put them where the gather would have.

    Returns:
        Whether this thread gave up on any of its words. The threads of a CTA may differ.
    """
    t, _, _ = cute.arch.thread_idx()
    lost = Boolean(False)
    source = query_address(mail.own, parity, row, tile * TILE_HEADS, box)
    for i in cutlass.range_constexpr(-(-TILE_VECTORS // THREADS)):
        vector = t + i * THREADS
        if vector < TILE_VECTORS:
            head = vector // ROW_VECTORS
            a, b, c, d, gone = _wait_vector(
                source + VECTOR_BYTES * vector, mail, row, tile * TILE_HEADS + head, box
            )
            lost = lost or gone
            column = VECTOR_BYTES * (vector % ROW_VECTORS)
            store_shared_b32x4(smem + layout.query + head * ROW_STRIDE_BYTES + column, a, b, c, d)
    return lost


@cute.jit
def _wait_vector(
    address: Int64,
    mail: DeviceMailbox,
    row: Int32,
    head: Int32,
    box: cutlass.Constexpr[MailboxLayout],
) -> tuple[Uint32, Uint32, Uint32, Uint32, Boolean]:
    """Four words of a query row, once none of them is the sentinel; whether the wait was lost."""
    a, b, c, d = load_relaxed_sys_b32x4(address)
    lost = Boolean(False)
    missing = _any_missing(a, b, c, d)
    if missing:
        began = cute.arch.globaltimer()
        spins = Int32(0)
        while missing and not lost:
            a, b, c, d = load_relaxed_sys_b32x4(address)
            missing = _any_missing(a, b, c, d)
            spins += 1
            if missing:
                rank = head // box.owner_heads
                lost = gives_up(spins, began, mail, Stage.QUERY, rank, row, head)
    return a, b, c, d, lost


@cute.jit
def _any_missing(a: Uint32, b: Uint32, c: Uint32, d: Uint32) -> Boolean:
    sentinel = Uint32(QUERY_SENTINEL)
    return a == sentinel or b == sentinel or c == sentinel or d == sentinel


@cute.jit
def announce_lost(lost: Boolean, smem: Int32, layout: cutlass.Constexpr[SharedLayout]) -> None:
    """Tell every CTA of the cluster if this thread gave up; they all met before this."""
    if lost:
        for peer in cutlass.range_constexpr(layout.schedule.split):
            store_cluster_b32(map_shared(smem + layout.lost, peer), Int32(1))
        cute.arch.fence_acq_rel_cluster()  # the cluster barrier that follows is relaxed


@cute.jit
def was_lost(smem: Int32, layout: cutlass.Constexpr[SharedLayout]) -> Boolean:
    """Whether any thread of the cluster gave up; all CTAs have announced it before this."""
    return load_shared_b32(smem + layout.lost) != Uint32(0)


@cute.jit
def rearm_query(
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    tile: Int32,
    cta: Int32,
    split: cutlass.Constexpr[int],
    box: cutlass.Constexpr[MailboxLayout],
) -> None:
    """Put the sentinel back over this CTA's share of the tile's query rows.

    Every CTA of the cluster has read them before this.
    """
    t, _, _ = cute.arch.thread_idx()
    share = TILE_VECTORS // split
    target = query_address(mail.own, parity, row, tile * TILE_HEADS, box)
    for i in cutlass.range_constexpr(-(-share // THREADS)):
        vector = t + i * THREADS
        if vector < share:
            offset = VECTOR_BYTES * (cta * share + vector)
            store_relaxed_sys_b32x4(target + offset, *[Uint32(QUERY_SENTINEL)] * 4)
