"""Online softmax of one chunk: logits to P, the running maximum and the sum of P (R4 to R8)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from sparse_mla_kernel.arithmetic.softmax import exponent_bias, numerator, rescale_factor
from sparse_mla_kernel.kernels.base.layout import TILE_KEYS, SharedLayout
from sparse_mla_kernel.ptx.math import add_rn, max_f32
from sparse_mla_kernel.ptx.shared_memory import (
    load_shared_b32,
    load_shared_f32,
    store_shared_f32,
)
from sparse_mla_kernel.schedule import TILE_HEADS


@cute.jit
def store_warp_max(
    rLogit: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Store each head's largest logit among this warp's 8 keys (R4) in ``warp_max``."""
    lane = cute.arch.lane_idx()
    for half in cutlass.range_constexpr(2):
        top = max_f32(rLogit[2 * half], rLogit[2 * half + 1])  # R4
        top = max_f32(top, cute.arch.shuffle_sync_bfly(top, 1))  # R4
        top = max_f32(top, cute.arch.shuffle_sync_bfly(top, 2))  # R4
        if lane % 4 == 0:
            head = lane // 4 + 8 * half
            store_shared_f32(_slot(smem + layout.warp_max, cute.arch.warp_idx(), head), top)


@cute.jit
def raise_max(
    rMax: cute.Tensor, rAlpha: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Raise the running maximum by the chunk's (R4), and find the factor for older sums (R5).

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
            new = max_f32(new, load_shared_f32(slot))  # R4
        rMax[half] = new
        rAlpha[half] = rescale_factor(old, new)  # R5


@cute.jit
def warp_p(
    rP: cute.Tensor,
    rLogit: cute.Tensor,
    rMax: cute.Tensor,
    smem: Int32,
    half: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """P of this warp's 8 keys for one head of a lane; its FP32 sum to ``warp_sum``.

    Args:
        rP: ``[4]`` f32, out: P of this lane's two keys in the first two.
        rLogit: ``[4]`` f32, a C fragment: 16 heads x 8 keys.
        rMax: ``[2]`` f32, the running maxima of heads ``lane / 4`` and ``+ 8``.
        smem: Base address of the shared memory that ``layout`` divides.
        half: Which of the two heads.
    """
    warp = cute.arch.warp_idx()
    q = cute.arch.lane_idx() % 4
    bias = exponent_bias(rMax[half])  # R6
    for i in cutlass.range_constexpr(2):
        live = load_shared_b32(smem + layout.live + 4 * (warp * TILE_KEYS + 2 * q + i))
        rP[i] = numerator(rLogit[2 * half + i], bias, live)  # R7
    total = add_rn(rP[0], rP[1])  # R8: the pair
    total = add_rn(total, cute.arch.shuffle_sync_bfly(total, 1))  # R8: lanes xor 1
    total = add_rn(total, cute.arch.shuffle_sync_bfly(total, 2))  # R8: lanes xor 2
    if q == 0:
        head = cute.arch.lane_idx() // 4 + 8 * half
        store_shared_f32(_slot(smem + layout.warp_sum, warp, head), total)


@cute.jit
def chunk_sum(
    smem: Int32, half: cutlass.Constexpr[int], layout: cutlass.Constexpr[SharedLayout]
) -> Float32:
    """The sum of a chunk's P for one head of a lane: the warps' sums in order.

    Args:
        smem: Base address of the shared memory that ``layout`` divides.
        half: Which of heads ``lane / 4`` and ``+ 8``.
    """
    head = cute.arch.lane_idx() // 4 + 8 * half
    total = load_shared_f32(_slot(smem + layout.warp_sum, 0, head))
    for warp in cutlass.range_constexpr(1, layout.logit_warps):
        total = add_rn(total, load_shared_f32(_slot(smem + layout.warp_sum, warp, head)))  # R8
    return total


@cute.jit
def _slot(base: Int32, warp: Int32, head: Int32) -> Int32:
    """Address of ``[warp][head]`` in a table with one f32 for each warp and head."""
    return base + 4 * (warp * TILE_HEADS + head)
