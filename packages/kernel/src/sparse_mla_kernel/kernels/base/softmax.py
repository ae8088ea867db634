"""Online softmax of one chunk: logits to P bytes, running maximum and row sum (R4 to R9, R11)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from sparse_mla_kernel.arithmetic.softmax import exponent_bias, numerator, rescale_factor
from sparse_mla_kernel.kernels.base.layout import TILE_KEYS, SharedLayout
from sparse_mla_kernel.ptx.math import add_rn, fma_rn, max_f32
from sparse_mla_kernel.ptx.shared_memory import (
    load_shared_b32,
    load_shared_f32,
    store_fp8_pair_shared,
    store_shared_f32,
)
from sparse_mla_kernel.schedule import TILE_HEADS


@cute.jit
def store_warp_max(
    rLogit: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Each head's largest logit among this warp's 8 keys (R4), to ``warp_max``."""
    lane = cute.arch.lane_idx()
    for half in cutlass.range_constexpr(2):
        top = max_f32(rLogit[2 * half], rLogit[2 * half + 1])
        top = max_f32(top, cute.arch.shuffle_sync_bfly(top, 1))
        top = max_f32(top, cute.arch.shuffle_sync_bfly(top, 2))
        if lane % 4 == 0:
            head = lane // 4 + 8 * half
            store_shared_f32(_slot(smem + layout.warp_max, cute.arch.warp_idx(), head), top)


@cute.jit
def raise_max(
    rMax: cute.Tensor, rAlpha: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """The running maximum takes the chunk in (R4), and says by how much older sums shrink (R5).

    Args:
        rMax: ``[2]`` f32, in and out, heads ``lane / 4`` and ``+ 8``; starts at ``-inf``.
        rAlpha: ``[2]`` f32, out: ``exp2(m_old - m_new)``, 1 where ``m_old`` is ``-inf``.
    """
    lane = cute.arch.lane_idx()
    for half in cutlass.range_constexpr(2):
        old = rMax[half]
        new = old
        for warp in cutlass.range_constexpr(layout.logit_warps):
            slot = _slot(smem + layout.warp_max, warp, lane // 4 + 8 * half)
            new = max_f32(new, load_shared_f32(slot))
        rMax[half] = new
        rAlpha[half] = rescale_factor(old, new)  # R5


@cute.jit
def store_p(
    rLogit: cute.Tensor, rMax: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """P of this warp's 8 keys: its E4M3 bytes to ``p`` (R11), its FP32 sum to ``warp_sum`` (R8).

    A key that is not live has the logit ``-inf`` and P = 0 even where the maximum is ``-inf`` too.
    """
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()
    q = lane % 4
    rP = cute.make_rmem_tensor(4, Float32)
    for half in cutlass.range_constexpr(2):
        head = lane // 4 + 8 * half
        bias = exponent_bias(rMax[half])  # R6
        for i in cutlass.range_constexpr(2):
            live = load_shared_b32(smem + layout.live + 4 * (warp * TILE_KEYS + 2 * q + i))
            rP[i] = numerator(rLogit[2 * half + i], bias, live)  # R7
        total = add_rn(rP[0], rP[1])  # R8: the pair, then lanes xor 1, xor 2
        total = add_rn(total, cute.arch.shuffle_sync_bfly(total, 1))
        total = add_rn(total, cute.arch.shuffle_sync_bfly(total, 2))
        if q == 0:
            store_shared_f32(_slot(smem + layout.warp_sum, warp, head), total)
        p_address = smem + layout.p + head * layout.p_stride_bytes + warp * TILE_KEYS + 2 * q
        store_fp8_pair_shared(p_address, rP[0], rP[1])


@cute.jit
def raise_sum(
    rSum: cute.Tensor, rAlpha: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """The running row sum takes the chunk in: the warps' sums in order (R8), then ``fma`` (R9).

    Args:
        rSum: ``[2]`` f32, in and out, heads ``lane / 4`` and ``+ 8``; starts at 0.
    """
    lane = cute.arch.lane_idx()
    for half in cutlass.range_constexpr(2):
        head = lane // 4 + 8 * half
        total = load_shared_f32(_slot(smem + layout.warp_sum, 0, head))
        for warp in cutlass.range_constexpr(1, layout.logit_warps):
            total = add_rn(total, load_shared_f32(_slot(smem + layout.warp_sum, warp, head)))
        rSum[half] = fma_rn(rSum[half], rAlpha[half], total)


@cute.jit
def _slot(base: Int32, warp: Int32, head: Int32) -> Int32:
    """Address of ``[warp][head]`` in a table of one f32 a warp and head."""
    return base + 4 * (warp * TILE_HEADS + head)
