"""Online softmax, one number at a time: R3 and R5 to R7 of the contract."""

from __future__ import annotations

import math
import struct

from cutlass import Float32, cute

from sparse_mla_kernel.ptx.math import ex2_approx_ftz, mul_rn, sub_rn

#: log2(448) as float32 rounds it. P is scaled to 448, the largest finite E4M3 number, so that the
#: largest weight of a row keeps all bits of its quantised form. The LSE takes the scale off again.
P_SCALE_LOG2 = struct.unpack("f", struct.pack("f", math.log2(448.0)))[0]


@cute.jit
def scaled_logit(product: Float32, scale_log2: Float32, live: object) -> Float32:
    """The base-2 logit of a product of query and key; ``-inf`` where the key is masked.

    Args:
        product: Query times key.
        scale_log2: Softmax scale x tensor scales x log2(e).
        live: A word, 0 where the key is masked.
    """
    logit = mul_rn(product, scale_log2)  # R3
    return logit if live != 0 else -Float32.inf


@cute.jit
def rescale_factor(old: Float32, new: Float32) -> Float32:
    """By how much older weights shrink when the running maximum rises from ``old`` to ``new``."""
    return ex2_approx_ftz(sub_rn(old, new)) if old != -Float32.inf else Float32(1.0)  # R5


@cute.jit
def exponent_bias(new: Float32) -> Float32:
    """What is taken off a logit before EX2: the running maximum less log2(448)."""
    return sub_rn(new, Float32(P_SCALE_LOG2))  # R6


@cute.jit
def numerator(logit: Float32, bias: Float32, live: object) -> Float32:
    """P of a key, 448 where its logit is the running maximum; +0 where the key is masked.

    A masked key has the logit ``-inf`` and P = 0 even where the maximum is ``-inf`` too.

    Args:
        logit: From :func:`scaled_logit`.
        bias: From :func:`exponent_bias`.
        live: A word, 0 where the key is masked.
    """
    p = ex2_approx_ftz(sub_rn(logit, bias))  # R7
    return p if live != 0 else Float32(0.0)
