"""Query: bytes in global memory to FP16 fragments in registers, kept for all chunks."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from sparse_mla_kernel.low_latency.layouts import (
    QUARTER_COLUMNS,
    QUARTERS,
    QUERY_STRIDE_BYTES,
    STEP,
    THREADS,
    SharedLayout,
)
from sparse_mla_kernel.primitives import (
    cvt_e4m3x4_f16x4,
    load_global_b32x4,
    load_shared_b32x2,
    store_shared_b32x4,
)
from sparse_mla_kernel.schedule import ROW_COLUMNS, TILE_HEADS

#: Vectors of 16 bytes in a query row, in a tile's 16 rows, and at most in a thread.
ROW_VECTORS = ROW_COLUMNS // 16
TILE_VECTORS = TILE_HEADS * ROW_VECTORS
THREAD_VECTORS = -(-TILE_VECTORS // THREADS)


@cute.jit
def load_query(rWords: cute.Tensor, query: Int64) -> None:
    """Thread t: vectors ``t, t + 256, ..`` of the tile's 16 query rows, which are contiguous.

    Args:
        rWords: ``[4, THREAD_VECTORS]`` words of 4 bytes, out.
        query: Address of the tile's first row.
    """
    t, _, _ = cute.arch.thread_idx()
    for i in cutlass.range_constexpr(THREAD_VECTORS):
        vector = t + THREADS * i
        if vector < TILE_VECTORS:
            rWords[0, i], rWords[1, i], rWords[2, i], rWords[3, i] = load_global_b32x4(
                query + 16 * vector
            )


@cute.jit
def store_query(rWords: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]) -> None:
    """Unpack what :func:`load_query` loaded to FP16, exactly, into ``query``."""
    t, _, _ = cute.arch.thread_idx()
    for i in cutlass.range_constexpr(THREAD_VECTORS):
        vector = t + THREADS * i
        if vector < TILE_VECTORS:
            head = vector // ROW_VECTORS
            column = vector % ROW_VECTORS * 16
            target = smem + layout.query + head * QUERY_STRIDE_BYTES + 2 * column
            for half in cutlass.range_constexpr(2):
                a, b = cvt_e4m3x4_f16x4(rWords[2 * half, i])
                c, d = cvt_e4m3x4_f16x4(rWords[2 * half + 1, i])
                store_shared_b32x4(target + 16 * half, a, b, c, d)


@cute.jit
def query_fragments(
    rQuery: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Warp w: B fragments of the columns of its quarter, 8 heads a tile.

    Args:
        rQuery: ``[2, 2, 9]`` words (fragment, tile of 8 heads, step of 16 columns), out.
    """
    lane = cute.arch.lane_idx()
    quarter = cute.arch.warp_idx() % QUARTERS
    rows = smem + layout.query + lane // 4 * QUERY_STRIDE_BYTES
    columns = rows + 2 * (quarter * QUARTER_COLUMNS + lane % 4 * 4)
    for step in cutlass.range_constexpr(QUARTER_COLUMNS // STEP):
        for tile in cutlass.range_constexpr(2):
            address = columns + 2 * STEP * step + 8 * QUERY_STRIDE_BYTES * tile
            rQuery[0, tile, step], rQuery[1, tile, step] = load_shared_b32x2(address)
