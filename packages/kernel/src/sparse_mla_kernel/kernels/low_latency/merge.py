"""Merge: the CTAs' partials of the owned columns to final rows (R13, R15).

Where P was exchanged, the partials lie in the warps' registers. Otherwise they are pushed to the
CTA that owns their columns.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from sparse_mla_kernel.arithmetic.finish import lse_log2, normalise, output_factor
from sparse_mla_kernel.arithmetic.merge import partial_weight
from sparse_mla_kernel.io.sink import write_columns, write_lse
from sparse_mla_kernel.kernels.low_latency.layout import (
    COLUMN_WARPS,
    WARP,
    WARP_UNITS,
    WARPS,
    SharedLayout,
)
from sparse_mla_kernel.kernels.low_latency.softmax import of_own_head, own_head
from sparse_mla_kernel.ptx.cluster import map_shared, store_async_f32x2, store_async_f32x4
from sparse_mla_kernel.ptx.math import fma_rn, max_f32
from sparse_mla_kernel.ptx.shared_memory import (
    load_shared_f32x2,
    load_shared_f32x4,
    store_shared_f32x4,
)


@cute.jit
def push_stats(
    rMax: cute.Tensor,
    own_sum: Float32,
    smem: Int32,
    cta: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w sends the maximum and the sum of its heads to every CTA of the split, also its own.

    Args:
        rMax: ``[2 tiles]`` f32, the warp's heads.
        own_sum: The lane's own head's sum.
        smem: Base address of the shared memory that ``layout`` divides.
        cta: This CTA's place in the split.
    """
    own_max = of_own_head(rMax, layout)
    peer = cute.arch.lane_idx() // (2 * layout.tiles)
    if peer < layout.split:
        head = cute.arch.warp_idx() + WARPS * own_head(layout)
        stats = smem + layout.stats + 8 * (cta * layout.heads + head)
        barrier = map_shared(smem + layout.stats_barrier, peer)
        store_async_f32x2(map_shared(stats, peer), own_max, own_sum, barrier)


@cute.jit
def weigh_partials(
    rWeight: cute.Tensor,
    smem: Int32,
    out_scale: Float32,
    layout: cutlass.Constexpr[SharedLayout],
) -> tuple[Float32, Float32, Float32]:
    """The weights of the CTAs' partials of head ``lane``, its maximum and total (R13).

    An empty partial (row sum 0) weighs 0. A NaN row sum is not empty: it makes the total NaN.

    Args:
        rWeight: ``[split]`` f32, out.
        smem: Base address of the shared memory that ``layout`` divides.
        out_scale: The V scale.

    Returns:
        ``(top, total, inverse)``: the largest running maximum, the row sum relative to it (0 where
        there are no keys), and ``out_scale / total``.
    """
    head = cute.arch.lane_idx() % layout.heads
    rMax = cute.make_rmem_tensor(layout.split, Float32)
    rSum = cute.make_rmem_tensor(layout.split, Float32)
    for cta in cutlass.range_constexpr(layout.split):
        stats = smem + layout.stats + 8 * (cta * layout.heads + head)
        rMax[cta], rSum[cta] = load_shared_f32x2(stats)
    top = rMax[0]
    for cta in cutlass.range_constexpr(1, layout.split):
        top = max_f32(top, rMax[cta])
    total = Float32(0.0)
    for cta in cutlass.range_constexpr(layout.split):
        weight = partial_weight(rMax[cta], top)  # R13
        rWeight[cta] = weight if rSum[cta] != 0.0 else Float32(0.0)
        total = fma_rn(rWeight[cta], rSum[cta], total)  # R13
    return top, total, output_factor(total, out_scale)  # R15


# ---- partials in registers ----------------------------------------------------------------------


@cute.jit
def merge_half(
    rRow: cute.Tensor,
    rAcc: cute.Tensor,
    rHeadWeight: cute.Tensor,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Add the partials of the warp's half of the CTAs, in their order (R13).

    Args:
        rRow: ``[4, units, 2, tiles]`` f32 (column, 16 columns, head g or g + 8, 16 heads), in and
            out; starts at 0.
        rAcc: From ``accumulate_from``.
        rHeadWeight: ``[CTAs of a half, 2, tiles]`` f32, the partials' weights of those heads.
    """
    for i in cutlass.range_constexpr(layout.half_ctas):
        for m in cutlass.range_constexpr(layout.tiles):
            for r in cutlass.range_constexpr(2):
                for u in cutlass.range_constexpr(layout.units):
                    for k in cutlass.range_constexpr(4):
                        acc = rAcc[2 * r + k // 2, 2 * u + k % 2, m, i]
                        rRow[k, u, r, m] = fma_rn(
                            rHeadWeight[i, r, m], acc, rRow[k, u, r, m]
                        )  # R13


@cute.jit
def hand_over(
    rRow: cute.Tensor,
    smem: Int32,
    takes: cutlass.Constexpr[bool],
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Hand the first half's rows, through shared memory, to the warp that continues them.

    Args:
        rRow: As :func:`merge_half`; in if the warp gives, out if it takes.
        smem: Base address of the shared memory that ``layout`` divides.
        takes: Whether the warp takes or gives.
    """
    warp = cute.arch.warp_idx() % COLUMN_WARPS
    vectors = smem + layout.logit + layout.logit_bytes + 16 * cute.arch.lane_idx()
    for m in cutlass.range_constexpr(layout.tiles):
        for r in cutlass.range_constexpr(2):
            for u in cutlass.range_constexpr(layout.units):
                block = ((warp * layout.tiles + m) * 2 + r) * layout.units + u
                address = vectors + 16 * WARP * block
                if const_expr(takes):
                    row = load_shared_f32x4(address)
                    for k in cutlass.range_constexpr(4):
                        rRow[k, u, r, m] = row[k]
                else:
                    store_shared_f32x4(address, *[rRow[k, u, r, m] for k in range(4)])


# ---- partials that are pushed -------------------------------------------------------------------


@cute.jit
def push_rows(
    rAcc: cute.Tensor, smem: Int32, cta: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Send this CTA's partial of the warp's columns to the CTA that owns them.

    Args:
        rAcc: From ``accumulate``.
        smem: Base address of the shared memory that ``layout`` divides.
        cta: This CTA's place in the split.
    """
    warp = cute.arch.warp_idx()
    owner = warp // layout.owner_warps
    barrier = map_shared(smem + layout.rows_barrier, owner)
    for m in cutlass.range_constexpr(layout.tiles):
        for r in cutlass.range_constexpr(2):
            for u in cutlass.range_constexpr(WARP_UNITS):
                block = (m * 2 + r) * WARP_UNITS + u
                address = row_vector(smem, cta, block, warp % layout.owner_warps, layout)
                values = [rAcc[2 * r + k // 2, 2 * u + k % 2, m] for k in range(4)]
                if owner == cta:
                    store_shared_f32x4(address, *values)
                else:
                    store_async_f32x4(map_shared(address, owner), *values, barrier)


@cute.jit
def row_vector(
    smem: Int32,
    cta: Int32,
    block: Int32,
    owner_warp: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> Int32:
    """Address of this lane's vector of a sender's block: ``(2m + r) 4 + u``, of its warps' one."""
    blocks = 2 * layout.tiles * WARP_UNITS * layout.owner_warps
    place = cta * blocks + block * layout.owner_warps + owner_warp
    return smem + layout.keys + 16 * (WARP * place + cute.arch.lane_idx())


@cute.jit
def merge_vector(
    rRow: cute.Tensor,
    rHeadWeight: cute.Tensor,
    smem: Int32,
    block: Int32,
    owner_warp: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Add the CTAs' partials of this lane's four columns of a block, in their order (R13).

    Args:
        rRow: ``[4]`` f32, out.
        rHeadWeight: ``[split]`` f32, the partials' weights of the block's head.
    """
    rRow.fill(0.0)
    for cta in cutlass.range_constexpr(layout.split):
        acc = load_shared_f32x4(row_vector(smem, Int32(cta), block, owner_warp, layout))
        for k in cutlass.range_constexpr(4):
            rRow[k] = fma_rn(rHeadWeight[cta], acc[k], rRow[k])  # R13


# ---- rows to where they go ----------------------------------------------------------------------


@cute.jit
def finish_columns(
    gRow: cute.Pointer, column: Int32, rRow: cute.Tensor, total: Float32, factor: Float32
) -> None:
    """Normalise four merged columns of a head and write them.

    Args:
        gRow: The head's row in the latent tensor.
        column: The first of the columns.
        rRow: ``[4]`` f32, the merged columns; used up.
        total: The head's row sum.
        factor: ``out_scale / total``.
    """
    low, high = normalise(rRow, total, factor)  # R15
    write_columns(gRow + column, low, high)


@cute.jit
def finish_lse(mLse: cute.Tensor, row: Int32, head: Int32, top: Float32, total: Float32) -> None:
    """Write the LSE of a head, natural.

    Args:
        mLse: ``[batch, padded]`` f32.
        row: The row.
        head: The head.
        top: The head's largest running maximum.
        total: Its row sum, relative to ``top``.
    """
    write_lse(mLse, row, head, lse_log2(top, total))  # R14
