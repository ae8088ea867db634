"""PV: P and V bytes to a CTA's unnormalised row, and the row sum beside it (R9 to R12)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from sparse_mla_kernel.kernels.base.layout import (
    MMA_K,
    PV_TILES,
    ROW_STRIDE_BYTES,
    TILE_KEYS,
    WARP_COLUMNS,
    SharedLayout,
)
from sparse_mla_kernel.kernels.base.softmax import chunk_sum, warp_p
from sparse_mla_kernel.ptx.convert import transpose4
from sparse_mla_kernel.ptx.math import fma_rn, mul_rn
from sparse_mla_kernel.ptx.mma import mma_e4m3
from sparse_mla_kernel.ptx.shared_memory import load_shared_b32, store_fp8_pair_shared


@cute.jit
def store_p(
    rLogit: cute.Tensor, rMax: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Store P of this warp's 8 keys: its FP32 sum in ``warp_sum``, its E4M3 bytes in ``p``."""
    lane = cute.arch.lane_idx()
    rP = cute.make_rmem_tensor(4, Float32)
    for half in cutlass.range_constexpr(2):
        warp_p(rP, rLogit, rMax, smem, half, layout)
        row = smem + layout.p + (lane // 4 + 8 * half) * layout.p_stride_bytes
        key = cute.arch.warp_idx() * TILE_KEYS + 2 * (lane % 4)
        store_fp8_pair_shared(row + key, rP[0], rP[1])  # R11


@cute.jit
def raise_sum(
    rSum: cute.Tensor, rAlpha: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Add the chunk to the running row sum.

    Args:
        rSum: ``[2]`` f32, in and out, heads ``lane / 4`` and ``+ 8``; starts at 0.
        rAlpha: ``[2]`` f32, by how much older weights shrink.
        smem: Base address of the shared memory that ``layout`` divides.
    """
    for half in cutlass.range_constexpr(2):
        rSum[half] = fma_rn(rSum[half], rAlpha[half], chunk_sum(smem, half, layout))  # R9


@cute.jit
def rescale(rAcc: cute.Tensor, rAlpha: cute.Tensor) -> None:
    """Rescale the accumulators to the new maximum.

    Args:
        rAcc: ``[4, 4]`` f32 (C fragment, MMA), in and out.
        rAlpha: ``[2]`` f32, heads ``lane / 4`` and ``+ 8``.
    """
    for tile in cutlass.range_constexpr(PV_TILES):
        for i in cutlass.range_constexpr(4):
            rAcc[i, tile] = mul_rn(rAcc[i, tile], rAlpha[i // 2])  # R10


@cute.jit
def accumulate(
    rAcc: cute.Tensor, smem: Int32, count: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Warp w adds ``P @ V`` for latent columns ``32w .. 32w + 31``, in steps of 32 keys."""
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
                mma_e4m3(rAcc[None, tile], rA, low[tile], high[tile])  # R12


@cute.jit
def _four_keys(v: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Turn a word (4 columns) of each of 4 keys into a word (4 keys) of each of 4 columns."""
    return transpose4(
        load_shared_b32(v),
        load_shared_b32(v + ROW_STRIDE_BYTES),
        load_shared_b32(v + 2 * ROW_STRIDE_BYTES),
        load_shared_b32(v + 3 * ROW_STRIDE_BYTES),
    )
