"""Cluster merge: the CTAs' partials to final rows, and the rows to where they go (R13 to R15).

Partials travel over distributed shared memory to the CTA that owns their columns. There each warp
takes one head, and each lane takes four of every 128 columns that the CTA owns. After that a CTA
reads only its own shared memory, so that it may exit before the other CTAs.
"""

from __future__ import annotations

from typing import Protocol

import cutlass
from cutlass import Float32, Int32, cute

from sparse_mla_kernel.arithmetic.finish import lse_log2, normalise, output_factor
from sparse_mla_kernel.arithmetic.merge import partial_weight
from sparse_mla_kernel.io.sink import (
    send_columns,
    send_lse,
    slots_at_owner,
    write_columns,
    write_lse,
)
from sparse_mla_kernel.kernels.base.layout import PV_TILES, WARP_COLUMNS, SharedLayout
from sparse_mla_kernel.kernels.base.query import MailboxQuery, was_lost
from sparse_mla_kernel.mailbox.device import is_sendable
from sparse_mla_kernel.ptx.cluster import map_shared, store_async_f32x2, store_async_f32x4
from sparse_mla_kernel.ptx.math import fma_rn, max_f32
from sparse_mla_kernel.ptx.shared_memory import load_shared_f32, load_shared_f32x4
from sparse_mla_kernel.schedule import TILE_HEADS

# ---- partials to their owners -------------------------------------------------------------------


@cute.jit
def push_partial(
    rAcc: cute.Tensor,
    rMax: cute.Tensor,
    rSum: cute.Tensor,
    smem: Int32,
    cta: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Send every CTA of the cluster, also this one, the columns that it owns of this CTA's partial.

    Warp w's 32 columns belong to one CTA. Every CTA gets the maximum and sum of all heads.

    Args:
        rAcc: ``[4, 4]`` f32 (C fragment, MMA).
        rMax: ``[2]`` f32, heads ``lane / 4`` and ``+ 8``.
        rSum: As ``rMax``.
        smem: Base address of the shared memory that ``layout`` divides.
        cta: This CTA's rank in the cluster.
    """
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()
    g = lane // 4
    q = lane % 4
    owner = warp * WARP_COLUMNS // layout.cta_columns
    column = warp * WARP_COLUMNS % layout.cta_columns + 8 * q
    barrier = map_shared(smem + layout.merge_barrier, owner)
    for half in cutlass.range_constexpr(2):
        row = (cta * TILE_HEADS + g + 8 * half) * layout.cta_columns
        address = map_shared(smem + layout.peer_rows + 4 * (row + column), owner)
        for i in cutlass.range_constexpr(2):
            store_async_f32x4(
                address + 16 * i, *[rAcc[2 * half + i, tile] for tile in range(PV_TILES)], barrier
            )
    if warp == 0:
        for peer in cutlass.range_constexpr(layout.schedule.split):
            if q == peer % 4:
                stats = smem + layout.peer_stats + 8 * (cta * TILE_HEADS + g)
                peer_barrier = map_shared(smem + layout.merge_barrier, peer)
                for half in cutlass.range_constexpr(2):
                    address = map_shared(stats + 64 * half, peer)
                    store_async_f32x2(address, rMax[half], rSum[half], peer_barrier)


@cute.jit
def weigh_partials(
    rWeight: cute.Tensor, smem: Int32, head: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> tuple[Float32, Float32]:
    """The weight of each CTA's partial of a head, the head's maximum and total (R13).

    An empty partial (row sum 0) weighs 0. A NaN row sum is not empty: it makes the total NaN.

    Args:
        rWeight: ``[split]`` f32, out.

    Returns:
        ``(top, total)``: the largest running maximum, and the row sum relative to it.
    """
    stats = smem + layout.peer_stats + 8 * head
    top = load_shared_f32(stats)
    for peer in cutlass.range_constexpr(1, layout.schedule.split):
        top = max_f32(top, load_shared_f32(stats + 8 * TILE_HEADS * peer))
    total = Float32(0.0)
    for peer in cutlass.range_constexpr(layout.schedule.split):
        peer_max = load_shared_f32(stats + 8 * TILE_HEADS * peer)
        peer_sum = load_shared_f32(stats + 8 * TILE_HEADS * peer + 4)
        rWeight[peer] = partial_weight(peer_max, top) if peer_sum != 0.0 else Float32(0.0)  # R13
        total = fma_rn(rWeight[peer], peer_sum, total)  # R13
    return top, total


@cute.jit
def merge_columns(
    rRow: cute.Tensor,
    rWeight: cute.Tensor,
    smem: Int32,
    head: Int32,
    column: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Columns ``column .. column + 3`` of a head: the weighted sum, CTAs in order (R13)."""
    rRow.fill(0.0)
    for peer in cutlass.range_constexpr(layout.schedule.split):
        row = (peer * TILE_HEADS + head) * layout.cta_columns + column
        acc = load_shared_f32x4(smem + layout.peer_rows + 4 * row)
        for i in cutlass.range_constexpr(4):
            rRow[i] = fma_rn(rWeight[peer], acc[i], rRow[i])  # R13


# ---- rows to where they go ----------------------------------------------------------------------


class RowSink(Protocol):
    """Where a CTA's merged rows go. The pipeline calls the methods in their order here."""

    def open(self, row: Int32, tile: Int32, cta: Int32, layout: SharedLayout) -> None:
        """Find the place of the tile's rows."""

    def finish(self, smem: Int32, out_scale: Float32, layout: SharedLayout) -> None:
        """Merge the partials of the owned columns, and let the rows and their LSEs leave."""


class TensorSink:
    """Rows and natural LSEs go into tensors.

    Args:
        mLatent: ``[batch, padded, 512]`` BF16.
        mLse: ``[batch, padded]`` f32.
    """

    def __init__(self, mLatent: cute.Tensor, mLse: cute.Tensor) -> None:
        self.mLatent = mLatent
        self.mLse = mLse

    def open(
        self, row: Int32, tile: Int32, cta: Int32, layout: cutlass.Constexpr[SharedLayout]
    ) -> None:
        """The place is known by the row and the tile."""
        self.row, self.tile, self.cta = row, tile, cta

    @cute.jit
    def finish(
        self, smem: Int32, out_scale: Float32, layout: cutlass.Constexpr[SharedLayout]
    ) -> None:
        """Write this CTA's columns of the tile's 16 heads, and as CTA 0 the LSEs."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        head = self.tile * TILE_HEADS + warp
        rWeight = cute.make_rmem_tensor(layout.schedule.split, Float32)
        rRow = cute.make_rmem_tensor(4, Float32)
        top, total = weigh_partials(rWeight, smem, warp, layout)
        for start in cutlass.range_constexpr(0, layout.cta_columns, 128):
            column = start + 4 * lane
            if column < layout.cta_columns:
                merge_columns(rRow, rWeight, smem, warp, column, layout)
                low, high = normalise(rRow, total, output_factor(total, out_scale))  # R15
                gRow = self.mLatent[self.row, head, None].iterator
                gColumns = gRow + (self.cta * layout.cta_columns + column)
                write_columns(gColumns, low, high)
        if self.cta == 0 and lane == 0:
            write_lse(self.mLse, self.row, head, lse_log2(top, total))  # R14


class MailboxSink:
    """Rows and base-2 LSEs go into the mailboxes of the ranks that own the heads.

    Args:
        query: The query of the same step, which knows the mailbox and the parity.
    """

    def __init__(self, query: MailboxQuery) -> None:
        self.query = query

    @cute.jit
    def open(
        self, row: Int32, tile: Int32, cta: Int32, layout: cutlass.Constexpr[SharedLayout]
    ) -> None:
        """Find the owner of the warp's head, and where this lane's columns and the LSE go."""
        self.cta = cta
        self.head = tile * TILE_HEADS + cute.arch.warp_idx()
        column = cta * layout.cta_columns + 4 * cute.arch.lane_idx()
        self.payload_address, self.lse_address = slots_at_owner(
            self.query.mail, self.query.parity, row, self.head, column, self.query.box
        )

    @cute.jit
    def finish(
        self, smem: Int32, out_scale: Float32, layout: cutlass.Constexpr[SharedLayout]
    ) -> None:
        """Send this CTA's columns, and as CTA 0 the LSEs; nothing if a query row never came."""
        if not was_lost(smem, layout):
            self._send(smem, out_scale, layout)

    @cute.jit
    def _send(
        self, smem: Int32, out_scale: Float32, layout: cutlass.Constexpr[SharedLayout]
    ) -> None:
        """A row whose LSE says that it is empty, or that is not finite, sends no payload."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        rWeight = cute.make_rmem_tensor(layout.schedule.split, Float32)
        rRow = cute.make_rmem_tensor(4, Float32)
        top, total = weigh_partials(rWeight, smem, warp, layout)
        lse2 = lse_log2(top, total)  # R14
        sends = is_sendable(lse2)
        if self.cta == 0 and lane == 0:
            send_lse(self.query.mail, self.lse_address, lse2, self.head, sends, self.query.box)
        if sends:
            for start in cutlass.range_constexpr(0, layout.cta_columns, 128):
                column = start + 4 * lane
                if column < layout.cta_columns:
                    merge_columns(rRow, rWeight, smem, warp, column, layout)
                    low, high = normalise(rRow, total, output_factor(total, out_scale))  # R15
                    send_columns(self.payload_address + 2 * start, low, high)
