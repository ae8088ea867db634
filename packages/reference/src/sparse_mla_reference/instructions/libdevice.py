"""CUDA libdevice functions that the kernel's FP32 path uses.

>>> import numpy as np
>>> log2f(np.float32([8.0, 0.0, -1.0])).tolist()
[3.0, -inf, nan]
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.instructions.float32 import as_float32, canonical
from sparse_mla_reference.instructions.fma import fma

# Horner coefficients of __nv_log2f, highest power first, as float32 bits.
_LOG2_COEFFICIENTS = np.array(
    [
        0x3DC6B27F, 0xBE2C7F30, 0x3E2FCF2A, 0xBE374E43, 0x3E520BF4,
        0xBE763C8B, 0x3E93BF99, 0xBEB8AA49, 0x3EF6384A, 0xBF38AA3B,
    ],
    np.uint32,
).view(np.float32)  # fmt: skip
_LOG2_E = np.uint32(0x3FB8AA3B).view(np.float32)
_SQRT_HALF_BITS = 0x3F3504F3


@np.errstate(all="ignore")
def log2f(x: NDArray[Any]) -> NDArray[np.float32]:
    """libdevice ``__nv_log2f`` without ftz or fast math: what ``log2`` compiles to.

    x = 2^k * (1 + m) with 1 + m in [sqrt(1/2), sqrt(2)); the result is
    k + (m * (m * p(m)) + m * log2(e)), p by Horner with FMAs. Within 1 ULP.

    Args:
        x: float32 array, any shape.

    Returns:
        float32 array. +-0 gives -inf, +inf gives +inf, negative or NaN gives 0x7FFFFFFF.

    Raises:
        TypeError: ``x`` is not float32.

    Source: the PTX of libdevice (CUDA toolkit), as emitted for ``log2.f32``.
    """
    x = as_float32("x", x)
    subnormal = x < np.float32(2.0**-126)
    scaled = np.where(subnormal, x * np.float32(2.0**23), x)
    bias = np.where(subnormal, np.float32(-23), np.float32(0))
    bits = np.asarray(scaled).view(np.int32).astype(np.int64)
    k = ((bits - _SQRT_HALF_BITS) & 0xFF800000).astype(np.uint32).view(np.int32)
    mantissa = (bits - k).astype(np.int64).astype(np.uint32).view(np.float32)
    m = mantissa - np.float32(1)
    exponent = fma(k.astype(np.float32), np.float32(2.0**-23), bias)
    p = np.full_like(m, _LOG2_COEFFICIENTS[0])
    for coefficient in _LOG2_COEFFICIENTS[1:]:
        p = fma(p, m, coefficient)
    q = m * (m * p)
    result = np.add(exponent, fma(m, _LOG2_E, q))
    special = np.asarray(scaled).view(np.uint32) >= 0x7F800000
    result = np.where(special, fma(scaled, np.float32(np.inf), np.float32(np.inf)), result)
    return canonical(np.where(x == 0, np.float32(-np.inf), result))
