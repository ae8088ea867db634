"""Narrow binary floating-point formats: one rounding from float32 or float64, by arithmetic.

A cast of a float64 array by ``ml_dtypes`` goes through float32 and so rounds twice; ``encode``
scales the value by a power of two (exact in float64) and rounds it once.

``E4M3``, ``E5M2``, ``FP16`` and ``BF16`` are the rows of one table; any other ``Format`` works too.
The modules ``e4m3``, ``e5m2``, ``fp16`` and ``bf16`` give each row's functions a short name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Rounding = Literal["rn", "rz"]


@dataclass(frozen=True)
class Format:
    """A format of a sign, an exponent and a fraction, and how NVIDIA GPUs convert to it.

    Attributes:
        name: the format's name here.
        exponent_bits: width of the exponent field.
        fraction_bits: width of the fraction field.
        has_infinity: whether the largest exponent field with fraction 0 means infinity.
        nan: the code that the converts write for any NaN, of either sign.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    has_infinity: bool
    nan: int

    @property
    def bits(self) -> int:
        """Width of one encoding."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """Unsigned integer type that holds one encoding."""
        return np.uint8 if self.bits == 8 else np.uint16

    @property
    def array(self) -> type[Any]:
        """The numpy type whose elements are encodings of the format; ``dtype`` if there is none."""
        return _ARRAYS.get(self.name, self.dtype)

    @property
    def saturates(self) -> bool:
        """Whether the converts saturate: PTX has converts to FP8 with ``.satfinite`` alone."""
        return self.bits == 8

    @property
    def bias(self) -> int:
        """IEEE exponent bias."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal; subnormals share it."""
        return 1 - self.bias

    @property
    def infinity(self) -> int:
        """Code of +infinity (of the first NaN where the format has no infinity)."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def max_finite(self) -> int:
        """Code of the largest finite magnitude."""
        return self.infinity - 1 if self.has_infinity else self.nan - 1

    def codes(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """View an array of encodings as unsigned integers, without a copy.

        Args:
            name: what an error calls the array.
            array: array of ``dtype`` or of ``array``, any shape.

        Raises:
            TypeError: ``array`` has another dtype.
        """
        array = np.asarray(array)
        if array.dtype not in (self.dtype, self.array):
            named = f"{np.dtype(self.dtype)} or {np.dtype(self.array)}"
            raise TypeError(f"{name} must be {named}, got {array.dtype}")
        return array.view(self.dtype)

    def encode(
        self, x: NDArray[Any], *, rounding: Rounding = "rn", saturate: bool | None = None
    ) -> NDArray[Any]:
        """Round real values to the format, once; by default as the GPU's convert does it.

        Args:
            x: array of any floating-point type of at most 64 bits, any shape.
            rounding: ``"rn"`` to nearest, ties to even (the GPU's); ``"rz"`` toward zero.
            saturate: whether an out-of-range value, infinities included, becomes the largest finite
                one (PTX ``.satfinite``), or infinity, or NaN in a format without infinity. None: as
                ``saturates`` says.

        Returns:
            Array of the same shape, of uint8 for a format of 8 bits, else of the type ``array``.
            Any NaN gives the code ``nan``; -0 keeps its sign.

        Raises:
            TypeError: ``x`` is not a floating-point array.
            ValueError: ``rounding`` is unknown.
        """
        saturate = self.saturates if saturate is None else saturate
        code = encode(x, self, rounding=rounding, saturate=saturate)
        return code if self.bits == 8 else code.view(self.array)

    def encode_pair(self, a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        """Convert a pair as PTX's ``cvt`` to a packed pair ``d, a, b`` does: ``a`` goes high.

        Args:
            a, b: arrays of floating-point types that broadcast together.

        Returns:
            Array of uint16 words for a format of 8 bits, else of uint32 words.

        Raises:
            TypeError: an input is not a floating-point array.
        """
        return pack(*(encode(x, self, saturate=self.saturates) for x in (a, b)))

    def decode(self, code: NDArray[Any]) -> NDArray[np.float32]:
        """Exact float32 values of encodings.

        Args:
            code: array of unsigned integers or of the type ``array``, any shape.

        Returns:
            float32 array of the same shape; any NaN code gives the NaN 0x7FFFFFFF.

        Raises:
            TypeError: ``code`` has another dtype.
        """
        return decode(code, self)


# OCP 8-bit Floating Point Specification (OFP8) revision 1.0, table 1; IEEE 754-2019; bfloat16.
# NaN codes: what cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32 and cvt.rn.{f16,bf16}.f32 write.
E4M3 = Format("e4m3", exponent_bits=4, fraction_bits=3, has_infinity=False, nan=0x7F)
E5M2 = Format("e5m2", exponent_bits=5, fraction_bits=2, has_infinity=True, nan=0x7F)
FP16 = Format("fp16", exponent_bits=5, fraction_bits=10, has_infinity=True, nan=0x7FFF)
BF16 = Format("bf16", exponent_bits=8, fraction_bits=7, has_infinity=True, nan=0x7FFF)
_ARRAYS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "fp16": np.float16,
        "bf16": ml_dtypes.bfloat16,
    }
)


def encode(
    x: NDArray[Any], form: Format, *, rounding: Rounding = "rn", saturate: bool = False
) -> NDArray[Any]:
    """Round real values to encodings of ``form``, once.

    Args:
        x: float16, bfloat16, float32 or float64 array of any shape (any value, exact in float64).
        form: the target format.
        rounding: ``"rn"`` to nearest, ties to even; ``"rz"`` toward zero.
        saturate: out-of-range magnitudes, infinities included, become the largest finite value
            (PTX ``.satfinite``). Otherwise they become infinity, or NaN in a format without one;
            under ``"rz"`` a finite value stays finite.

    Returns:
        Array of ``form.dtype``, same shape. Any NaN gives ``form.nan``.

    Raises:
        TypeError: ``x`` is not a floating-point array, or ``form`` no ``Format``.
        ValueError: unknown ``rounding``.
    """
    _check_format(form)
    if rounding not in ("rn", "rz"):
        raise ValueError(f"rounding must be 'rn' or 'rz', got {rounding!r}")
    value = as_float64(x)
    magnitude = np.abs(value)
    finite = np.isfinite(value)
    safe = np.where(finite, magnitude, 0.0)
    # frexp's exponent is one above the IEEE exponent, and says 0 of a zero.
    exponent = np.where(safe > 0, np.frexp(safe)[1] - 1, form.min_exponent)
    exponent = np.maximum(exponent, form.min_exponent)
    units = np.ldexp(safe, form.fraction_bits - exponent)
    units = np.rint(units) if rounding == "rn" else np.trunc(units)
    # Binade and units add up to the code; a carry out of the fraction bumps the exponent.
    code = ((exponent - form.min_exponent).astype(np.int64) << form.fraction_bits) + units.astype(
        np.int64
    )
    beyond = form.infinity if form.has_infinity else form.nan
    if saturate:
        beyond = form.max_finite
    overflow = form.max_finite if rounding == "rz" else beyond
    code = np.where(code > form.max_finite, overflow, code)
    code = np.where(finite, code, beyond)
    code |= np.signbit(value).astype(np.int64) << (form.bits - 1)
    if not (form.has_infinity or saturate):
        code = np.where((code & form.nan) == form.nan, form.nan, code)
    code = np.where(np.isnan(value), form.nan, code)
    return code.astype(form.dtype)


def decode(code: NDArray[Any], form: Format) -> NDArray[np.float32]:
    """Exact float32 values of encodings (every format here is a subset of float32).

    Args:
        code: array of ``form.dtype`` or ``form.array``, any shape.
        form: the source format.

    Returns:
        float32 array, same shape; any NaN code gives the NaN 0x7FFFFFFF.

    Raises:
        TypeError: ``code`` has another dtype, or ``form`` is no ``Format``.
    """
    _check_format(form)
    return np.asarray(value_table(form)[form.codes("code", code)])


def _check_format(form: Format) -> None:
    if not isinstance(form, Format):
        raise TypeError(f"form must be a Format, such as E4M3, got {type(form).__name__}")


def pack(high: NDArray[Any], low: NDArray[Any]) -> NDArray[Any]:
    """Two encodings as one word, as ``cvt...x2`` lays them out: its first input in the high half.

    Args:
        high, low: unsigned integer arrays of one dtype, uint8 or uint16, that broadcast together.

    Returns:
        uint16 or uint32 array.

    Raises:
        TypeError: the dtypes differ, or are neither uint8 nor uint16.
    """
    high, low = np.asarray(high), np.asarray(low)
    if high.dtype != low.dtype or high.dtype not in (np.uint8, np.uint16):
        raise TypeError(
            f"high and low must both be uint8 or uint16, got {high.dtype} and {low.dtype}"
        )
    if high.dtype == np.uint8:
        return np.asarray((high.astype(np.uint16) << np.uint16(8)) | low)
    return np.asarray((high.astype(np.uint32) << np.uint32(16)) | low)


def as_float64(x: NDArray[Any]) -> NDArray[np.float64]:
    """Float64 values of a floating-point array, exactly.

    Raises:
        TypeError: ``x`` is not float16, bfloat16, an 8-bit float, float32 or float64.
    """
    array = np.asarray(x)
    is_ml_dtype = array.dtype.kind == "V" and "float" in array.dtype.name
    if (array.dtype.kind == "f" and array.dtype.itemsize <= 8) or is_ml_dtype:
        with np.errstate(invalid="ignore"):
            return array.astype(np.float64)
    raise TypeError(f"x must be a floating-point array of at most 64 bits, got {array.dtype}")


@cache
@np.errstate(over="ignore")  # the codes of infinity and NaN, replaced below
def value_table(form: Format) -> NDArray[np.float32]:
    """Values of all encodings in code order, float32, read-only."""
    code = np.arange(1 << form.bits)
    field = (code >> form.fraction_bits) & ((1 << form.exponent_bits) - 1)
    fraction = code & ((1 << form.fraction_bits) - 1)
    significand = np.where(field > 0, fraction + (1 << form.fraction_bits), fraction)
    exponent = np.maximum(field, 1) - form.bias - form.fraction_bits
    value = np.ldexp(significand.astype(np.float64), exponent).astype(np.float32)
    magnitude = code & ((1 << (form.bits - 1)) - 1)
    value[magnitude > form.max_finite] = np.inf
    value = np.copysign(value, np.where(code >> (form.bits - 1), -1, 1).astype(np.float32))
    is_nan = magnitude > (form.infinity if form.has_infinity else form.max_finite)
    value.view(np.uint32)[is_nan] = 0x7FFFFFFF
    value.flags.writeable = False
    return np.asarray(value)
