"""Online softmax of one chunk: quarter sums to P, running maximum and row sum (R2 to R9, R11).

A warp has ``2 tiles`` heads. A reduction over its lanes halves the heads that a lane has as it
goes: after it, lane ``l`` has the head ``own_head(l)`` alone.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute

from sparse_mla_kernel.arithmetic.softmax import (
    exponent_bias,
    numerator,
    rescale_factor,
    scaled_logit,
)
from sparse_mla_kernel.kernels.low_latency.layout import (
    BUFFERS,
    CHUNK,
    LOGIT_STRIDE_BYTES,
    PAIR_BYTES,
    PAIR_KEYS,
    QUARTERS,
    STEP,
    WARPS,
    SharedLayout,
)
from sparse_mla_kernel.ptx.cluster import map_shared, store_async_f32x2
from sparse_mla_kernel.ptx.convert import cvt_e4m3x4
from sparse_mla_kernel.ptx.math import add_rn, fma_rn, max_f32
from sparse_mla_kernel.ptx.shared_memory import load_shared_b32x2, load_shared_f32x2


def softmax_registers(layout: SharedLayout) -> tuple[cute.Tensor, ...]:
    """What a warp's softmax has in registers: P, maxima, alphas, chunk sums, logits, live keys.

    The maxima are ``-inf``; :func:`load_logits` and :func:`chunk_p` describe each of them.
    """
    heads = 2 * layout.tiles
    rMax = cute.make_rmem_tensor(heads, Float32)
    rMax.fill(-Float32.inf)
    return (
        cute.make_rmem_tensor(layout.tiles, Uint32),
        rMax,
        cute.make_rmem_tensor(heads, Float32),
        cute.make_rmem_tensor(heads, Float32),
        cute.make_rmem_tensor((2, heads), Float32),
        cute.make_rmem_tensor(2, Uint32),
    )


@cute.jit
def own_head(layout: cutlass.Constexpr[SharedLayout]) -> Int32:
    """Which of its warp's heads this lane has after a reduction."""
    lane = cute.arch.lane_idx()
    if const_expr(layout.tiles == 1):
        return lane % 2
    return lane % 2 * 2 + lane // 2 % 2


@cute.jit
def of_own_head(values: cute.Tensor, layout: cutlass.Constexpr[SharedLayout]) -> Float32:
    """The value of :func:`own_head`, out of one for each of the warp's heads."""
    lane = cute.arch.lane_idx()
    upper = lane % 2 != 0
    value = values[0]
    if const_expr(layout.tiles == 1):
        value = values[1] if upper else values[0]
    else:
        low = values[2] if upper else values[0]
        high = values[3] if upper else values[1]
        value = high if lane // 2 % 2 != 0 else low
    return value


@cute.jit
def _reduce(
    rValues: cute.Tensor,
    adds: cutlass.Constexpr[bool],
    layout: cutlass.Constexpr[SharedLayout],
) -> Float32:
    """Sum or maximum over the lanes, as a balanced tree: lanes xor 1, 2, 4, 8, 16.

    Args:
        rValues: ``[2 tiles]`` f32, one for each of the warp's heads; used up.
        adds: Whether to sum.

    Returns:
        The result of :func:`own_head`.
    """
    lane = cute.arch.lane_idx()
    for k in cutlass.range_constexpr(5):
        having = max(2 * layout.tiles >> k, 1)
        if const_expr(having > 1):
            upper = lane // (1 << k) % 2 != 0
            for h in cutlass.range_constexpr(having // 2):
                low, high = rValues[h], rValues[h + having // 2]
                kept = high if upper else low
                sent = low if upper else high
                rValues[h] = _combine(kept, cute.arch.shuffle_sync_bfly(sent, 1 << k), adds)
        else:
            other = cute.arch.shuffle_sync_bfly(rValues[0], 1 << k)
            rValues[0] = _combine(rValues[0], other, adds)
    return rValues[0]


@cute.jit
def _combine(a: Float32, b: Float32, adds: cutlass.Constexpr[bool]) -> Float32:
    return add_rn(a, b) if const_expr(adds) else max_f32(a, b)


@cute.jit
def _lane_of(h: cutlass.Constexpr[int], layout: cutlass.Constexpr[SharedLayout]) -> int:
    """The first lane whose own head is ``h``."""
    return h if layout.tiles == 1 else h // 2 + 2 * (h % 2)


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
                rS[i, h] = add_rn(rS[i, h], more[i])


@cute.jit
def chunk_p(
    rP: cute.Tensor,
    rMax: cute.Tensor,
    rAlpha: cute.Tensor,
    rChunkSum: cute.Tensor,
    rS: cute.Tensor,
    rLive: cute.Tensor,
    scale_log2: Float32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w, head h of its own: P of this lane's two keys, and by how much older sums shrink.

    A key that is not live has the logit ``-inf`` and P = 0 even where the maximum is ``-inf`` too.

    Args:
        rP: ``[tiles]`` words, out: P as E4M3, of two keys of head ``16m + w``, then of ``16m + w +
            8``.
        rMax: ``[2 tiles]`` f32 a head, in and out; starts at ``-inf``.
        rAlpha: ``[2 tiles]`` f32, out: ``exp2(m_old - m_new)``, 1 where ``m_old`` is ``-inf``.
        rChunkSum: ``[2 tiles]`` f32, out: the lane's pair of P, summed (the first step of R8).
        rS: From :func:`load_logits`; used up.
        rLive: From there.
        scale_log2: Softmax scale x tensor scales x log2(e).
    """
    heads = 2 * layout.tiles
    rTop = cute.make_rmem_tensor(heads, Float32)
    for h in cutlass.range_constexpr(heads):
        for i in cutlass.range_constexpr(2):
            rS[i, h] = scaled_logit(rS[i, h], scale_log2, rLive[i])  # R3
        rTop[h] = max_f32(rS[0, h], rS[1, h])
    top = _reduce(rTop, False, layout)  # R4
    for h in cutlass.range_constexpr(heads):
        old = rMax[h]
        new = max_f32(old, cute.arch.shuffle_sync(top, _lane_of(h, layout)))
        rMax[h] = new
        rAlpha[h] = rescale_factor(old, new)  # R5
        bias = exponent_bias(new)  # R6
        for i in cutlass.range_constexpr(2):
            rS[i, h] = numerator(rS[i, h], bias, rLive[i])  # R7
        rChunkSum[h] = add_rn(rS[0, h], rS[1, h])  # R8: the pair
    for m in cutlass.range_constexpr(layout.tiles):
        rP[m] = cvt_e4m3x4(rS[0, 2 * m], rS[1, 2 * m], rS[0, 2 * m + 1], rS[1, 2 * m + 1])  # R11


@cute.jit
def raised_sum(
    own_sum: Float32,
    rAlpha: cute.Tensor,
    rChunkSum: cute.Tensor,
    layout: cutlass.Constexpr[SharedLayout],
) -> Float32:
    """The own head's running row sum with the chunk taken in: the lanes (R8), then ``fma`` (R9).

    Args:
        own_sum: The sum of :func:`own_head` before; 0 at the start.
        rAlpha: From :func:`chunk_p`.
        rChunkSum: From :func:`chunk_p`; used up.
    """
    chunk_sum = _reduce(rChunkSum, True, layout)
    return fma_rn(own_sum, of_own_head(rAlpha, layout), chunk_sum)


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
        rP: From :func:`chunk_p`.

    Returns:
        ``(offset, low, high)``: bytes from the CTA's first vector, and one or two words.
    """
    lane = cute.arch.lane_idx()
    upper = lane // 4 % 2
    slot = 16 * (4 * cute.arch.warp_idx() + lane % 4) + 8 * (lane // 8 % 2)
    offset = lane // STEP * PAIR_BYTES + slot
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
def push_stats(
    rMax: cute.Tensor,
    own_sum: Float32,
    smem: Int32,
    cta: Int32,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w: the maximum and the sum of its heads to every CTA of the split, itself included.

    Args:
        rMax: ``[2 tiles]`` f32, the warp's heads.
        own_sum: The lane's own head's sum.
        smem: Base address of the shared memory that ``layout`` divides.
        cta: This CTA's place in the split.
    """
    own_max = of_own_head(rMax, layout)
    peer = cute.arch.lane_idx() // (2 * layout.tiles)
    if peer < layout.split:
        head = cute.arch.warp_idx() + WARPS * own_head(layout)
        stats = smem + layout.stats + 8 * (cta * layout.heads + head)
        barrier = map_shared(smem + layout.stats_barrier, peer)
        store_async_f32x2(map_shared(stats, peer), own_max, own_sum, barrier)
