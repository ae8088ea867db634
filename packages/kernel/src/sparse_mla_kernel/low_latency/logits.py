"""QK: FP16 query fragments and key bytes to sums over a quarter of the columns (R1)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from sparse_mla_kernel.layouts import ROW_STRIDE_BYTES
from sparse_mla_kernel.low_latency.layouts import (
    LOGIT_STRIDE_BYTES,
    QUARTER_COLUMNS,
    QUARTERS,
    STEP,
    WARP_KEYS,
    SharedLayout,
)
from sparse_mla_kernel.primitives import (
    cvt_e4m3x4_f16x4,
    load_shared_b32,
    mma_f16,
    store_shared_f32,
)
from sparse_mla_kernel.schedule import TILE_HEADS


@cute.jit
def quarter_logits(
    rQuery: cute.Tensor,
    smem: Int32,
    kv: Int32,
    count: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: keys ``32 (w / 4) ..`` over the columns of its quarter, to ``logit``.

    9 steps of 16 columns into one accumulator a tile: the quarters are the chains that R2 adds.

    Args:
        rQuery: From :func:`query_fragments`.
        smem: Base address of the shared memory that ``layout`` divides.
        kv: Address of the chunk's first cache row.
        count: Keys in the chunk; a warp with none of them multiplies nothing.
    """
    lane = cute.arch.lane_idx()
    quarter = cute.arch.warp_idx() % QUARTERS
    first_key = cute.arch.warp_idx() // QUARTERS * WARP_KEYS
    g = lane // 4
    q = lane % 4
    if first_key < count:
        rSum = cute.make_rmem_tensor((4, 2, 2), Float32)  # (fragment, 16 keys, 8 heads)
        rSum.fill(0.0)
        rKey = cute.make_rmem_tensor(4, Uint32)
        keys = kv + (first_key + g) * ROW_STRIDE_BYTES + quarter * QUARTER_COLUMNS + 4 * q
        for step in cutlass.range_constexpr(QUARTER_COLUMNS // STEP):
            for m in cutlass.range_constexpr(2):
                address = keys + STEP * step + 16 * m * ROW_STRIDE_BYTES
                rKey[0], rKey[2] = cvt_e4m3x4_f16x4(load_shared_b32(address))
                rKey[1], rKey[3] = cvt_e4m3x4_f16x4(load_shared_b32(address + 8 * ROW_STRIDE_BYTES))
                for tile in cutlass.range_constexpr(2):
                    mma_f16(rSum[None, m, tile], rKey, rQuery[0, tile, step], rQuery[1, tile, step])
        sums = smem + layout.logit + quarter * TILE_HEADS * LOGIT_STRIDE_BYTES
        for m in cutlass.range_constexpr(2):
            for tile in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    head = 8 * tile + 2 * q + i % 2
                    key = first_key + 16 * m + g + 8 * (i // 2)
                    store_shared_f32(sums + head * LOGIT_STRIDE_BYTES + 4 * key, rSum[i, m, tile])
