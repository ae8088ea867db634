"""QK: query bytes and key bytes to scaled logits (R1 to R3)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from sparse_mla_kernel.arithmetic.softmax import scaled_logit
from sparse_mla_kernel.kernels.base.layout import MMA_K, ROW_STRIDE_BYTES, TILE_KEYS, SharedLayout
from sparse_mla_kernel.ptx.math import add_rn
from sparse_mla_kernel.ptx.mma import mma_e4m3
from sparse_mla_kernel.ptx.shared_memory import load_shared_b32
from sparse_mla_kernel.schedule import ROW_COLUMNS


@cute.jit
def scaled_logits(
    rLogit: cute.Tensor,
    smem: Int32,
    count: Int32,
    scale_log2: Float32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: base-2 logits of keys ``8w .. 8w + 7``; ``-inf`` for a key that is not live.

    Args:
        rLogit: ``[4]`` f32, out: a C fragment, 16 heads x 8 keys.
        smem: Base address of the shared memory that ``layout`` divides.
        count: Keys in the chunk; a warp that has none of them multiplies nothing.
        scale_log2: Softmax scale x tensor scales x log2(e).
    """
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()
    g = lane // 4
    q = lane % 4
    if warp * TILE_KEYS < count:
        _qk(
            rLogit,
            smem + layout.query,
            smem + layout.kv + warp * TILE_KEYS * ROW_STRIDE_BYTES,
            g * ROW_STRIDE_BYTES + 4 * q,
            layout.schedule.qk_chains,
        )
    first_key = warp * TILE_KEYS + 2 * q
    for i in cutlass.range_constexpr(2):
        live = load_shared_b32(smem + layout.live + 4 * (first_key + i))
        for half in cutlass.range_constexpr(2):
            rLogit[2 * half + i] = scaled_logit(rLogit[2 * half + i], scale_log2, live)  # R3


@cute.jit
def _qk(
    rLogit: cute.Tensor,
    query: Int32,
    keys: Int32,
    lane_offset: Int32,
    chains: cutlass.Constexpr[int],
) -> None:
    """18 steps of 32 columns into ``chains`` accumulators, which are added in chain order."""
    rChain = cute.make_rmem_tensor((4, chains), Float32)
    rChain.fill(0.0)
    rA = cute.make_rmem_tensor(4, Uint32)
    for step in cutlass.range_constexpr(ROW_COLUMNS // MMA_K):
        a = query + lane_offset + step * MMA_K
        b = keys + lane_offset + step * MMA_K
        rA[0] = load_shared_b32(a)
        rA[1] = load_shared_b32(a + 8 * ROW_STRIDE_BYTES)
        rA[2] = load_shared_b32(a + 16)
        rA[3] = load_shared_b32(a + 8 * ROW_STRIDE_BYTES + 16)
        b0, b1 = load_shared_b32(b), load_shared_b32(b + 16)
        mma_e4m3(rChain[None, step % chains], rA, b0, b1)  # R1
    for i in cutlass.range_constexpr(4):
        total = rChain[i, 0]
        for chain in cutlass.range_constexpr(1, chains):
            total = add_rn(total, rChain[i, chain])  # R2
        rLogit[i] = total
