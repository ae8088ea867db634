"""Online softmax of one chunk: quarter sums to P, running maximum and row sum (R2 to R9, R11).

A warp has ``2 tiles`` heads. Each step of a reduction over its lanes halves the number of heads
that a lane has. At the end lane ``l`` has only the head ``own_head(l)``.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute

from sparse_mla_kernel.arithmetic.softmax import exponent_bias, numerator, rescale_factor
from sparse_mla_kernel.kernels.low_latency.layout import SharedLayout
from sparse_mla_kernel.ptx.math import add_rn, max_f32


def softmax_registers(layout: SharedLayout) -> tuple[cute.Tensor, ...]:
    """The registers of a warp's softmax: P's bytes, maxima, alphas, chunk sums, logits, live.

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
    """Which head of its warp this lane has after a reduction."""
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
def chunk_p(
    rMax: cute.Tensor,
    rAlpha: cute.Tensor,
    rChunkSum: cute.Tensor,
    rS: cute.Tensor,
    rLive: cute.Tensor,
    layout: cutlass.Constexpr[SharedLayout],
) -> None:
    """Warp w, head h of its own: P of this lane's two keys, and by how much older sums shrink.

    A key that is not live has the logit ``-inf`` and P = 0 even where the maximum is ``-inf`` too.

    Args:
        rMax: ``[2 tiles]`` f32 a head, in and out; starts at ``-inf``.
        rAlpha: ``[2 tiles]`` f32, out: ``exp2(m_old - m_new)``, 1 where ``m_old`` is ``-inf``.
        rChunkSum: ``[2 tiles]`` f32, out: the lane's pair of P, summed (the first step of R8).
        rS: ``[2, 2 tiles]`` f32 (key, head): logits in, P out.
        rLive: ``[2]`` words: whether the keys count.
    """
    heads = 2 * layout.tiles
    rTop = cute.make_rmem_tensor(heads, Float32)
    for h in cutlass.range_constexpr(heads):
        rTop[h] = max_f32(rS[0, h], rS[1, h])  # R4
    top = _reduce(rTop, False, layout)  # R4
    for h in cutlass.range_constexpr(heads):
        old = rMax[h]
        new = max_f32(old, cute.arch.shuffle_sync(top, _lane_of(h, layout)))  # R4
        rMax[h] = new
        rAlpha[h] = rescale_factor(old, new)  # R5
        bias = exponent_bias(new)  # R6
        for i in cutlass.range_constexpr(2):
            rS[i, h] = numerator(rS[i, h], bias, rLive[i])  # R7
        rChunkSum[h] = add_rn(rS[0, h], rS[1, h])  # R8: the pair


@cute.jit
def chunk_sum(rChunkSum: cute.Tensor, layout: cutlass.Constexpr[SharedLayout]) -> Float32:
    """The sum of a chunk's P of the own head, over the lanes.

    Args:
        rChunkSum: From :func:`chunk_p`; used up.
    """
    return _reduce(rChunkSum, True, layout)  # R8
