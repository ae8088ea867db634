"""PV with exchanged P: every CTA of a split gets all P, and sums in the columns that it owns (R12).

P is less to send than the partials that are made from it, and no owner has to wait for partials.
Each owner needs V of all keys for this, so P is exchanged only where each CTA has one chunk.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from sparse_mla_kernel.kernels.low_latency.layout import (
    CHUNK,
    COLUMN_WARPS,
    PAIR_BYTES,
    PAIR_KEYS,
    UNIT_COLUMNS,
    SharedLayout,
)
from sparse_mla_kernel.kernels.low_latency.partial import (
    PAIRS,
    fragment_bytes,
    multiply_unit,
    p_fragments,
)
from sparse_mla_kernel.ptx.cluster import map_shared, store_async_b32, store_async_b32x2
from sparse_mla_kernel.ptx.copy import mbarrier_arrive_expect_tx


@cute.jit
def expect_p(smem: Int32, multiplied: Int32, layout: cutlass.Constexpr[SharedLayout]) -> None:
    """One thread expects P of ``multiplied`` keys from every CTA, also from a CTA without keys.

    P may come before it is expected: the barrier's phase does not end before this arrival.
    """
    size = layout.split * layout.heads * multiplied
    mbarrier_arrive_expect_tx(smem + layout.p_barrier, size)


@cute.jit
def push_p(
    rP: cute.Tensor,
    smem: Int32,
    cta: Int32,
    multiplied: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w sends P of its heads to every CTA of the split, also its own.

    Args:
        rP: From ``chunk_p``.
        smem: Base address of the shared memory that ``layout`` divides.
        cta: This CTA's place in the split.
        multiplied: Keys that are sent: 32 or 64.
    """
    offset, low, high = fragment_bytes(rP, layout)
    address = smem + layout.p + cta * (layout.heads * CHUNK) + offset
    if 2 * cute.arch.lane_idx() < multiplied:
        for i in cutlass.range_constexpr(layout.split):
            peer = (cta + i) % layout.split
            target = map_shared(address, peer)
            barrier = map_shared(smem + layout.p_barrier, peer)
            if const_expr(layout.tiles == 1):
                store_async_b32(target, low, barrier)
            else:
                store_async_b32x2(target, low, high, barrier)


@cute.jit
def accumulate_from(
    rAcc: cute.Tensor,
    smem: Int32,
    first: cutlass.Constexpr[int],
    end: cutlass.Constexpr[int],
    multiplied: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w adds ``P @ V`` of the CTAs of its half, for its share of the owned columns.

    Args:
        rAcc: ``[4, 2 units, tiles, CTAs of a half]`` f32 (C fragment, 8 columns, 16 heads, CTA), in
            and out.
        smem: Base address of the shared memory that ``layout`` divides.
        first: The first CTA, of the half's.
        end: The one past the last.
        multiplied: 32 or 64 keys of each; P and V are zero past the count.
    """
    # There is one branch in all, so that the CTAs' products don't wait for each other.
    if multiplied > PAIR_KEYS:
        for i in cutlass.range_constexpr(first, end):
            for pair in cutlass.range_constexpr(PAIRS):
                _accumulate(rAcc, smem, i, pair, layout)
    else:
        for i in cutlass.range_constexpr(first, end):
            _accumulate(rAcc, smem, i, 0, layout)


@cute.jit
def _accumulate(
    rAcc: cute.Tensor,
    smem: Int32,
    i: cutlass.Constexpr[int],
    pair: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Keys ``32 pair ..`` of CTA ``i`` of the half."""
    warp = cute.arch.warp_idx()
    cta = warp // COLUMN_WARPS * layout.half_ctas + i
    key = cta * CHUNK + PAIR_KEYS * pair + cute.arch.lane_idx()
    columns = warp % COLUMN_WARPS * (layout.units * UNIT_COLUMNS)
    v = smem + layout.values + key * layout.value_stride_bytes + columns
    rP = cute.make_rmem_tensor((4, 2, layout.tiles), Uint32)
    p_fragments(rP, smem + layout.p + cta * (layout.heads * CHUNK) + PAIR_BYTES * pair, layout)
    for u in cutlass.range_constexpr(layout.units):
        even, odd = rAcc[None, 2 * u, None, i], rAcc[None, 2 * u + 1, None, i]
        multiply_unit(even, odd, rP, v + UNIT_COLUMNS * u, layout)
