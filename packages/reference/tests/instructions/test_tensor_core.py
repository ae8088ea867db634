"""The tensor-core models against recordings of hardware and against rational arithmetic."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from sparse_mla_reference import e4m3, minifloat, tensor_core
from sparse_mla_reference.instructions import aligned_sum, exact_product
from sparse_mla_reference.instructions.tensor_core import (
    MODELS,
    SM90_BF16,
    SM90_E4M3,
    SM90_F16,
    Model,
    mma,
)

DATA = Path(__file__).parents[1] / "data"
NAN = 0x7FFFFFFF


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def values(code: np.ndarray) -> list[float]:
    return e4m3.decode(code).astype(float).tolist()


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    """512 instructions on an NVIDIA H200: a [512, 16, 32], b [512, 32, 8], c, d [512, 16, 8]."""
    with np.load(DATA / "mma_e4m3_m16n8k32_h200.npz") as data:
        return dict(data)


def test_recorded_instructions(recorded):
    """All 65,536 recorded outputs; half of them with a zero accumulator."""
    d = mma(recorded["a"], recorded["b"], recorded["c"], model=SM90_E4M3)
    assert recorded["d"].size == 65_536
    np.testing.assert_array_equal(bits(d), recorded["d"])


def test_the_recording_tells_orders_apart(recorded):
    """Any other assignment of columns to the two sums fails on it, and so does an exact sum."""
    permuted = np.concatenate([np.arange(0, 32, 2), np.arange(1, 32, 2)])
    d = mma(recorded["a"][:, :, permuted], recorded["b"][:, permuted], recorded["c"])
    assert (bits(d) != recorded["d"]).mean() > 0.2
    exact = e4m3.decode(recorded["a"]).astype(np.float64) @ e4m3.decode(recorded["b"])
    assert (bits(exact + recorded["c"]) != recorded["d"]).mean() > 0.2


def adversarial(rng: np.random.Generator, shape: tuple[int, int, int]) -> dict[str, tuple]:
    """Operand families [M, K] and [K, N] of bytes that stress alignment."""
    m, k, n = shape
    sign = lambda x: (x | (rng.integers(0, 2, x.shape) << 7)).astype(np.uint8)  # noqa: E731
    any_finite = lambda s: sign(rng.integers(0, 0x7F, s))  # noqa: E731
    subnormal = lambda s: sign(rng.integers(0, 8, s))  # noqa: E731
    extremes = lambda s: sign(rng.choice([0, 1, 2, 7, 8, 9, 0x7D, 0x7E], s))  # noqa: E731
    mixed = rng.choice([0x01, 0x7E], (m, k)).astype(np.uint8)
    pair = any_finite((m, k // 2))
    cancelling = np.concatenate([pair, pair ^ 0x80], axis=1)
    column = any_finite((k // 2, n))
    return {
        "uniform": (any_finite((m, k)), any_finite((k, n))),
        "subnormal": (subnormal((m, k)), subnormal((k, n))),
        "extremes": (extremes((m, k)), extremes((k, n))),
        "one large": (np.where(np.arange(k) == 5, 0x7E, subnormal((m, k))), any_finite((k, n))),
        "mixed": (mixed, any_finite((k, n))),
        "cancelling": (cancelling, np.concatenate([column, column])),
        "sparse": (any_finite((m, k)) * (rng.random((m, k)) < 0.1), any_finite((k, n))),
        "zero": (sign(np.zeros((m, k), int)), sign(np.zeros((k, n), int))),
    }


FAMILIES = list(adversarial(np.random.default_rng(0), (2, 32, 2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_against_rationals(family, exact_e4m3_mma):
    rng = np.random.default_rng(6)
    m, k, n = 6, 96, 5
    a, b = (x.astype(np.uint8) for x in adversarial(rng, (m, k, n))[family])
    c = np.ldexp(rng.standard_normal((m, n)), rng.integers(-20, 30, (m, n))).astype(np.float32)
    c[rng.random((m, n)) < 0.3] = 0
    d = mma(a, b, c)
    for i in range(m):
        for j in range(n):
            expected = exact_e4m3_mma(values(a[i]), values(b[:, j]), float(c[i, j]))
            assert bits(d[i, j]) == bits(expected), (family, i, j)


def careful(monkeypatch, *arguments, **options) -> np.ndarray:
    """mma with nothing taken for an exact dot product."""
    with monkeypatch.context() as patch:
        patch.setattr(tensor_core, "_limit", lambda model: 0.0)
        return mma(*arguments, **options)


@pytest.mark.parametrize("spread", range(0, 19, 3))
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_steps_equal_the_careful_path(family, spread, monkeypatch):
    """Rows and columns of the family among others whose exponents spread over ``spread`` binades:
    with few the dot product is exact, with many the careful path takes over."""
    rng = np.random.default_rng(spread)
    m, k, n = 24, 160, 40
    a, b = (
        e4m3.encode(np.ldexp(rng.standard_normal(s), -rng.integers(0, spread + 1, s)) * 8)
        for s in ((m, k), (k, n))
    )
    hard_a, hard_b = (x.astype(np.uint8) for x in adversarial(rng, (m, k, n))[family])
    a[::5], b[:, 1::7] = hard_a[::5], hard_b[:, 1::7]
    a[3, 70], b[150, 8] = 0x7F, 0xFF
    c = np.ldexp(rng.standard_normal((m, n)), rng.integers(-20, 30, (m, n))).astype(np.float32)
    np.testing.assert_array_equal(bits(mma(a, b, c)), bits(careful(monkeypatch, a, b, c)))


def test_both_paths_are_taken_at_the_threshold(monkeypatch):
    """32 ones and a least bit: the norm in units of the least bit crosses 2^24 where the bit falls
    below 2^-9; bits stay those of the careful path on both sides."""
    calls = []
    original = aligned_sum.aligned_sum

    def counted(*arguments):
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(tensor_core, "aligned_sum", counted)
    taken = {}
    for exponent in range(-9, 1):
        a = np.full((1, 32), 0x38, np.uint8)
        a[0, 5] = e4m3.encode(np.array(2.0**exponent, np.float32))
        b = np.where(np.arange(32) == 9, np.float32(-(2.0**exponent)), np.float32(60))
        b = e4m3.encode(b)[:, None]
        c = np.array([[0.3]], np.float32)
        before = len(calls)
        d = mma(a, b, c)
        taken[exponent] = len(calls) > before
        assert bits(d) == bits(careful(monkeypatch, a, b, c))
    assert taken[-9]
    assert not taken[0]
    switch = min(e for e, by_careful in taken.items() if not by_careful)
    assert all(taken[e] == (e < switch) for e in taken)


@pytest.mark.parametrize(("name", "k"), [("SM90_E4M3", 576), ("SM90_E4M3_AS_F16", 144)])
def test_narrow_data_takes_the_exact_path(name, k, monkeypatch):
    """Unit normal operands, as caches hold them, almost never need the careful path."""
    rng = np.random.default_rng(9)
    a, b = (e4m3.encode(rng.standard_normal(s)) for s in ((64, k), (k, 64)))
    seen = []
    original = aligned_sum.aligned_sum

    def counted(a, b, c, model):
        seen.append(a.value.shape[2] * b.value.shape[2])
        return original(a, b, c, model)

    monkeypatch.setattr(tensor_core, "aligned_sum", counted)
    mma(a, b, np.zeros((64, 64), np.float32), model=MODELS[name])
    assert sum(seen) < 0.05 * 64 * 64 * k / 16


def test_chaining_is_successive_instructions():
    rng = np.random.default_rng(7)
    a, b = (rng.integers(0, 0x7F, s).astype(np.uint8) for s in ((3, 16, 128), (3, 128, 8)))
    d = np.zeros((3, 16, 8), np.float32)
    whole = mma(a, b, d)
    for k in range(0, 128, 32):
        d = mma(a[..., k : k + 32], b[:, k : k + 32], d)
    np.testing.assert_array_equal(bits(whole), bits(d))


def test_tiles_and_batches_don_t_change_bits():
    """A tile has 65,536 outputs, so that 80 rows of 900 columns are more than one."""
    rng = np.random.default_rng(8)
    a, b = (rng.integers(0, 0x7F, s).astype(np.uint8) for s in ((2, 1, 80, 64), (3, 64, 900)))
    c = rng.standard_normal((80, 900)).astype(np.float32)
    d = mma(a, b, c)
    assert d.shape == (2, 3, 80, 900)
    for i, j, row, column in [(0, 0, 0, 0), (1, 2, 79, 899), (0, 1, 33, 450)]:
        one = mma(
            a[i, 0, row : row + 1],
            b[j, :, column : column + 1],
            c[row : row + 1, column : column + 1],
        )
        assert bits(one)[0, 0] == bits(d[i, j])[row, column]


@pytest.mark.parametrize("batched", ["a", "b", "c"])
def test_one_operand_alone_may_be_a_batch(batched):
    one = np.full((32, 32), 0x38, np.uint8)
    args: dict[str, Any] = {"a": one, "b": one, "c": np.ones((32, 32), np.float32)}
    args[batched] = np.broadcast_to(args[batched], (5, 1, 32, 32))
    d = mma(**args)
    assert d.shape == (5, 1, 32, 32)
    assert (d == 33).all()


def test_nan_reaches_its_row_and_column_alone():
    a, b = np.full((4, 64), 0x38, np.uint8), np.full((64, 5), 0x38, np.uint8)
    c = np.zeros((4, 5), np.float32)
    a[1, 40], b[3, 2], c[3, 4] = 0x7F, 0xFF, np.nan
    d = bits(mma(a, b, c))
    nan = np.zeros((4, 5), bool)
    nan[1], nan[:, 2], nan[3, 4] = True, True, True
    assert (d[nan] == NAN).all()
    assert (d[~nan] == bits(np.array(64, np.float32))).all()


def test_infinite_and_overflowing_accumulators():
    a, b = np.full((1, 32), 0x7E, np.uint8), np.full((32, 1), 0x7E, np.uint8)
    big = np.finfo(np.float32).max
    for c, expected in ((np.inf, np.inf), (-np.inf, -np.inf), (big, big)):
        assert mma(a, b, np.array([[c]], np.float32))[0, 0] == np.float32(expected)


def test_empty_shapes():
    c = np.ones((2, 3), np.float32)
    empty = mma(np.zeros((2, 0), np.uint8), np.zeros((0, 3), np.uint8), c)
    np.testing.assert_array_equal(empty, c)
    none = mma(np.zeros((0, 32), np.uint8), np.zeros((32, 3), np.uint8), c[:0])
    assert none.shape == (0, 3)


def test_inputs_are_not_changed():
    a, b, c = (np.full(s, 0x38, np.uint8) for s in ((2, 32), (32, 2), (2, 2)))
    c = c.astype(np.float32)
    for x in (a, b, c):
        x.flags.writeable = False
    d = mma(a.view(ml_dtypes.float8_e4m3fn), b, c)
    assert d.flags.writeable
    assert not np.shares_memory(c, d)


@pytest.mark.parametrize(
    ("a", "b", "c", "error", "message"),
    [
        ("f", "u", "f", TypeError, "a must be float8_e4m3fn or uint8 in .*, got float32"),
        ("u", "u", "d", TypeError, "c must be float32, got float64"),
    ],
)
def test_wrong_dtypes_are_named(a, b, c, error, message):
    kinds = {"u": np.uint8, "f": np.float32, "d": np.float64}
    with pytest.raises(error, match=message):
        mma(np.zeros((2, 32), kinds[a]), np.zeros((32, 2), kinds[b]), np.zeros((2, 2), kinds[c]))


@pytest.mark.parametrize(
    ("a", "b", "c", "message"),
    [
        ((2, 32), (64, 2), (2, 2), "a and b must share K"),
        ((2, 48), (48, 2), (2, 2), "K must be a multiple of 32"),
        ((2, 32), (32, 2), (2, 3), r"c must be \[..., 2, 2\], got \(2, 3\)"),
        ((32,), (32, 2), (2, 2), "a must have at least 2 dimensions"),
        ((3, 2, 32), (2, 32, 2), (2, 2), "must have batch dimensions that broadcast, got a"),
    ],
)
def test_wrong_shapes_are_named(a, b, c, message):
    with pytest.raises(ValueError, match=message):
        mma(np.zeros(a, np.uint8), np.zeros(b, np.uint8), np.zeros(c, np.float32))


OPERANDS = {"e4m3": np.uint8, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def operand_values(form: minifloat.Format, code: np.ndarray) -> list[float]:
    return minifloat.decode(code, form).astype(float).tolist()


def model_families(rng: np.random.Generator, form: minifloat.Format) -> dict[str, tuple]:
    """Encodings [M, K] and [K, N] of any format, and accumulators."""
    m, k, n = 5, 64, 4
    top = form.max_finite
    one = (1 << form.exponent_bits - 1) - 1 << form.fraction_bits

    def signed(x: np.ndarray) -> np.ndarray:
        return (x | (rng.integers(0, 2, x.shape) << (form.bits - 1))).astype(form.dtype)

    def pick(low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        a, b = (signed(rng.integers(low, high + 1, s)) for s in ((m, k), (k, n)))
        return a, b

    half = signed(rng.integers(0, top + 1, (m, k // 2)))
    column = signed(rng.integers(0, top + 1, (k // 2, n)))
    flipped = half ^ form.dtype(1 << (form.bits - 1))
    interleaved = np.stack([half, flipped], axis=2).reshape(m, k)
    subnormal = (1 << form.fraction_bits) - 1
    return {
        "uniform": pick(0, top),
        "near one": pick(one - (1 << form.fraction_bits), one + (1 << form.fraction_bits)),
        "subnormal": pick(0, 2 * subnormal),
        "subnormal x large": (pick(0, subnormal)[0], pick(top - subnormal, top)[1]),
        "cancelling": (interleaved, np.repeat(column, 2, axis=0)),
        "zero": pick(0, 0),
    }


class Published(NamedTuple):
    """What the publications and the recordings say of an instruction."""

    operands: minifloat.Format
    sums: tuple[list[int], ...]
    bits: tuple[int, int]  # below the largest exponent of the terms, of the result
    least: int = -10_000  # exponent of a subnormal operand, if all have one
    inside: bool = True  # whether C is a term of the first sum
    elements: int = 0  # outputs compared with an H200's


def halves(k: int) -> tuple[list[int], list[int]]:
    return list(range(k // 2)), list(range(k // 2, k))


WHOLE_16, WHOLE_32 = ([*range(16)],), ([*range(32)],)
H200 = 14 * 7_340_032
HMMA_FP16 = Published(minifloat.FP16, WHOLE_16, (25, 23), -14)
HMMA_BF16 = Published(minifloat.BF16, WHOLE_16, (25, 23), -126)
E4M3_AS_F16 = Published(minifloat.E4M3, WHOLE_16, (25, 23))
QMMA_25 = Published(minifloat.E4M3, WHOLE_32, (25, 23), -6)
EMULATED = Published(
    minifloat.E4M3,
    ([k for k in range(32) if k & 2 == 0], [k for k in range(32) if k & 2]),
    (25, 23),
    inside=False,
)
PUBLISHED = {
    "SM80_F16": Published(minifloat.FP16, halves(16), (24, 23), -14),
    "SM80_BF16": Published(minifloat.BF16, halves(16), (24, 23), -126),
    "SM89_E4M3": Published(minifloat.E4M3, halves(32), (13, 13), -6),
    "SM90_E4M3": EMULATED._replace(elements=H200),
    "SM90_F16": HMMA_FP16._replace(elements=H200),
    "SM90_BF16": HMMA_BF16._replace(elements=H200),
    "SM90_WGMMA_F16": HMMA_FP16._replace(elements=H200),
    "SM90_WGMMA_E4M3": Published(minifloat.E4M3, WHOLE_32, (13, 13), -6, elements=H200),
    "SM100_F16": HMMA_FP16,
    "SM100_BF16": HMMA_BF16,
    "SM100_E4M3": EMULATED,
    "SM100_TCGEN05_F16": HMMA_FP16,
    "SM100_TCGEN05_E4M3": QMMA_25,
    "SM120_F16": HMMA_FP16,
    "SM120_E4M3": QMMA_25,
    "SM90_E4M3_AS_F16": E4M3_AS_F16._replace(elements=H200),
    "SM100_E4M3_AS_F16": E4M3_AS_F16,
    "SM120_E4M3_AS_F16": E4M3_AS_F16,
}


@pytest.mark.parametrize("family", list(model_families(np.random.default_rng(0), minifloat.E4M3)))
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_models_against_rationals(model, family, exact_sum):
    """The chain of sums with the numbers that were published, not with the model's own."""
    published = PUBLISHED[model.name]
    form = published.operands
    assert model.operands is form
    rng = np.random.default_rng(50)
    a, b = model_families(rng, form)[family]
    c = np.ldexp(rng.standard_normal((5, 4)), rng.integers(-30, 20, (5, 4))).astype(np.float32)
    c[:, 0] = 0
    c[0] *= np.float32(2.0**-110)
    d = mma(a.view(OPERANDS[form.name]), b.view(OPERANDS[form.name]), c, model=model)
    fraction_bits, output_bits = published.bits
    step = sum(len(columns) for columns in published.sums)
    for i, j in np.ndindex(5, 4):
        x, y = operand_values(form, a[i]), operand_values(form, b[:, j])
        expected = float(c[i, j])
        for start in range(0, 64, step):
            t = expected if published.inside else 0.0
            for columns in published.sums:
                if np.isinf(t):  # and stays so, as the operands are finite
                    break
                k = [start + column for column in columns]
                t = exact_sum(
                    [x[q] for q in k],
                    [y[q] for q in k],
                    t,
                    fraction_bits=fraction_bits,
                    output_bits=output_bits,
                    least=published.least,
                )
                with np.errstate(over="ignore"):
                    t = float(np.float32(t))
            if not published.inside:
                t = float(np.float32(expected) + np.float32(t))
            expected = t
        assert bits(d[i, j]) == bits(np.array(expected, np.float32)), (i, j)


@pytest.mark.parametrize("spread", [0, 4, 12])
@pytest.mark.parametrize("start", ["zero", "multiples", "any"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_exact_chains_equal_the_careful_path(model, start, spread, monkeypatch):
    """Narrow and wide rows and columns side by side, over several steps, with accumulators that are
    zero, multiples of small powers of two, or anything; and a NaN."""
    rng = np.random.default_rng(spread)
    m, k, n = 24, 96, 30
    form = model.operands
    a, b = (
        minifloat.encode(np.ldexp(np.rint(rng.standard_normal(s) * 4),
                                  -rng.integers(0, spread + 1, s)), form, saturate=True)
        for s in ((m, k), (k, n))
    )  # fmt: skip
    a[::7], b[:, 5] = rng.integers(0, form.max_finite, (4, k)), rng.integers(0, 9, k)
    b[70, 11], a[4] = form.nan, 0
    a, b = a.view(OPERANDS[form.name]), b.view(OPERANDS[form.name])
    c = np.rint(rng.standard_normal((m, n)) * 64).astype(np.float32) / 64
    if start == "any":
        c = np.ldexp(rng.standard_normal((m, n)), rng.integers(-140, 30, (m, n)))
    c = np.zeros((m, n), np.float32) if start == "zero" else c.astype(np.float32)
    got = mma(a, b, c, model=model)
    np.testing.assert_array_equal(bits(got), bits(careful(monkeypatch, a, b, c, model=model)))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_batches_of_small_products_equal_the_careful_path(model, monkeypatch):
    rng = np.random.default_rng(51)
    form, shape = model.operands, (40, 16, 32)
    a = minifloat.encode(rng.standard_normal(shape), form)
    b = minifloat.encode(rng.standard_normal((40, 32, 8)), form)
    a[::3] = rng.integers(0, form.max_finite, a[::3].shape)
    a, b = a.view(OPERANDS[form.name]), b.view(OPERANDS[form.name])
    c = np.zeros((40, 16, 8), np.float32)
    c[::2] = rng.standard_normal((20, 16, 8))
    got = mma(a, b, c, model=model)
    np.testing.assert_array_equal(bits(got), bits(careful(monkeypatch, a, b, c, model=model)))


def test_sizes_are_those_of_integer_vectors():
    """A vector is integers times its least significant bit; its norm is rounded up."""
    rng = np.random.default_rng(54)
    code = np.concatenate([rng.integers(0, 0x7F, (32, 40)), rng.integers(0, 20, (32, 40))], axis=1)
    code = code.astype(np.uint8) | (rng.integers(0, 2, code.shape) << 7).astype(np.uint8)
    code[1:, :9] = 0
    code[:, 9] = 0x80
    found = exact_product.Sizes.of(code, MODELS["SM90_E4M3"])
    native = exact_product.Sizes.of(code, MODELS["SM120_E4M3"])
    for x in range(code.shape[1]):
        v = [Fraction(value) for value in values(code[:, x])]
        square = sum(value * value for value in v)
        assert square <= Fraction(float(found.norm[x])) ** 2 <= square * (1 + Fraction(1, 2**30))
        normal = [max(abs(value), Fraction(1, 64)) if value else value for value in v]
        square = sum(value * value for value in normal)
        assert square <= Fraction(float(native.norm[x])) ** 2 <= square * (1 + Fraction(1, 2**30))
        bit = int(found.low_bit[x])
        if not any(v):
            assert (found.norm[x], found.units[x]) == (0, 1)
            assert bit > 500  # the other vectors' least bits decide
            continue
        integers = [value / Fraction(2) ** bit for value in v]
        assert all(value.denominator == 1 for value in integers)
        assert any(value.numerator % 2 for value in integers)
        assert native.low_bit[x] == bit
        units = float(found.norm[x]) / 2.0**bit
        assert found.units[x] == units >= 1
    joined = found.joined()
    assert joined.low_bit == found.low_bit.min()
    norm = math.sqrt(math.fsum((found.norm**2).tolist()))
    assert norm <= joined.norm <= norm * (1 + 2.0**-30)


@pytest.mark.parametrize("name", ["SM90_E4M3", "SM90_F16", "SM90_BF16"])
def test_what_is_not_finite_has_no_size(name):
    form = MODELS[name].operands
    code = np.full((4, 3), 1 << form.fraction_bits, form.dtype)
    code[2, 1] = form.nan
    norm = exact_product.Sizes.of(code, MODELS[name]).norm
    bf16 = form is minifloat.BF16  # its products can fall below float32
    assert np.isinf(norm).tolist() == [bf16, True, bf16]


@pytest.mark.parametrize("shape", [(3, 60, 50), (2, 5, 7), (1, 1, 3000), (1, 3000, 1)])
def test_every_pair_that_reaches_the_limit_is_found(shape):
    """Sizes are powers of two, so that many pairs reach the limit exactly."""
    t, m, n = shape
    for seed, most in enumerate([8, 12, 16, 24, 24, 24]):
        rng = np.random.default_rng(seed)
        a, b = (np.exp2(rng.integers(0, most + 1, (t, x))) for x in (m, n))
        a[0] = 1
        for limit in (2.0**24, 0.0):
            found = np.zeros(shape, bool)
            for pairs in exact_product.pairs_above(a, b, limit):
                found[np.ix_(*pairs)] = True
            assert found[a[:, :, None] * b[:, None, :] >= limit].all()
    assert not list(exact_product.pairs_above(a[:, :0], b, 2.0**24))


def test_pairs_below_the_limit_are_left_out():
    small, large = np.full((1, 64), 2.0**4), np.full((1, 64), 2.0**4)
    assert not list(exact_product.pairs_above(small, large, 2.0**24))
    large[0, 5] = 2.0**20
    for a, b, want in ((small, large, (64, 1)), (large, small, (1, 64))):
        ((_, rows, columns),) = exact_product.pairs_above(a, b, 2.0**24)
        assert (len(rows), len(columns)) == want
    ((_, rows, columns),) = exact_product.pairs_above(large, large, 2.0**40)
    assert (rows.tolist(), columns.tolist()) == ([5], [5])


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_models_are_whole(model):
    columns = sorted(column for part in model.sums for column in part)
    assert columns == list(range(model.step))
    published = PUBLISHED[model.name]
    assert tuple(map(list, model.sums)) == published.sums
    assert model.evidence.elements == published.elements
    assert (model.evidence.elements > 0) == (model.evidence.verified is not None)
    assert model.evidence.source
    assert model.instruction
    assert model.sass


def one_dot(model: Model, x: list[float], y: list[float], c: float = 0.0) -> float:
    """The result of one instruction whose first columns are given and whose others are zero."""
    form = model.operands
    a, b = (
        minifloat.encode(np.array([*v, *[0.0] * (model.step - len(v))], np.float32), form)
        for v in (x, y)
    )
    dtype = OPERANDS[form.name]
    start = np.array([[c]], np.float32)
    return float(mma(a.view(dtype)[None], b.view(dtype)[:, None], start, model=model)[0, 0])


@pytest.mark.parametrize("name", [n for n, p in PUBLISHED.items() if p.inside])
def test_the_least_rows_whose_alignment_cuts_are_not_taken_for_exact(name):
    """2^(n+1) - 1 with n bits below the largest exponent: the alignment cuts the 1, and an exact
    sum would be truncated to less. The sizes of row and column multiply to little over 2^(n+1)."""
    n = PUBLISHED[name].bits[0]
    high, low = n // 2 + 1, (n + 1) // 2
    assert high + low == n + 1
    unit = 2.0**-6 if PUBLISHED[name].operands is minifloat.E4M3 else 1.0
    got = one_dot(MODELS[name], [unit * 2.0**high, unit], [unit * 2.0**low, -unit])
    assert got == unit * unit * 2.0 ** (n + 1)


@pytest.mark.parametrize("name", [n for n, p in PUBLISHED.items() if p.inside])
def test_an_accumulator_with_bits_below_the_unit_is_not_taken_for_exact(name):
    """32 * 32 + 1 - (1 + 2^-(n-4)) in one element of many: the alignment cuts the accumulator to
    -1. An exact sum, once truncated, is below 1024."""
    model = MODELS[name]
    x = np.zeros((3, model.step), np.float32)
    x[:, 0], x[:, 1] = 32, 1
    code = minifloat.encode(x, model.operands).view(OPERANDS[model.operands.name])
    c = np.zeros((3, 7), np.float32)
    c[1, 5] = -(1 + 2.0 ** (4 - PUBLISHED[name].bits[0]))
    want = np.full((3, 7), 1025)
    want[1, 5] = 1024
    assert np.array_equal(mma(code, code[[0] * 7].T, c, model=model), want)


@pytest.mark.parametrize("name", ["SM90_F16", "SM90_E4M3_AS_F16", "SM120_E4M3", "SM90_WGMMA_E4M3"])
def test_multiples_of_the_unit_take_the_exact_path(name, monkeypatch):
    """Integers of a few bits and integers as accumulators, 0 and 1 and large ones."""
    model, rng = MODELS[name], np.random.default_rng(55)
    x, y = (rng.integers(1, 4, s).astype(np.float32) for s in ((6, 64), (64, 6)))
    c = np.array([0, 1, -1, 63, -500, 2000] * 6, np.float32).reshape(6, 6)
    a, b = (minifloat.encode(v, model.operands).view(OPERANDS[model.operands.name]) for v in (x, y))

    def refused(*arguments):
        raise AssertionError("a sum was aligned")

    monkeypatch.setattr(tensor_core, "aligned_sum", refused)
    assert np.array_equal(mma(a, b, c, model=model), x @ y + c)


@pytest.mark.parametrize("name", [n for n, p in PUBLISHED.items() if not p.inside])
def test_the_least_rows_that_round_are_not_taken_for_exact(name):
    """4096^2 + 3 in units of 2^-18 is truncated to 4096^2 + 2; a float32 sum gives 4096^2 + 4. The
    sizes of row and column multiply to little over 2^24."""
    least = 2.0**-9
    got = one_dot(MODELS[name], [8.0, 3 * least], [8.0, least])
    assert got == (4096**2 + 2) * least**2


@pytest.mark.parametrize("name", [n for n, p in PUBLISHED.items() if p.inside])
def test_a_sum_of_the_largest_significands_does_not_overflow(name, exact_sum):
    """Every product and C have the largest significand, and the products one exponent with C."""
    published = PUBLISHED[name]
    largest = {"e4m3": 240.0, "fp16": 2047.0, "bf16": 255.0}[published.operands.name]
    c = float(np.ldexp(2 - 2.0**-23, 2 * (math.frexp(largest)[1] - 1)))
    fraction_bits, output_bits = published.bits
    want = c
    for columns in published.sums:
        x = [largest] * len(columns)
        want = exact_sum(x, x, want, fraction_bits=fraction_bits, output_bits=output_bits)
    x = [largest] * sum(map(len, published.sums))
    assert one_dot(MODELS[name], x, x, c) == want
    assert one_dot(MODELS[name], x, [-v for v in x], -c) == -want


@pytest.mark.parametrize(
    "name",
    [n for n, p in PUBLISHED.items() if p.inside and p.operands is not minifloat.BF16],
)
def test_the_exponent_of_a_subnormal_operand(name, exact_sum):
    """The product of the least subnormal by itself, with a C four times as large: all of C's bits
    count, unless the operands keep the least exponent of their format. BF16's product would be
    below float32."""
    published = PUBLISHED[name]
    least = float(minifloat.decode(np.array([1], published.operands.dtype), published.operands)[0])
    c = 4 * least * least * (1 + 2.0**-23)
    fraction_bits, output_bits = published.bits
    want = c
    for x in ([least], [0.0])[: len(published.sums)]:
        want = exact_sum(
            x,
            x,
            want,
            fraction_bits=fraction_bits,
            output_bits=output_bits,
            least=published.least,
        )
    assert one_dot(MODELS[name], [least], [least], c) == want


@pytest.mark.parametrize("output_bits", [13, 23])
def test_truncation_to_float32(output_bits, rounded):
    rng = np.random.default_rng(53)
    value = np.ldexp(rng.uniform(-2, 2, 500), rng.integers(-155, 127, 500))
    value[:200] = np.ldexp(rng.uniform(-2, 2, 200), rng.integers(-155, -120, 200))
    want = [float(rounded(Fraction(x), output_bits, -126, "rz")) for x in value.tolist()]
    got = aligned_sum.truncate(value.copy(), output_bits)
    assert got.dtype == np.float32
    assert got.tolist() == want


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_product_of_zero_has_no_exponent(model):
    """Zeros times the largest numbers leave an accumulator of any size as it is, but for the bits
    that the result of a sum cannot hold."""
    form, rng = model.operands, np.random.default_rng(52)
    published = PUBLISHED[model.name]
    exponents = np.arange(-126, 128)
    c = np.ldexp(rng.uniform(1, 2, (2, exponents.size)), exponents).astype(np.float32)
    zero = np.zeros((2, model.step), form.dtype).view(OPERANDS[form.name])
    top = np.full((model.step, exponents.size), form.max_finite, form.dtype)
    d = mma(zero, top.view(OPERANDS[form.name]), c, model=model)
    kept = published.bits[1] if published.inside else 23
    np.testing.assert_array_equal(bits(d), bits(c) & np.uint32(-(1 << (23 - kept)) & 0xFFFFFFFF))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_infinities_and_nan_follow_ieee(dtype):
    model = SM90_F16 if dtype is np.float16 else SM90_BF16
    inf, nan = np.inf, np.nan
    one = np.ones(16, np.float32)
    cases = [
        ({3: (inf, 1)}, 0.0, inf),
        ({3: (inf, -1)}, 0.0, -inf),
        ({3: (inf, 0)}, 0.0, nan),
        ({3: (inf, 1), 4: (-inf, 1)}, 0.0, nan),
        ({3: (nan, 0)}, 0.0, nan),
        ({3: (inf, 1)}, -inf, nan),
        ({}, inf, inf),
        ({}, nan, nan),
    ]
    for changes, c, expected in cases:
        a, b = one.copy(), one.copy()
        for k, (x, y) in changes.items():
            a[k], b[k] = x, y
        want = NAN if np.isnan(expected) else bits(np.array(expected, np.float32))
        for left, right in ((a, b), (b, a)):
            d = mma(
                left.astype(dtype)[None],
                right.astype(dtype)[:, None],
                np.array([[c]], np.float32),
                model=model,
            )
            assert bits(d)[0, 0] == want, (changes, c)


def test_bf16_overflows_to_infinity():
    a = np.full((1, 16), 3e38).astype(ml_dtypes.bfloat16)
    zero = np.zeros((1, 1), np.float32)
    assert mma(a, a.T, zero, model=SM90_BF16)[0, 0] == np.inf
    assert mma(-a, a.T, zero, model=SM90_BF16)[0, 0] == -np.inf


def test_operands_must_suit_the_model():
    with pytest.raises(TypeError, match="a must be float16 in native byte order, got uint8"):
        mma(
            np.zeros((1, 16), np.uint8),
            np.zeros((16, 1), np.float16),
            np.zeros((1, 1), np.float32),
            model=SM90_F16,
        )


@pytest.mark.parametrize("swapped", ["a", "b", "c"])
def test_another_byte_order_is_refused(swapped):
    """Its bytes, viewed as encodings, would be other numbers."""
    args: dict[str, Any] = {
        "a": np.ones((16, 16), np.float16),
        "b": np.ones((16, 8), np.float16),
        "c": np.zeros((16, 8), np.float32),
    }
    assert (mma(**args, model=SM90_F16) == 16).all()
    args[swapped] = args[swapped].astype(args[swapped].dtype.newbyteorder())
    with pytest.raises(TypeError, match=f"{swapped} must be float.*, got [<>]f"):
        mma(**args, model=SM90_F16)


def test_the_model_is_not_its_name():
    one = np.full((1, 32), 0x38, np.uint8)
    with pytest.raises(TypeError, match=r"model must be a Model .*SM90_E4M3.*got 'SM90_E4M3'"):
        mma(one, one.T, np.zeros((1, 1), np.float32), model="SM90_E4M3")  # type: ignore[arg-type]
