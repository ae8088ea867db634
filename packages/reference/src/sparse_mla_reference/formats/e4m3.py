"""E4M3 (OCP FP8, the ``fn`` variant: no infinities, NaN is 0x7F and 0xFF).

>>> import numpy as np
>>> encode(np.float32([1.0, 464.0, -1e9, np.nan])).tolist()
[56, 126, 254, 127]
>>> hex(encode_pair(np.float32(1.0), np.float32(2.0)))
'0x3840'
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.formats import minifloat
from sparse_mla_reference.formats.minifloat import Rounding

MAX = 448.0
NAN = 0x7F


def encode(
    x: NDArray[Any], *, rounding: Rounding = "rn", saturate: bool = True
) -> NDArray[np.uint8]:
    """Encode as ``cvt.rn.satfinite.e4m3x2.f32`` does each of its two inputs.

    Args:
        x: float32 or float64 array (or a narrower float), any shape. A float64 is rounded once.
        rounding: ``"rn"`` ties to even (the hardware's), or ``"rz"`` toward zero.
        saturate: True as the hardware: beyond +-448, infinities included, becomes +-448. False:
            becomes NaN, as in the OCP specification's non-saturating mode.

    Returns:
        uint8 array of the same shape; any NaN gives 0x7F; -0 gives 0x80.

    Raises:
        TypeError: ``x`` is not a floating-point array.
        ValueError: unknown ``rounding``.
    """
    return minifloat.encode(x, minifloat.E4M3, rounding=rounding, saturate=saturate)


def encode_pair(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.uint16]:
    """``cvt.rn.satfinite.e4m3x2.f32 d, a, b``: uint16 words, ``a`` in the high byte.

    Args:
        a, b: float32 or float64 arrays that broadcast together.

    Raises:
        TypeError: an input is not a floating-point array.
    """
    return minifloat.pack(encode(a), encode(b))


def decode(code: NDArray[Any]) -> NDArray[np.float32]:
    """Exact float32 values of E4M3 bytes.

    Args:
        code: uint8 or ``ml_dtypes.float8_e4m3fn`` array, any shape.

    Returns:
        float32 array, same shape; both NaN codes give the NaN 0x7FFFFFFF.

    Raises:
        TypeError: ``code`` has another dtype.
    """
    return minifloat.decode(as_bytes("code", code), minifloat.E4M3)


def as_bytes(name: str, array: NDArray[Any]) -> NDArray[np.uint8]:
    """View an E4M3 array as its bytes, without a copy.

    Raises:
        TypeError: ``array`` is neither uint8 nor float8_e4m3fn.
    """
    array = np.asarray(array)
    if array.dtype == np.uint8:
        return array
    if array.dtype.name == "float8_e4m3fn":
        return array.view(np.uint8)
    raise TypeError(f"{name} must be uint8 or float8_e4m3fn, got {array.dtype}")
