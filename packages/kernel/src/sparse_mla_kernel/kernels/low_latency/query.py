"""Query: bytes in global memory to FP16 fragments in registers, kept for all chunks."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint16, cute

from sparse_mla_kernel.kernels.base.layout import ROW_STRIDE_BYTES
from sparse_mla_kernel.kernels.low_latency.layout import (
    MMA_K,
    QUARTER_COLUMNS,
    QUARTERS,
    SharedLayout,
)
from sparse_mla_kernel.ptx.convert import cvt_e4m3x4_f16x4
from sparse_mla_kernel.ptx.copy import bulk_multicast_to_shared
from sparse_mla_kernel.ptx.shared_memory import load_shared_b32
from sparse_mla_kernel.schedule import ROW_COLUMNS


@cute.jit
def copy_query(
    query: Int64, smem: Int32, cta: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """One warp copies this CTA's share of the query's rows to every CTA of the split.

    Args:
        query: Address of the first head's row; the rows are contiguous.
        smem: Base address of the shared memory that ``layout`` divides.
        cta: This CTA's place in the split.
    """
    everyone = Uint16((1 << layout.split) - 1)
    for i in cutlass.range_constexpr(layout.heads // layout.split):
        row = layout.heads // layout.split * cta + i
        target = smem + layout.query + row * ROW_STRIDE_BYTES
        source = query + row * ROW_COLUMNS
        with cute.arch.elect_one():
            bulk_multicast_to_shared(
                target, source, ROW_COLUMNS, smem + layout.query_barrier, everyone
            )


@cute.jit
def query_fragments(
    rQuery: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Warp w: B fragments of the columns of its quarter, 8 heads a tile.

    Args:
        rQuery: ``[2, 2 tiles, 9]`` words (fragment, 8 heads, step of 16 columns), out.
        smem: Base address of the shared memory that ``layout`` divides.
    """
    lane = cute.arch.lane_idx()
    quarter = cute.arch.warp_idx() % QUARTERS
    rows = smem + layout.query + lane // 4 * ROW_STRIDE_BYTES
    columns = rows + quarter * QUARTER_COLUMNS + lane % 4 * 4
    for step in cutlass.range_constexpr(QUARTER_COLUMNS // MMA_K):
        for tile in cutlass.range_constexpr(2 * layout.tiles):
            word = load_shared_b32(columns + MMA_K * step + 8 * ROW_STRIDE_BYTES * tile)
            rQuery[0, tile, step], rQuery[1, tile, step] = cvt_e4m3x4_f16x4(word)
