"""Cluster merge over distributed shared memory: the CTAs' partials to final rows (R13, R15)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from sparse_mla_kernel.arithmetic.merge import partial_weight
from sparse_mla_kernel.kernels.base.layout import PV_TILES, WARP_COLUMNS, SharedLayout
from sparse_mla_kernel.ptx.cluster import map_shared, store_async_f32x2, store_async_f32x4
from sparse_mla_kernel.ptx.math import fma_rn, max_f32
from sparse_mla_kernel.ptx.shared_memory import load_shared_f32, load_shared_f32x4
from sparse_mla_kernel.schedule import TILE_HEADS


@cute.jit
def push_partial(
    rAcc: cute.Tensor,
    rMax: cute.Tensor,
    rSum: cute.Tensor,
    smem: Int32,
    cta: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Give each CTA of the cluster, this one too, what it owns of this CTA's partial.

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
            rRow[i] = fma_rn(rWeight[peer], acc[i], rRow[i])
