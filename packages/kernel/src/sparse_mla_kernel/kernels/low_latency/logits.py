"""QK: FP16 query fragments and key bytes to sums over a quarter of the columns (R1)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from sparse_mla_kernel.kernels.base.layout import ROW_STRIDE_BYTES
from sparse_mla_kernel.kernels.low_latency.layout import (
    BUFFERS,
    CHUNK,
    LOGIT_STRIDE_BYTES,
    QUARTER_COLUMNS,
    QUARTERS,
    STEP,
    WARPS,
    SharedLayout,
)
from sparse_mla_kernel.ptx.convert import cvt_e4m3x4_f16x4
from sparse_mla_kernel.ptx.mma import mma_f16
from sparse_mla_kernel.ptx.shared_memory import load_shared_b32, store_shared_f32

#: Warps that share a chunk's keys, 16 of them in turn.
KEY_WARPS = WARPS // QUARTERS


@cute.jit
def quarter_logits(
    rQuery: cute.Tensor,
    smem: Int32,
    chunk: Int32,
    count: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: every other 16 keys, from ``16 (w / 4)`` on, over the columns of its quarter.

    9 steps of 16 columns into one accumulator a tile: the quarters are the chains that R2 adds.

    Args:
        rQuery: From :func:`query_fragments`.
        smem: Base address of the shared memory that ``layout`` divides.
        chunk: The chunk's number.
        count: Keys in the chunk; 16 keys with none of them are not multiplied.
    """
    lane = cute.arch.lane_idx()
    quarter = cute.arch.warp_idx() % QUARTERS
    g = lane // 4
    q = lane % 4
    sums = smem + layout.logit + chunk % 2 * layout.logit_bytes
    sums += quarter * (layout.heads * LOGIT_STRIDE_BYTES)
    for m in cutlass.range_constexpr(CHUNK // STEP // KEY_WARPS):
        first_key = STEP * (KEY_WARPS * m + cute.arch.warp_idx() // QUARTERS)
        if first_key < count:
            rSum = cute.make_rmem_tensor((4, 2 * layout.tiles), Float32)  # (fragment, 8 heads)
            rSum.fill(0.0)
            rKey = cute.make_rmem_tensor(4, Uint32)
            key = chunk % BUFFERS * CHUNK + first_key + g
            rows = smem + layout.keys + key * ROW_STRIDE_BYTES
            columns = rows + quarter * QUARTER_COLUMNS + 4 * q
            for step in cutlass.range_constexpr(QUARTER_COLUMNS // STEP):
                address = columns + STEP * step
                rKey[0], rKey[2] = cvt_e4m3x4_f16x4(load_shared_b32(address))
                rKey[1], rKey[3] = cvt_e4m3x4_f16x4(load_shared_b32(address + 8 * ROW_STRIDE_BYTES))
                for tile in cutlass.range_constexpr(2 * layout.tiles):
                    mma_f16(rSum[None, tile], rKey, rQuery[0, tile, step], rQuery[1, tile, step])
            for tile in cutlass.range_constexpr(2 * layout.tiles):
                for i in cutlass.range_constexpr(4):
                    head = 8 * tile + 2 * q + i % 2
                    key = first_key + g + 8 * (i // 2)
                    store_shared_f32(sums + head * LOGIT_STRIDE_BYTES + 4 * key, rSum[i, tile])
