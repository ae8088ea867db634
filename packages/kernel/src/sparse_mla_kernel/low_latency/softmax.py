"""Online softmax of one chunk: quarter sums to P, running maximum and row sum (R2 to R9, R11)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from sparse_mla_kernel.low_latency.layouts import (
    LOGIT_STRIDE_BYTES,
    P_STRIDE_BYTES,
    QUARTERS,
    SharedLayout,
)
from sparse_mla_kernel.primitives import (
    add_rn,
    cvt_e4m3x2_f16x2,
    ex2_approx_ftz,
    fma_rn,
    load_shared_b32x2,
    load_shared_f32x2,
    max_f32,
    mul_rn,
    store_shared_b32,
    store_shared_f32,
    sub_rn,
)
from sparse_mla_kernel.schedule import TILE_HEADS
from sparse_mla_kernel.softmax import P_SCALE_LOG2

#: Heads that a warp has.
WARP_HEADS = 2


@cute.jit
def store_p(
    rMax: cute.Tensor,
    rAlpha: cute.Tensor,
    rChunkSum: cute.Tensor,
    smem: Int32,
    buffer: Int32,
    scale_log2: Float32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: P of heads ``2w, 2w + 1`` to ``p``, and by how much older sums shrink to ``alpha``.

    A key that is not live has the logit ``-inf`` and P = 0 even where the maximum is ``-inf`` too.

    Args:
        rMax: ``[2]`` f32 a head, in and out; starts at ``-inf``.
        rAlpha: ``[2]`` f32, out: ``exp2(m_old - m_new)``, 1 where ``m_old`` is ``-inf``.
        rChunkSum: ``[2]`` f32, out: the lane's pair of P, summed (the first step of R8).
        smem: Base address of the shared memory that ``layout`` divides.
        buffer: The chunk's buffer.
        scale_log2: Softmax scale x tensor scales x log2(e).
    """
    lane = cute.arch.lane_idx()
    first_head = WARP_HEADS * cute.arch.warp_idx()
    rS = cute.make_rmem_tensor((2, WARP_HEADS), Float32)  # (key, head): logits, then P
    rTop = cute.make_rmem_tensor(WARP_HEADS, Float32)
    rLive = load_shared_b32x2(smem + layout.live + 4 * (64 * buffer + 2 * lane))
    for h in cutlass.range_constexpr(WARP_HEADS):
        row = smem + layout.logit + (first_head + h) * LOGIT_STRIDE_BYTES + 8 * lane
        rS[0, h], rS[1, h] = load_shared_f32x2(row)
        for quarter in cutlass.range_constexpr(1, QUARTERS):
            more = load_shared_f32x2(row + quarter * TILE_HEADS * LOGIT_STRIDE_BYTES)
            for i in cutlass.range_constexpr(2):
                rS[i, h] = add_rn(rS[i, h], more[i])  # R2
    for h in cutlass.range_constexpr(WARP_HEADS):
        for i in cutlass.range_constexpr(2):
            logit = mul_rn(rS[i, h], scale_log2)  # R3
            rS[i, h] = logit if rLive[i] != 0 else -Float32.inf
        rTop[h] = max_f32(rS[0, h], rS[1, h])
    for k in cutlass.range_constexpr(5):  # R4
        for h in cutlass.range_constexpr(WARP_HEADS):
            rTop[h] = max_f32(rTop[h], cute.arch.shuffle_sync_bfly(rTop[h], 1 << k))
    for h in cutlass.range_constexpr(WARP_HEADS):
        old = rMax[h]
        new = max_f32(old, rTop[h])
        rMax[h] = new
        rAlpha[h] = ex2_approx_ftz(sub_rn(old, new)) if old != -Float32.inf else Float32(1.0)  # R5
        bias = sub_rn(new, Float32(P_SCALE_LOG2))  # R6
        for i in cutlass.range_constexpr(2):
            p = ex2_approx_ftz(sub_rn(rS[i, h], bias))  # R7
            rS[i, h] = p if rLive[i] != 0 else Float32(0.0)
        row = smem + layout.p + (first_head + h) * P_STRIDE_BYTES
        store_shared_b32(row + 4 * lane, Int32(cvt_e4m3x2_f16x2(rS[0, h], rS[1, h])))  # R11
        if lane == 0:
            store_shared_f32(smem + layout.alpha + 4 * (first_head + h), rAlpha[h])
        rChunkSum[h] = add_rn(rS[0, h], rS[1, h])  # R8: the pair


@cute.jit
def raise_sum(rSum: cute.Tensor, rAlpha: cute.Tensor, rChunkSum: cute.Tensor) -> None:
    """The running row sum takes the chunk in: lanes xor 1, 2, 4, 8, 16 (R8), then ``fma`` (R9).

    Args:
        rSum: ``[2]`` f32 a head, in and out; starts at 0.
        rAlpha: From :func:`store_p`.
        rChunkSum: From :func:`store_p`.
    """
    for k in cutlass.range_constexpr(5):
        for h in cutlass.range_constexpr(WARP_HEADS):
            other = cute.arch.shuffle_sync_bfly(rChunkSum[h], 1 << k)
            rChunkSum[h] = add_rn(rChunkSum[h], other)
    for h in cutlass.range_constexpr(WARP_HEADS):
        rSum[h] = fma_rn(rSum[h], rAlpha[h], rChunkSum[h])
