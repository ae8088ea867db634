"""QK: FP16 query fragments and key bytes to sums over a quarter of the columns (R1)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from sparse_mla_kernel.arithmetic.softmax import scaled_logit
from sparse_mla_kernel.kernels.base.layout import ROW_STRIDE_BYTES
from sparse_mla_kernel.kernels.low_latency.layout import (
    BUFFERS,
    CHUNK,
    LOGIT_STRIDE_BYTES,
    MMA_K,
    QUARTER_COLUMNS,
    QUARTERS,
    WARPS,
    SharedLayout,
)
from sparse_mla_kernel.ptx.convert import cvt_e4m3x4_f16x4
from sparse_mla_kernel.ptx.math import add_rn
from sparse_mla_kernel.ptx.mma import mma_f16
from sparse_mla_kernel.ptx.shared_memory import (
    load_shared_b32,
    load_shared_b32x2,
    load_shared_f32x2,
    store_shared_f32,
)

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
    for m in cutlass.range_constexpr(CHUNK // MMA_K // KEY_WARPS):
        first_key = MMA_K * (KEY_WARPS * m + cute.arch.warp_idx() // QUARTERS)
        if first_key < count:
            rSum = cute.make_rmem_tensor((4, 2 * layout.tiles), Float32)  # (fragment, 8 heads)
            rSum.fill(0.0)
            rKey = cute.make_rmem_tensor(4, Uint32)
            key = chunk % BUFFERS * CHUNK + first_key + g
            rows = smem + layout.keys + key * ROW_STRIDE_BYTES
            columns = rows + quarter * QUARTER_COLUMNS + 4 * q
            for step in cutlass.range_constexpr(QUARTER_COLUMNS // MMA_K):
                address = columns + MMA_K * step
                rKey[0], rKey[2] = cvt_e4m3x4_f16x4(load_shared_b32(address))
                rKey[1], rKey[3] = cvt_e4m3x4_f16x4(load_shared_b32(address + 8 * ROW_STRIDE_BYTES))
                for tile in cutlass.range_constexpr(2 * layout.tiles):
                    b0, b1 = rQuery[0, tile, step], rQuery[1, tile, step]
                    mma_f16(rSum[None, tile], rKey, b0, b1)  # R1
            for tile in cutlass.range_constexpr(2 * layout.tiles):
                for i in cutlass.range_constexpr(4):
                    head = 8 * tile + 2 * q + i % 2
                    key = first_key + g + 8 * (i // 2)
                    store_shared_f32(sums + head * LOGIT_STRIDE_BYTES + 4 * key, rSum[i, tile])


@cute.jit
def load_logits(
    rS: cute.Tensor,
    rLive: cute.Tensor,
    smem: Int32,
    chunk: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: this lane's two sums of each of its heads, over all columns (R2).

    Args:
        rS: ``[2, 2 tiles]`` f32 (key, head), out.
        rLive: ``[2]`` words, out: whether the keys count.
        smem: Base address of the shared memory that ``layout`` divides.
        chunk: The chunk's number.
    """
    lane = cute.arch.lane_idx()
    live = smem + layout.live + 4 * (chunk % BUFFERS * CHUNK + 2 * lane)
    rLive[0], rLive[1] = load_shared_b32x2(live)
    first = smem + layout.logit + chunk % 2 * layout.logit_bytes
    first += cute.arch.warp_idx() * LOGIT_STRIDE_BYTES + 8 * lane
    for h in cutlass.range_constexpr(2 * layout.tiles):
        row = first + WARPS * h * LOGIT_STRIDE_BYTES
        rS[0, h], rS[1, h] = load_shared_f32x2(row)
        for quarter in cutlass.range_constexpr(1, QUARTERS):
            more = load_shared_f32x2(row + quarter * layout.heads * LOGIT_STRIDE_BYTES)
            for i in cutlass.range_constexpr(2):
                rS[i, h] = add_rn(rS[i, h], more[i])  # R2


@cute.jit
def scale_logits(
    rS: cute.Tensor,
    rLive: cute.Tensor,
    scale_log2: Float32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Sums over all columns to base-2 logits, ``-inf`` where a key does not count.

    Args:
        rS: From :func:`load_logits`, in and out.
        rLive: From there.
        scale_log2: Softmax scale x tensor scales x log2(e).
    """
    for h in cutlass.range_constexpr(2 * layout.tiles):
        for i in cutlass.range_constexpr(2):
            rS[i, h] = scaled_logit(rS[i, h], scale_log2, rLive[i])  # R3
