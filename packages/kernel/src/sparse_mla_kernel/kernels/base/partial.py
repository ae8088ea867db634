"""PV: P bytes and V bytes to a CTA's unnormalised row (R10, R12)."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, cute

from sparse_mla_kernel.kernels.base.layout import (
    MMA_K,
    PV_TILES,
    ROW_STRIDE_BYTES,
    WARP_COLUMNS,
    SharedLayout,
)
from sparse_mla_kernel.ptx.convert import transpose4
from sparse_mla_kernel.ptx.math import mul_rn
from sparse_mla_kernel.ptx.mma import mma_e4m3
from sparse_mla_kernel.ptx.shared_memory import load_shared_b32


@cute.jit
def rescale(rAcc: cute.Tensor, rAlpha: cute.Tensor) -> None:
    """Older weights shrink to the new maximum (R10).

    Args:
        rAcc: ``[4, 4]`` f32 (C fragment, MMA), in and out.
        rAlpha: ``[2]`` f32, heads ``lane / 4`` and ``+ 8``.
    """
    for tile in cutlass.range_constexpr(PV_TILES):
        for i in cutlass.range_constexpr(4):
            rAcc[i, tile] = mul_rn(rAcc[i, tile], rAlpha[i // 2])


@cute.jit
def accumulate(
    rAcc: cute.Tensor, smem: Int32, count: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Warp w: ``acc += P @ V`` for latent columns ``32w .. 32w + 31``, 32 keys a step (R12)."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()
    g = lane // 4
    q = lane % 4
    p = smem + layout.p + g * layout.p_stride_bytes + 4 * q
    v = smem + layout.kv + 4 * q * ROW_STRIDE_BYTES + warp * WARP_COLUMNS + 4 * g
    rA = cute.make_rmem_tensor(4, Uint32)
    for step in cutlass.range_constexpr(layout.schedule.chunk // MMA_K):
        if step * MMA_K < count:
            rA[0] = load_shared_b32(p + step * MMA_K)
            rA[1] = load_shared_b32(p + step * MMA_K + 8 * layout.p_stride_bytes)
            rA[2] = load_shared_b32(p + step * MMA_K + 16)
            rA[3] = load_shared_b32(p + step * MMA_K + 16 + 8 * layout.p_stride_bytes)
            low = _four_keys(v + step * MMA_K * ROW_STRIDE_BYTES)
            high = _four_keys(v + (step * MMA_K + 16) * ROW_STRIDE_BYTES)
            for tile in cutlass.range_constexpr(PV_TILES):
                mma_e4m3(rAcc[None, tile], rA, low[tile], high[tile])


@cute.jit
def _four_keys(v: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """One word (4 columns) of each of 4 keys, as one word (4 keys) of each of 4 columns."""
    return transpose4(
        load_shared_b32(v),
        load_shared_b32(v + ROW_STRIDE_BYTES),
        load_shared_b32(v + 2 * ROW_STRIDE_BYTES),
        load_shared_b32(v + 3 * ROW_STRIDE_BYTES),
    )
