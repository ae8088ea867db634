"""Log-sum-exp of a merged row, and its normalised output (R14, R15)."""

from __future__ import annotations

import math
import struct

import cutlass
from cutlass import Float32, Uint32, cute

from sparse_mla_kernel.kernels.base.softmax import P_SCALE_LOG2
from sparse_mla_kernel.ptx.convert import cvt_bf16x2
from sparse_mla_kernel.ptx.math import add_rn, div_rn, mul_rn, sub_rn

#: ln(2) as float32 rounds it: base-2 LSE to natural.
LN2 = struct.unpack("f", struct.pack("f", math.log(2.0)))[0]


@cute.jit
def lse_log2(top: Float32, total: Float32) -> Float32:
    """Base-2 LSE of a row: ``(top - log2 448) + log2(total)``; ``-inf`` where there are no keys."""
    unscaled = sub_rn(top, Float32(P_SCALE_LOG2))
    lse = add_rn(unscaled, cute.math.log2(total))
    return lse if total != 0.0 else -Float32.inf


@cute.jit
def lse_nat(lse2: Float32) -> Float32:
    """Base-2 LSE to natural LSE, one multiplication."""
    return mul_rn(lse2, Float32(LN2))


@cute.jit
def normalise(rRow: cute.Tensor, total: Float32, out_scale: Float32) -> tuple[Uint32, Uint32]:
    """Four columns as two words of BF16 pairs: ``row x (out_scale / total)``; 0 without keys."""
    inverse = div_rn(out_scale, total)
    for i in cutlass.range_constexpr(4):
        value = mul_rn(rRow[i], inverse)
        rRow[i] = value if total != 0.0 else Float32(0.0)
    return cvt_bf16x2(rRow[0], rRow[1]), cvt_bf16x2(rRow[2], rRow[3])
