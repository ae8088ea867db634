"""E5M2 (OCP FP8): infinities 0x7C and 0xFC, NaN beyond them.

>>> import numpy as np
>>> encode(np.float32([1.0, 61440.0, -1e9, np.nan])).tolist()
[60, 123, 251, 127]
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.formats import minifloat
from sparse_mla_reference.formats.minifloat import Rounding

MAX = 57344.0
NAN = 0x7F


def encode(
    x: NDArray[Any], *, rounding: Rounding = "rn", saturate: bool = True
) -> NDArray[np.uint8]:
    """Encode as ``cvt.rn.satfinite.e5m2x2.f32`` does each of its two inputs.

    Args:
        x: float32 or float64 array, any shape. A float64 is rounded once.
        rounding: ``"rn"`` ties to even, or ``"rz"`` toward zero.
        saturate: beyond +-57344, infinities included, becomes +-57344. False: becomes infinity.

    Returns:
        uint8 array of the same shape; any NaN gives 0x7F; -0 gives 0x80.

    Raises:
        TypeError: ``x`` is not a floating-point array.
        ValueError: unknown ``rounding``.
    """
    return minifloat.encode(x, minifloat.E5M2, rounding=rounding, saturate=saturate)


def encode_pair(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.uint16]:
    """``cvt.rn.satfinite.e5m2x2.f32 d, a, b``: uint16 words, ``a`` in the high byte.

    Args:
        a, b: float32 or float64 arrays that broadcast together.

    Raises:
        TypeError: an input is not a floating-point array.
    """
    return minifloat.pack(encode(a), encode(b))


def decode(code: NDArray[Any]) -> NDArray[np.float32]:
    """Exact float32 values of E5M2 bytes.

    Args:
        code: uint8 or ``ml_dtypes.float8_e5m2`` array, any shape.

    Returns:
        float32 array, same shape; any NaN code gives the NaN 0x7FFFFFFF.

    Raises:
        TypeError: ``code`` has another dtype.
    """
    code = np.asarray(code)
    if code.dtype.name == "float8_e5m2":
        code = code.view(np.uint8)
    return minifloat.decode(code, minifloat.E5M2)
