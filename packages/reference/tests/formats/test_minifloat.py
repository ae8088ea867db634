"""Encoders against rational rounding at every boundary, and against ml_dtypes."""

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sparse_mla_reference import bf16, e4m3, e5m2, fp16, minifloat
from sparse_mla_reference.formats.minifloat import BF16, E4M3, E5M2, FP16, Format

FORMATS = [E4M3, E5M2, FP16, BF16]
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}


def finite_codes(form: Format) -> np.ndarray:
    return np.arange(form.max_finite + 1, dtype=form.dtype)


def boundaries(form: Format) -> np.ndarray:
    """Every finite value, every midpoint, and their float64 neighbours; both signs."""
    values = minifloat.decode(finite_codes(form), form).astype(np.float64)
    if len(values) > 4096:
        values = np.concatenate([values[:300], values[::37], values[-300:]])
    middle = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middle, [values[-1] * 1.0001]])
    near = np.concatenate([np.nextafter(points, 0), points, np.nextafter(points, np.inf)])
    return np.concatenate([near, -near])


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_decode_equals_ml_dtypes(form):
    codes = np.arange(1 << form.bits).astype(form.dtype)
    ours = minifloat.decode(codes, form)
    theirs = codes.view(ML_DTYPES[form.name]).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    number = ~np.isnan(theirs)
    np.testing.assert_array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))
    assert set(ours[~number].view(np.uint32).tolist()) == {0x7FFFFFFF}


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("rounding", ["rn", "rz"])
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_encode_of_decode_is_identity(form, rounding, saturate):
    codes = finite_codes(form)
    codes = np.concatenate([codes, codes | form.dtype(1 << (form.bits - 1))])
    back = minifloat.encode(
        minifloat.decode(codes, form), form, rounding=rounding, saturate=saturate
    )
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("rounding", ["rn", "rz"])
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_encode_rounds_once(form, rounding, rounded):
    x = boundaries(form)
    got = minifloat.decode(minifloat.encode(x, form, rounding=rounding, saturate=True), form)
    largest = float(minifloat.decode(np.array([form.max_finite], form.dtype), form)[0])
    for value, result in zip(x.tolist(), got.tolist(), strict=True):
        exact = rounded(Fraction(value), form.fraction_bits, form.min_exponent, rounding)
        assert result == max(-largest, min(largest, float(exact))), value.hex()
        assert np.signbit(result) == np.signbit(value)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_encode_equals_ml_dtypes_on_float32(form):
    """Where ml_dtypes doesn't saturate and float32 is its source, the two must agree."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    x = np.concatenate([x, boundaries(form).astype(np.float32)])
    with np.errstate(all="ignore"):
        theirs = x.astype(ML_DTYPES[form.name]).view(form.dtype)
    ours = minifloat.encode(x, form)
    number = ~np.isnan(minifloat.decode(ours, form))
    np.testing.assert_array_equal(ours[number], theirs[number])
    np.testing.assert_array_equal(
        np.isnan(minifloat.decode(theirs, form)), np.isnan(minifloat.decode(ours, form))
    )


def test_saturating_e4m3_is_the_hardware_convert():
    x = np.array(
        [464, 465, 1e30, np.inf, -np.inf, np.nan, -np.nan, -0.0, 2**-10, 3 * 2**-11], np.float32
    )
    expected = [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x80, 0x00, 0x01]
    assert e4m3.encode(x).tolist() == expected
    payload = np.array([0xFFC01234, 0x7F800001], np.uint32).view(np.float32)
    assert e4m3.encode(payload).tolist() == [0x7F, 0x7F]


def test_non_saturating_overflow():
    x = np.array([448, 464, 464.1, np.inf, -np.inf], np.float64)
    assert e4m3.encode(x, saturate=False).tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0x7F]
    y = np.array([57344, 61439, 61440, np.inf, -np.inf], np.float64)
    assert minifloat.encode(y, E5M2).tolist() == [0x7B, 0x7B, 0x7C, 0x7C, 0xFC]
    assert minifloat.encode(y, E5M2, saturate=True).tolist() == [0x7B] * 4 + [0xFB]
    assert minifloat.encode(y, E5M2, rounding="rz").tolist() == [0x7B] * 3 + [0x7C, 0xFC]


def test_float64_is_not_rounded_through_float32():
    """1.0625 + 2^-40 lies above the midpoint of 1 and 1.125; through float32 it becomes a tie."""
    x = np.array([1.0625 + 2.0**-40])
    assert e4m3.encode(x).tolist() == [0x39]
    assert e4m3.encode(x.astype(np.float32)).tolist() == [0x38]
    y = np.array([1 + 2.0**-8 + 2.0**-40])
    assert bf16.encode(y).view(np.uint16).tolist() == [0x3F81]


def test_bf16_nan_is_canonical():
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert set(bf16.encode(nan).view(np.uint16).tolist()) == {0x7FFF}
    assert bf16.encode(np.array([np.inf, -np.inf, -0.0], np.float32)).view(np.uint16).tolist() == [
        0x7F80,
        0xFF80,
        0x8000,
    ]


def test_pairs_put_the_first_input_high():
    a, b = np.array([1.0, np.nan], np.float32), np.array([-2.0, 1e9], np.float32)
    assert e4m3.encode_pair(a, b).tolist() == [0x38C0, 0x7F7E]
    assert e5m2.encode_pair(a, b).tolist() == [0x3CC0, 0x7F7B]
    assert fp16.encode_pair(a, b).tolist() == [0x3C00C000, 0x7FFF7C00]
    assert bf16.encode_pair(a, b).tolist() == [0x3F80C000, 0x7FFF4E6E]
    assert e4m3.encode_pair(a, b).dtype == np.uint16
    assert bf16.encode_pair(a, b).dtype == np.uint32
    with pytest.raises(TypeError, match="high and low must both be uint8 or uint16, got uint8"):
        minifloat.pack(np.array([1], np.uint8), np.array([1], np.uint16))


def test_modules_take_their_typed_arrays():
    codes = np.arange(256, dtype=np.uint8)
    for module, dtype in ((e4m3, ml_dtypes.float8_e4m3fn), (e5m2, ml_dtypes.float8_e5m2)):
        typed, plain = module.decode(codes.view(dtype)), module.decode(codes)
        np.testing.assert_array_equal(typed.view(np.uint32), plain.view(np.uint32))
    words = np.arange(0, 1 << 16, 7).astype(np.uint16)
    for module, dtype in ((fp16, np.float16), (bf16, ml_dtypes.bfloat16)):
        typed, plain = module.decode(words.view(dtype)), module.decode(words)
        np.testing.assert_array_equal(typed.view(np.uint32), plain.view(np.uint32))
        number = ~np.isnan(plain)
        again = module.encode(plain).view(np.uint16)
        np.testing.assert_array_equal(again[number], words[number])
        assert set(again[~number].tolist()) == {0x7FFF}


@pytest.mark.parametrize("kind", [np.float16, np.float64, ml_dtypes.bfloat16,
                                  ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])  # fmt: skip
def test_any_floating_point_type_is_rounded_from_its_own_value(kind):
    x = np.array([1.0, -1.375, 0.0625, 448.0]).astype(kind)
    got = e4m3.decode(e4m3.encode(x))
    np.testing.assert_array_equal(got, x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("kind", [np.int32, np.longdouble, np.complex64, ml_dtypes.int4])
def test_other_types_are_refused(kind):
    with pytest.raises(TypeError, match="x must be a floating-point array of at most 64 bits, got"):
        e4m3.encode(np.zeros(3, kind))


def test_fp8_converts_saturate_unless_told_otherwise_and_the_wider_ones_do_not():
    huge = np.array([1e39, -np.inf], np.float64)
    assert [form.saturates for form in FORMATS] == [True, True, False, False]
    for form in FORMATS:
        for saturate in (None, False, True):
            got = form.encode(huge, saturate=saturate)
            want = minifloat.encode(
                huge, form, saturate=form.saturates if saturate is None else saturate
            )
            assert got.view(form.dtype).tolist() == want.tolist()


def test_a_format_of_ones_own_comes_as_integers():
    e3m4 = Format("e3m4", exponent_bits=3, fraction_bits=4, has_infinity=True, nan=0x7F)
    assert e3m4.encode(np.array([1.0, 15.5, 99.0], np.float32)).tolist() == [0x30, 0x6F, 0x6F]
    assert e3m4.array is np.uint8
    assert e3m4.decode(np.array([0x30, 0x6F], np.uint8)).tolist() == [1.0, 15.5]


def test_the_table_of_values_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        minifloat.value_table(E4M3)[0] = 1


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match=r"x must be a floating-point array.*int64"):
        e4m3.encode(np.arange(3))
    with pytest.raises(ValueError, match="rounding must be 'rn' or 'rz', got 'up'"):
        e4m3.encode(np.array([1], np.float32), rounding="up")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="code must be uint8 or float8_e4m3fn, got int8"):
        e4m3.decode(np.zeros(3, np.int8))
    with pytest.raises(TypeError, match=r"code must be uint16 or bfloat16, got float32"):
        bf16.decode(np.array([1], np.float32))
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"^form must be a Format, such as E4M3, got int$"):
        minifloat.encode(np.array([1], np.float32), wrong)
    with pytest.raises(TypeError, match=r"^form must be a Format, such as E4M3, got int$"):
        minifloat.decode(np.array([1], np.uint8), wrong)


def test_inputs_are_not_changed_and_shapes_are_kept():
    x = np.full((2, 3, 4), 1.3, np.float32)
    x.flags.writeable = False
    assert e4m3.encode(x).shape == x.shape
    assert e4m3.encode(np.float32(1.3)).shape == ()  # type: ignore[arg-type]
    assert e4m3.encode(np.zeros((0, 3), np.float32)).shape == (0, 3)
