"""PV of a CTA's own keys: P and V bytes to its unnormalised rows (R10 to R12)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute

from sparse_mla_kernel.kernels.base.layout import ROW_STRIDE_BYTES
from sparse_mla_kernel.kernels.low_latency.layout import (
    BUFFERS,
    CHUNK,
    MMA_K,
    PAIR_BYTES,
    PAIR_KEYS,
    UNIT_COLUMNS,
    WARP_COLUMNS,
    WARPS,
    SharedLayout,
)
from sparse_mla_kernel.kernels.low_latency.softmax import chunk_sum, of_own_head, own_head
from sparse_mla_kernel.ptx.convert import cvt_e4m3x4, cvt_e4m3x4_f16x4, prmt
from sparse_mla_kernel.ptx.math import fma_rn, mul_rn
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
def quantise_p(rP: cute.Tensor, rS: cute.Tensor, layout: cutlass.Constexpr[SharedLayout]) -> None:
    """P of a lane's two keys as E4M3 bytes.

    Args:
        rP: ``[tiles]`` words, out: the bytes of two keys of head ``16m + w``, then of ``16m + w +
            8``.
        rS: ``[2, 2 tiles]`` f32 (key, head): P.
    """
    for m in cutlass.range_constexpr(layout.tiles):
        rP[m] = cvt_e4m3x4(rS[0, 2 * m], rS[1, 2 * m], rS[0, 2 * m + 1], rS[1, 2 * m + 1])  # R11


@cute.jit
def fragment_bytes(
    rP: cute.Tensor, layout: cutlass.Constexpr[SharedLayout]
) -> tuple[Int32, Uint32, Uint32]:
    """Where this lane's P belongs among the bytes of A fragments, and what it stores there.

    Of a vector of 16 bytes, a lane's fragments of 32 keys, byte ``8b + 4u + 2r + i`` is row ``g +
    8r``, key ``16b + 8u + 2q + i``. Softmax leaves a lane its two keys of rows ``w`` and ``w + 8``
    of each tile: 4 bytes. Where there are two tiles, two lanes swap, so that each has 8 bytes of
    one.

    Args:
        rP: From :func:`quantise_p`.

    Returns:
        ``(offset, low, high)``: bytes from the CTA's first vector, and one or two words.
    """
    lane = cute.arch.lane_idx()
    upper = lane // 4 % 2
    slot = 16 * (4 * cute.arch.warp_idx() + lane % 4) + 8 * (lane // 8 % 2)
    offset = lane // MMA_K * PAIR_BYTES + slot
    low, high = rP[0], rP[0]
    if const_expr(layout.tiles == 1):
        offset += 4 * upper
    else:
        sent = rP[1] if upper == 0 else rP[0]
        got = Uint32(cute.arch.shuffle_sync_bfly(sent, 4))
        low = rP[0] if upper == 0 else got
        high = got if upper == 0 else rP[1]
        offset += upper * (CHUNK // PAIR_KEYS * PAIR_BYTES)
    return offset, low, high


@cute.jit
def raised_sum(
    own_sum: Float32,
    rAlpha: cute.Tensor,
    rChunkSum: cute.Tensor,
    layout: cutlass.Constexpr[SharedLayout],
) -> Float32:
    """The running row sum of the lane's own head after the chunk.

    Args:
        own_sum: The sum of ``own_head`` before; 0 at the start.
        rAlpha: From ``chunk_p``.
        rChunkSum: From ``chunk_p``; used up.
    """
    of_chunk = chunk_sum(rChunkSum, layout)
    return fma_rn(own_sum, of_own_head(rAlpha, layout), of_chunk)  # R9


@cute.jit
def store_p(
    rP: cute.Tensor,
    rAlpha: cute.Tensor,
    smem: Int32,
    chunk: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w stores P of its heads in ``p``, and the factors for older weights in ``alpha``.

    Args:
        rP: From :func:`quantise_p`.
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
    """Rescale the accumulators to the new maximum (R10); at the first chunk 0 stays 0.

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
                    rAcc[k, tile, m] = mul_rn(rAcc[k, tile, m], alpha)  # R10


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
            mma_f16(rEven[None, m], rP[None, step, m], a0, a1)  # R12
            mma_f16(rOdd[None, m], rP[None, step, m], b0, b1)  # R12


@cute.jit
def accumulate(
    rAcc: cute.Tensor,
    smem: Int32,
    chunk: Int32,
    pair: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w adds ``P @ V`` of the keys ``32 pair ..`` for latent columns ``64w .. 64w + 63``.

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
