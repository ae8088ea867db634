"""Fused multiply-add in float32, exactly rounded.

A float64 ``a * b + c`` cast to float32 rounds twice. Here the float64 sum is rounded to odd, after
which the cast to float32 is a single correct rounding (Boldo and Melquiond, "Emulation of FMA and
correctly rounded sums: proved algorithms using rounding to odd", IEEE TC 57(4), 2008: 53 >= 24 + 2
bits suffices).

>>> import numpy as np
>>> x = np.float32(1 + 2**-12)
>>> float(fma(x, x, np.float32(-1 - 2**-11)))  # the product's last bit, 2**-24, survives
5.960464477539063e-08
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparse_mla_reference.instructions.float32 import as_float32, canonical, flush


@np.errstate(all="ignore")
def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike, *, ftz: bool = False) -> NDArray[np.float32]:
    """``fma.rn.f32`` (with ``ftz``: ``fma.rn.ftz.f32``).

    Args:
        a, b, c: float32 arrays that broadcast together.
        ftz: subnormal inputs and results become zeros of their sign.

    Returns:
        float32 array RN(a * b + c); any NaN is 0x7FFFFFFF.

    Raises:
        TypeError: an input is not float32.
    """
    x, y, z = (flush(as_float32(n, v), ftz) for n, v in (("a", a), ("b", b), ("c", c)))
    product = np.asarray(np.multiply(x, y, dtype=np.float64))  # exact: 24 + 24 bits
    return flush(canonical(_round_to_odd_sum(product, z.astype(np.float64))), ftz)


def _round_to_odd_sum(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float32]:
    """RN to float32 of the exact x + y."""
    total = np.asarray(x + y)
    # TwoSum (Knuth): total + error is x + y exactly.
    back = total - x
    error = (x - (total - back)) + (y - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    outward = (error > 0) == (total > 0)
    odd = np.where(inexact, bits + np.where(outward, 1, -1), bits)
    return np.asarray(odd.view(np.float64).astype(np.float32))
