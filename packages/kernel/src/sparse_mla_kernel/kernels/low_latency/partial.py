"""PV of a CTA's own keys: P and V bytes to its unnormalised rows (R10 to R12)."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from sparse_mla_kernel.kernels.base.layout import ROW_STRIDE_BYTES
from sparse_mla_kernel.kernels.low_latency.layout import (
    BUFFERS,
    CHUNK,
    PAIR_BYTES,
    PAIR_KEYS,
    UNIT_COLUMNS,
    WARP_COLUMNS,
    WARPS,
    SharedLayout,
)
from sparse_mla_kernel.kernels.low_latency.softmax import fragment_bytes, of_own_head, own_head
from sparse_mla_kernel.ptx.convert import cvt_e4m3x4_f16x4, prmt
from sparse_mla_kernel.ptx.math import mul_rn
from sparse_mla_kernel.ptx.mma import mma_f16
from sparse_mla_kernel.ptx.shared_memory import (
    load_matrices_transposed,
    load_shared_b32x4,
    load_shared_f32,
    store_shared_b32,
    store_shared_b32x2,
    store_shared_f32,
)

#: Pairs of steps, of 32 keys, in a chunk.
PAIRS = CHUNK // PAIR_KEYS


@cute.jit
def store_p(
    rP: cute.Tensor,
    rAlpha: cute.Tensor,
    smem: Int32,
    chunk: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: P of its heads to ``p``, by how much their older weights shrink to ``alpha``.

    Args:
        rP: From ``chunk_p``.
        rAlpha: From ``chunk_p``.
        smem: Base address of the shared memory that ``layout`` divides.
        chunk: The chunk's number.
    """
    offset, low, high = fragment_bytes(rP, layout)
    vectors = smem + layout.p + chunk % 2 * (layout.heads * CHUNK)
    if const_expr(layout.tiles == 1):
        store_shared_b32(vectors + offset, Int32(low))
    else:
        store_shared_b32x2(vectors + offset, low, high)
    alpha = of_own_head(rAlpha, layout)
    if cute.arch.lane_idx() < 2 * layout.tiles:
        head = cute.arch.warp_idx() + WARPS * own_head(layout)
        store_shared_f32(smem + layout.alpha + 4 * (chunk % 2 * layout.heads + head), alpha)


@cute.jit
def rescale(
    rAcc: cute.Tensor, smem: Int32, chunk: Int32, layout: cutlass.Constexpr[SharedLayout]
) -> None:
    """Older weights shrink to the new maximum (R10); at the first chunk 0 stays 0.

    Args:
        rAcc: ``[4, 8, tiles]`` f32 (C fragment, 8 columns, 16 heads), in and out.
        smem: Base address of the shared memory that ``layout`` divides.
        chunk: The chunk's number.
    """
    alphas = smem + layout.alpha + 4 * (chunk % 2 * layout.heads + cute.arch.lane_idx() // 4)
    for m in cutlass.range_constexpr(layout.tiles):
        for r in cutlass.range_constexpr(2):
            alpha = load_shared_f32(alphas + 4 * (16 * m + 8 * r))
            for tile in cutlass.range_constexpr(WARP_COLUMNS // 8):
                for k in cutlass.range_constexpr(2 * r, 2 * r + 2):
                    rAcc[k, tile, m] = mul_rn(rAcc[k, tile, m], alpha)


@cute.jit
def p_fragments(
    rP: cute.Tensor,
    vectors: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """A fragments of 32 keys, out of their bytes.

    Args:
        rP: ``[4, 2, tiles]`` words of two FP16 (A fragment, step, 16 heads), out.
        vectors: Address of the keys' vectors of the first 16 heads.
    """
    for m in cutlass.range_constexpr(layout.tiles):
        words = load_shared_b32x4(vectors + PAIRS * PAIR_BYTES * m + 16 * cute.arch.lane_idx())
        for step in cutlass.range_constexpr(2):
            rP[0, step, m], rP[1, step, m] = cvt_e4m3x4_f16x4(words[2 * step])
            rP[2, step, m], rP[3, step, m] = cvt_e4m3x4_f16x4(words[2 * step + 1])


@cute.jit
def multiply_unit(
    rEven: cute.Tensor,
    rOdd: cute.Tensor,
    rP: cute.Tensor,
    v: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """``acc += P @ V`` of 32 keys and 16 columns (R12).

    Args:
        rEven: ``[4, tiles]`` f32 (C fragment, 16 heads) of the even columns, in and out.
        rOdd: The odd columns.
        rP: From :func:`p_fragments`.
        v: In lane ``l``, the address of key ``l``'s 16 bytes of V.
    """
    pairs = load_matrices_transposed(v)
    for step in cutlass.range_constexpr(2):
        # Two columns of keys 2q, 2q + 1 and of 2q + 8, 2q + 9: one column of all four.
        a0, a1 = cvt_e4m3x4_f16x4(prmt(pairs[2 * step], pairs[2 * step + 1], 0x6420))
        b0, b1 = cvt_e4m3x4_f16x4(prmt(pairs[2 * step], pairs[2 * step + 1], 0x7531))
        for m in cutlass.range_constexpr(layout.tiles):
            mma_f16(rEven[None, m], rP[None, step, m], a0, a1)
            mma_f16(rOdd[None, m], rP[None, step, m], b0, b1)


@cute.jit
def accumulate(
    rAcc: cute.Tensor,
    smem: Int32,
    chunk: Int32,
    pair: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: ``acc += P @ V`` of the keys ``32 pair ..`` for latent columns ``64w .. 64w + 63``.

    Args:
        rAcc: ``[4, 8, tiles]`` f32 (C fragment, 8 columns, 16 heads), in and out.
        smem: Base address of the shared memory that ``layout`` divides.
        chunk: The chunk's number.
        pair: Which 32 keys; P and V are zero past the count.
    """
    key = chunk % BUFFERS * CHUNK + PAIR_KEYS * pair + cute.arch.lane_idx()
    v = smem + layout.keys + key * ROW_STRIDE_BYTES + WARP_COLUMNS * cute.arch.warp_idx()
    rP = cute.make_rmem_tensor((4, 2, layout.tiles), Uint32)
    vectors = smem + layout.p + chunk % 2 * (layout.heads * CHUNK) + PAIR_BYTES * pair
    p_fragments(rP, vectors, layout)
    for u in cutlass.range_constexpr(WARP_COLUMNS // UNIT_COLUMNS):
        even, odd = rAcc[None, 2 * u, None], rAcc[None, 2 * u + 1, None]
        multiply_unit(even, odd, rP, v + UNIT_COLUMNS * u, layout)
