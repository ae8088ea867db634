"""PV: P and V bytes to a CTA's unnormalised row (R10, R12)."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, cute

from sparse_mla_kernel.layouts import ROW_STRIDE_BYTES
from sparse_mla_kernel.low_latency.layouts import (
    HALF_COLUMNS,
    P_STRIDE_BYTES,
    STEP,
    WARP_COLUMNS,
    WARP_KEYS,
    SharedLayout,
)
from sparse_mla_kernel.primitives import (
    cvt_e4m3x4_f16x4,
    load_shared_b32,
    load_shared_f32,
    mma_f16,
    mul_rn,
    transpose4,
)

#: Tiles of 8 columns in half of a warp's columns.
HALF_TILES = 4


@cute.jit
def rescale(rAcc: cute.Tensor, smem: Int32, layout: cutlass.Constexpr[SharedLayout]) -> None:
    """Older weights shrink to the new maximum (R10).

    Args:
        rAcc: ``[4, 8]`` f32 (C fragment, tile), in and out.
    """
    heads = smem + layout.alpha + cute.arch.lane_idx() // 4 * 4
    for half in cutlass.range_constexpr(2):
        alpha = load_shared_f32(heads + 32 * half)
        for tile in cutlass.range_constexpr(2 * HALF_TILES):
            for i in cutlass.range_constexpr(2):
                rAcc[2 * half + i, tile] = mul_rn(rAcc[2 * half + i, tile], alpha)


@cute.jit
def accumulate(
    rAcc: cute.Tensor,
    smem: Int32,
    kv: Int32,
    count: Int32,
    u: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: ``acc += P @ V`` for latent columns ``64w + 32u .. + 31`` (R12).

    Multiplies 32 or 64 keys, without a branch between its steps; P and V are zero past the count.
    """
    if count > WARP_KEYS:
        _accumulate(rAcc, smem, kv, u, 2 * WARP_KEYS // STEP, layout)
    else:
        _accumulate(rAcc, smem, kv, u, WARP_KEYS // STEP, layout)


@cute.jit
def _accumulate(
    rAcc: cute.Tensor,
    smem: Int32,
    kv: Int32,
    u: cutlass.Constexpr[int],
    steps: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    lane = cute.arch.lane_idx()
    g = lane // 4
    q = lane % 4
    p = smem + layout.p + g * P_STRIDE_BYTES + 4 * q
    v = kv + 2 * q * ROW_STRIDE_BYTES + WARP_COLUMNS * cute.arch.warp_idx() + HALF_COLUMNS * u
    rP = cute.make_rmem_tensor(4, Uint32)
    for step in cutlass.range_constexpr(steps):
        words = _four_keys(v + 4 * g + STEP * step * ROW_STRIDE_BYTES)
        rP[0] = load_shared_b32(p + 2 * STEP * step)
        rP[1] = load_shared_b32(p + 2 * STEP * step + 8 * P_STRIDE_BYTES)
        rP[2] = load_shared_b32(p + 2 * STEP * step + 16)
        rP[3] = load_shared_b32(p + 2 * STEP * step + 16 + 8 * P_STRIDE_BYTES)
        for j in cutlass.range_constexpr(HALF_TILES):
            b0, b1 = cvt_e4m3x4_f16x4(words[j])
            mma_f16(rAcc[None, HALF_TILES * u + j], rP, b0, b1)


@cute.jit
def _four_keys(v: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """A word (4 columns) of keys 0, 1, 8 and 9 as a word (those keys) of each of 4 columns."""
    return transpose4(
        load_shared_b32(v),
        load_shared_b32(v + ROW_STRIDE_BYTES),
        load_shared_b32(v + 8 * ROW_STRIDE_BYTES),
        load_shared_b32(v + 9 * ROW_STRIDE_BYTES),
    )
