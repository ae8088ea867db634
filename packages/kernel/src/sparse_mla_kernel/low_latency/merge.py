"""Cluster merge over distributed shared memory: the CTAs' partials to final rows (R13, R15)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from sparse_mla_kernel.low_latency.layouts import (
    UNIT_BYTES,
    UNITS,
    SharedLayout,
)
from sparse_mla_kernel.low_latency.partial import HALF_TILES
from sparse_mla_kernel.low_latency.softmax import WARP_HEADS
from sparse_mla_kernel.primitives import (
    cvt_bf16x2,
    ex2_approx_ftz,
    fma_rn,
    load_shared_f32x2,
    load_shared_f32x4,
    map_shared,
    max_f32,
    mul_rn,
    store_async_f32x2,
    store_async_f32x4,
    store_shared_f32x4,
    sub_rn,
)
from sparse_mla_kernel.schedule import TILE_HEADS


@cute.jit
def push_stats(
    rMax: cute.Tensor,
    rSum: cute.Tensor,
    smem: Int32,
    cta: Int32,
    first_rank: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Give each CTA of the split, this one too, this warp's heads' maximum and sum.

    Args:
        rMax: ``[2]`` f32, the warp's two heads.
        rSum: As ``rMax``.
        smem: Base address of the shared memory that ``layout`` divides.
        cta: This CTA's place in the split.
        first_rank: Cluster rank of the split's first CTA.
    """
    lane = cute.arch.lane_idx()
    for h in cutlass.range_constexpr(WARP_HEADS):
        if lane // 8 == h and lane % 8 < layout.split:
            peer = first_rank + lane % 8
            head = WARP_HEADS * cute.arch.warp_idx() + h
            stats = smem + layout.peer_stats + 8 * (cta * TILE_HEADS + head)
            barrier = map_shared(smem + layout.stats_barrier, peer)
            store_async_f32x2(map_shared(stats, peer), rMax[h], rSum[h], barrier)


@cute.jit
def push_rows(
    rAcc: cute.Tensor,
    smem: Int32,
    cta: Int32,
    first_rank: Int32,
    u: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Give the owner of this warp's columns half ``u`` of this CTA's partial of them.

    Args:
        rAcc: ``[4, 8]`` f32 (C fragment, tile).
        smem: Base address of the shared memory that ``layout`` divides.
        cta: This CTA's place in the split.
        first_rank: Cluster rank of the split's first CTA.
    """
    warp = cute.arch.warp_idx()
    owner = warp // layout.owner_warps
    barrier = map_shared(smem + layout.rows_barrier, first_rank + owner)
    for half in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(2):
            unit = 4 * half + 2 * u + i
            address = _vector(smem, cta, unit, warp % layout.owner_warps, layout)
            values = [rAcc[2 * half + i, HALF_TILES * u + j] for j in range(HALF_TILES)]
            if owner == cta:
                store_shared_f32x4(address, *values)
            else:
                store_async_f32x4(map_shared(address, first_rank + owner), *values, barrier)


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
    rMax = cute.make_rmem_tensor(layout.split, Float32)
    rSum = cute.make_rmem_tensor(layout.split, Float32)
    for peer in cutlass.range_constexpr(layout.split):
        stats = smem + layout.peer_stats + 8 * (peer * TILE_HEADS + head)
        rMax[peer], rSum[peer] = load_shared_f32x2(stats)
    top = rMax[0]
    for peer in cutlass.range_constexpr(1, layout.split):
        top = max_f32(top, rMax[peer])
    total = Float32(0.0)
    for peer in cutlass.range_constexpr(layout.split):
        weight = ex2_approx_ftz(sub_rn(rMax[peer], top))
        rWeight[peer] = weight if rSum[peer] != 0.0 else Float32(0.0)
        total = fma_rn(rWeight[peer], rSum[peer], total)
    return top, total


@cute.jit
def merged_columns(
    rWeight: cute.Tensor,
    total: Float32,
    inverse: Float32,
    smem: Int32,
    owner_warp: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[SharedLayout],
) -> tuple[Uint32, Uint32]:
    """This lane's four columns of its warp's unit, as two words of BF16 pairs (R13, R15).

    Args:
        rWeight: From :func:`weigh_partials`.
        total: As ``rWeight``; 0 where there are no keys, whose row is 0.
        inverse: ``out_scale / total``.
        owner_warp: Which 64 of the owned columns.
    """
    rRow = cute.make_rmem_tensor(4, Float32)
    rRow.fill(0.0)
    for peer in cutlass.range_constexpr(layout.split):
        acc = load_shared_f32x4(_vector(smem, peer, cute.arch.warp_idx(), owner_warp, layout))
        for i in cutlass.range_constexpr(4):
            rRow[i] = fma_rn(rWeight[peer], acc[i], rRow[i])
    for i in cutlass.range_constexpr(4):
        value = mul_rn(rRow[i], inverse)
        rRow[i] = value if total != 0.0 else Float32(0.0)
    return cvt_bf16x2(rRow[0], rRow[1]), cvt_bf16x2(rRow[2], rRow[3])


@cute.jit
def unit_head(warp: Int32) -> Int32:
    """The head, of the tile's 16, that this lane has in unit ``warp``."""
    return cute.arch.lane_idx() // 4 + 8 * (warp // 4)


@cute.jit
def unit_column(warp: Int32) -> Int32:
    """The first of the four columns, of a warp's 64, that this lane has in unit ``warp``."""
    return 32 * (warp // 2 % 2) + 8 * (cute.arch.lane_idx() % 4) + 4 * (warp % 2)


@cute.jit
def _vector(
    smem: Int32,
    cta: Int32,
    unit: Int32,
    owner_warp: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> Int32:
    """Address of this lane's vector in ``peer_rows``."""
    block = (cta * UNITS + unit) * layout.owner_warps + owner_warp
    return smem + layout.peer_rows + block * UNIT_BYTES + 16 * cute.arch.lane_idx()
