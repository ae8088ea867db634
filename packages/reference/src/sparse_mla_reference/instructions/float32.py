"""IEEE float32 arithmetic as NVIDIA GPUs do it: round to nearest even, one canonical NaN.

numpy's float32 ``+ - * /`` round correctly and keep subnormals; what they lack is the GPU's NaN
(0x7FFFFFFF whatever went in) and the ``.ftz`` forms.

>>> import numpy as np
>>> hex(add(np.float32(np.inf), np.float32(-np.inf)).view(np.uint32))
'0x7fffffff'
>>> float(mul(np.float32(2.0**-126), np.float32(0.5), ftz=True))
0.0
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_NORMAL = np.float32(2.0**-126)


@np.errstate(all="ignore")
def add(a: ArrayLike, b: ArrayLike, *, ftz: bool = False) -> NDArray[np.float32]:
    """``add.rn.f32``: float32 arrays that broadcast; RN(a + b); NaN is 0x7FFFFFFF.

    Raises:
        TypeError: an input is not float32.
    """
    x, y = flush(as_float32("a", a), ftz), flush(as_float32("b", b), ftz)
    return flush(canonical(x + y), ftz)


@np.errstate(all="ignore")
def mul(a: ArrayLike, b: ArrayLike, *, ftz: bool = False) -> NDArray[np.float32]:
    """``mul.rn.f32``: float32 arrays that broadcast; RN(a * b); NaN is 0x7FFFFFFF.

    Raises:
        TypeError: an input is not float32.
    """
    x, y = flush(as_float32("a", a), ftz), flush(as_float32("b", b), ftz)
    return flush(canonical(x * y), ftz)


@np.errstate(all="ignore")
def div(a: ArrayLike, b: ArrayLike, *, ftz: bool = False) -> NDArray[np.float32]:
    """``div.rn.f32``: float32 arrays that broadcast; RN(a / b); NaN is 0x7FFFFFFF.

    Raises:
        TypeError: an input is not float32.
    """
    x, y = flush(as_float32("a", a), ftz), flush(as_float32("b", b), ftz)
    return flush(canonical(x / y), ftz)


def flush(x: NDArray[np.float32], ftz: bool) -> NDArray[np.float32]:
    """``x`` with its subnormals as zeros of their sign if ``ftz``, else as it is."""
    if not ftz:
        return x
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(np.float32(0), x), x)


def canonical(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """``x`` with every NaN as 0x7FFFFFFF, the NaN that GPU arithmetic produces."""
    bits = np.asarray(x).view(np.uint32)
    return np.asarray(np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits)).view(np.float32)


def as_float32(name: str, x: ArrayLike) -> NDArray[np.float32]:
    """``x`` as a float32 array; other dtypes are refused rather than rounded in silence.

    Raises:
        TypeError: ``x`` is not float32.
    """
    array = np.asarray(x)
    if array.dtype != np.float32:
        raise TypeError(f"{name} must be float32, got {array.dtype}")
    return array
