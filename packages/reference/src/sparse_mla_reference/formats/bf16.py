"""BF16: rounding to nearest even, as ``cvt.rn.bf16x2.f32`` does it.

>>> import numpy as np
>>> encode(np.float32([1.0, 1.00390625, np.nan])).view(np.uint16).tolist()
[16256, 16256, 32767]
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.formats import minifloat
from sparse_mla_reference.formats.minifloat import Rounding


def encode(x: NDArray[Any], *, rounding: Rounding = "rn", saturate: bool = False) -> NDArray[Any]:
    """Round to BF16.

    Args:
        x: float32 or float64 array, any shape. A float64 is rounded once.
        rounding: ``"rn"`` ties to even (the hardware's), or ``"rz"`` toward zero.
        saturate: out-of-range becomes the largest finite value instead of infinity.

    Returns:
        ``ml_dtypes.bfloat16`` array, same shape; any NaN gives the code 0x7FFF.

    Raises:
        TypeError: ``x`` is not a floating-point array.
        ValueError: unknown ``rounding``.
    """
    code = minifloat.encode(x, minifloat.BF16, rounding=rounding, saturate=saturate)
    return code.view(ml_dtypes.bfloat16)


def encode_pair(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.uint32]:
    """``cvt.rn.bf16x2.f32 d, a, b``: uint32 words, ``a`` in the high half.

    Args:
        a, b: float32 or float64 arrays that broadcast together.

    Raises:
        TypeError: an input is not a floating-point array.
    """
    return minifloat.pack(*(minifloat.encode(x, minifloat.BF16) for x in (a, b)))


def decode(code: NDArray[Any]) -> NDArray[np.float32]:
    """Exact float32 values of BF16.

    Args:
        code: ``ml_dtypes.bfloat16`` or uint16 array, any shape.

    Returns:
        float32 array, same shape; any NaN gives 0x7FFFFFFF.

    Raises:
        TypeError: ``code`` has another dtype.
    """
    code = np.asarray(code)
    if code.dtype == ml_dtypes.bfloat16:
        code = code.view(np.uint16)
    return minifloat.decode(code, minifloat.BF16)
