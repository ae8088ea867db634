"""The end of a row: its log-sum-exp (R14) and its normalised output (R15)."""

from __future__ import annotations

import math
import struct

import cutlass
from cutlass import Float32, Uint32, cute

from sparse_mla_kernel.arithmetic.softmax import P_SCALE_LOG2
from sparse_mla_kernel.ptx.convert import cvt_bf16x2
from sparse_mla_kernel.ptx.math import add_rn, div_rn, mul_rn, sub_rn

#: ln(2) as float32 rounds it: base-2 LSE to natural.
LN2 = struct.unpack("f", struct.pack("f", math.log(2.0)))[0]


@cute.jit
def lse_log2(top: Float32, total: Float32) -> Float32:
    """Base-2 LSE of a row: ``(top - log2 448) + log2(total)``; ``-inf`` where there are no keys."""
    unscaled = sub_rn(top, Float32(P_SCALE_LOG2))  # R14
    lse = add_rn(unscaled, cute.math.log2(total))  # R14
    return lse if total != 0.0 else -Float32.inf


@cute.jit
def lse_nat(lse2: Float32) -> Float32:
    """Base-2 LSE to natural LSE, one multiplication."""
    return mul_rn(lse2, Float32(LN2))  # R14


@cute.jit
def output_factor(total: Float32, out_scale: Float32) -> Float32:
    """What an unnormalised row is multiplied by: ``out_scale / total``."""
    return div_rn(out_scale, total)  # R15


@cute.jit
def normalise(rRow: cute.Tensor, total: Float32, factor: Float32) -> tuple[Uint32, Uint32]:
    """Four columns of a head as two words of BF16 pairs.

    Args:
        rRow: ``[4]`` f32, the unnormalised columns; used up.
        total: The head's row sum; 0 where there are no keys, whose row is 0.
        factor: From :func:`output_factor`.
    """
    for i in cutlass.range_constexpr(4):
        value = mul_rn(rRow[i], factor)  # R15
        rRow[i] = value if total != 0.0 else Float32(0.0)
    return cvt_bf16x2(rRow[0], rRow[1]), cvt_bf16x2(rRow[2], rRow[3])  # R15
