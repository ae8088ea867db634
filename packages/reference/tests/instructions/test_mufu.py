"""The MUFU models against recorded results, encodings compared.

The recordings are an NVIDIA H200's (``data/mufu_h200.json`` has driver, versions and PTX), made and
condensed by ``tools/probe_mufu.py``; the EX2 octave is an earlier one (driver 580.159). Tables give
results one by one; hashes stand for all inputs of a sign and exponent. ``tools/check_mufu.py``
compares all of them, the tests here one binade of each kind.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sparse_mla_reference import mufu
from sparse_mla_reference.instructions import _mufu_tables

HERE = Path(__file__).parents[1]
DATA = HERE / "data"
FRACTIONS = np.arange(1 << 23, dtype=np.float64) / 2.0**23
NAN, INF, ONE, MIN_NORMAL, MAX = 0x7FFFFFFF, 0x7F800000, 0x3F800000, 0x00800000, 0x7F7FFFFF
SIGN = 0x80000000
UNARY = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "exp")
NANS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF)


def tool(name: str) -> ModuleType:
    path = HERE.parent / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


probe = tool("probe_mufu")
check = tool("check_mufu")


@pytest.fixture(scope="module")
def hashes() -> dict[str, np.ndarray]:
    with np.load(DATA / "mufu_hashes_h200.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def octave() -> np.ndarray:
    """uint32 [2^23]: what an H200 returned for 2^f, f = 0, 2^-23, ..., 1 - 2^-23.

    The recording holds the difference from the rounded 2^f. No 2^f of the octave lies closer than
    28 float64 units to a rounding boundary, so any libm's exp2 will do to undo it.
    """
    delta = np.load(DATA / "mufu_ex2_octave_h200.npz")["delta"].astype(np.int64)
    nearest = np.rint(np.exp2(FRACTIONS) * 2.0**23).astype(np.int64)
    return (nearest + delta - (1 << 23) + ONE).astype(np.uint32)


def floats(*bits: int) -> np.ndarray:
    return np.array(bits, dtype=np.uint32).view(np.float32)


def binade(exponent: int) -> np.ndarray:
    return (np.arange(1 << 23, dtype=np.uint32) + np.uint32(exponent + 127 << 23)).view(np.float32)


def different(got: np.ndarray, want: np.ndarray) -> int:
    assert got.dtype == np.float32
    assert want.dtype == np.uint32
    return int(np.count_nonzero(got.view(np.uint32) != want))


def bits_of(x: np.ndarray) -> list[str]:
    assert x.dtype == np.float32
    return [f"{b:08X}" for b in np.atleast_1d(x).view(np.uint32).tolist()]


# Recorded tables: every mantissa of the binades that determine the coefficients.


def test_ex2_octave(octave: np.ndarray) -> None:
    # x in [1, 2) has the fraction's own spacing: all 2^23 fractions, one exponent up.
    assert different(mufu.ex2(binade(0)), octave + np.uint32(1 << 23)) == 0


@pytest.mark.parametrize(
    ("name", "exponent"),
    [("lg2", 0), ("rcp", 0), ("rsqrt", 0), ("rsqrt", 1), ("sqrt", 0), ("sqrt", 1)],
)
def test_table(name: str, exponent: int) -> None:
    stored = np.load(DATA / f"mufu_{name}_h200.npz")[f"exponent_{exponent}"]
    assert different(getattr(mufu, name)(binade(exponent)), probe.unpack(stored)) == 0


# Recorded hashes: every sign and exponent.


@pytest.mark.parametrize("suffix", ["_ftz", ""])
@pytest.mark.parametrize("name", UNARY)
def test_samples_of_every_exponent(name: str, suffix: str, hashes: dict[str, np.ndarray]) -> None:
    got = getattr(mufu, name)(probe.sample_inputs().view(np.float32), ftz=bool(suffix))
    wrong = np.nonzero(
        probe.sample_hashes(got.view(np.uint32)) != hashes[f"{name}{suffix}_samples"]
    )
    assert wrong[0].tolist() == []


# Each operation where it does something of its own: EX2 with whole and fractional bits of both
# signs and at its underflow (133: |x| in [64, 128)), LG2 on both sides of 1 and where the sum has
# few fraction bits, RCP and RSQRT at the ends of the range and in subnormals.
@pytest.mark.parametrize(
    ("operation", "head"),
    [
        ("ex2_ftz", 126),
        ("ex2_ftz", 256 + 130),
        ("ex2_ftz", 256 + 133),
        ("ex2", 256 + 134),
        ("exp_ftz", 129),
        ("exp", 256 + 133),
        ("lg2_ftz", 126),
        ("lg2_ftz", 60),
        ("lg2", 0),
        ("rcp_ftz", 253),
        ("rcp_ftz", 256 + 100),
        ("rcp", 254),
        ("rcp", 256),
        ("rsqrt_ftz", 254),
        ("rsqrt", 0),
        ("sqrt_ftz", 1),
        ("sqrt", 0),
    ],
)
def test_whole_binade(operation: str, head: int, hashes: dict[str, np.ndarray]) -> None:
    assert check.head_hash(operation, head) == hashes[operation][head]


@pytest.mark.parametrize("family", probe.DIV_FAMILIES)
@pytest.mark.parametrize("suffix", ["_ftz", ""])
@pytest.mark.parametrize("name", ["div_approx", "div_full"])
def test_div(name: str, suffix: str, family: str, hashes: dict[str, np.ndarray]) -> None:
    a, b = (operand.view(np.float32) for operand in probe.div_operands(family))
    got = getattr(mufu, name)(a, b, ftz=bool(suffix))
    want = hashes[f"{name}{suffix}_{family}"]
    assert np.array_equal(probe.block_hashes(got.view(np.uint32)), want)


def test_a_wrong_bit_changes_a_hash() -> None:
    results = mufu.ex2(binade(0)).view(np.uint32).copy()
    before = probe.row_hashes(probe.block_hashes(results))
    results[123_456] ^= 1
    assert probe.row_hashes(probe.block_hashes(results)) != before
    results[123_456] ^= 1
    assert probe.row_hashes(probe.block_hashes(results)) == before


def test_recording_says_where_it_is_from() -> None:
    meta = json.loads((DATA / "mufu_h200.json").read_text())
    assert meta["gpu"] == "NVIDIA H200"
    assert meta["compute_capability"] == "90"
    assert meta["unary"] == probe.UNARY
    assert meta["binary"] == probe.BINARY


# Written out: what the documentation promises.


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("ex2", 0, ONE),
        ("ex2", SIGN, ONE),
        ("ex2", 1, ONE),
        ("ex2", 0x807FFFFF, ONE),
        ("ex2", INF, INF),
        ("ex2", SIGN | INF, 0),
        ("ex2", 0xBF800000, 0x3F000000),
        ("ex2", 0x42FE0000, 0x7F000000),  # 127
        ("ex2", 0x43000000, INF),  # 128
        ("ex2", 0xC2FC0000, MIN_NORMAL),  # -126
        ("ex2", 0xC2FC0001, 0),
        ("ex2", MAX, INF),
        ("ex2", SIGN | MAX, 0),
        ("lg2", 0, SIGN | INF),
        ("lg2", SIGN, SIGN | INF),
        ("lg2", 0x807FFFFF, SIGN | INF),
        ("lg2", 0x80800000, NAN),
        ("lg2", ONE, 0),
        ("lg2", INF, INF),
        ("lg2", SIGN | INF, NAN),
        ("rcp", 0, INF),
        ("rcp", SIGN, SIGN | INF),
        ("rcp", 0x807FFFFF, SIGN | INF),
        ("rcp", INF, 0),
        ("rcp", SIGN | INF, SIGN),
        ("rcp", 0x7E800000, MIN_NORMAL),  # 2^126
        ("rcp", 0xFE800001, SIGN),
        ("rcp", SIGN | ONE, SIGN | ONE),
        ("rsqrt", 0, INF),
        ("rsqrt", SIGN, SIGN | INF),
        ("rsqrt", 0x807FFFFF, SIGN | INF),
        ("rsqrt", 0x80800000, NAN),
        ("rsqrt", INF, 0),
        ("rsqrt", SIGN | INF, NAN),
        ("rsqrt", ONE, ONE),
        ("rsqrt", 0x40800000, 0x3F000000),  # 4
        ("sqrt", 0, 0),
        ("sqrt", 0x807FFFFF, SIGN),
        ("sqrt", 0x80800000, NAN),
        ("sqrt", INF, INF),
        ("sqrt", SIGN | INF, NAN),
        ("sqrt", ONE, ONE),
    ],
)
def test_special(name: str, x: int, want: int) -> None:
    assert bits_of(getattr(mufu, name)(floats(x))) == [f"{want:08X}"]


@pytest.mark.parametrize("ftz", [True, False])
@pytest.mark.parametrize("name", UNARY)
def test_every_nan_becomes_the_canonical_one(name: str, ftz: bool) -> None:
    assert bits_of(getattr(mufu, name)(floats(*NANS), ftz=ftz)) == ["7FFFFFFF"] * len(NANS)


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("ex2", -149.0, 2.0**-149),
        ("lg2", 2.0**-149, -149.0),
        ("rcp", 2.0**127, 2.0**-127),
        ("rcp", 2.0**-127, 2.0**127),
        ("rsqrt", 2.0**-148, 2.0**74),
        ("sqrt", 2.0**-148, 2.0**-74),
    ],
)
def test_without_ftz_subnormals_count(name: str, x: float, want: float) -> None:
    function = getattr(mufu, name)
    assert function(np.float32(x), ftz=False) == np.float32(want)
    assert function(np.float32(x)) != np.float32(want)


def test_ftz_is_the_default_of_what_flushes_its_result() -> None:
    """e^-100 and 2^-126 / 2 are subnormal."""
    x, least, two = (np.array(v, np.float32) for v in (-100, 2.0**-126, 2))
    assert mufu.exp(x) == 0
    assert abs(mufu.exp(x, ftz=False) / np.exp(x.astype(np.float64)) - 1) < 0.05
    for divide in (mufu.div_approx, mufu.div_full):
        assert divide(least, two) == 0
        assert divide(least, two, ftz=False) == np.float32(2.0**-127)


def test_div_over_the_divisors_range() -> None:
    a, b = np.array(2.0**126, np.float32), np.array(1.5 * 2.0**126, np.float32)
    assert mufu.div_approx(a, b) == 0
    assert abs(mufu.div_full(a, b) - 2 / 3) < 2.0**-22


def test_ex2_exact_at_whole_numbers() -> None:
    whole = np.arange(-126, 128)
    want = np.ldexp(np.float32(1), whole).view(np.uint32)
    assert different(mufu.ex2(whole.astype(np.float32)), want) == 0


# Arguments.


@pytest.mark.parametrize("name", UNARY)
def test_shape_is_kept_and_input_untouched(name: str) -> None:
    function = getattr(mufu, name)
    x = np.linspace(0.5, 3, 24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    before = x.copy()
    y = function(x)
    assert y.shape == (4, 2, 3)
    assert np.array_equal(x, before)
    assert y[1, 0, 2] == function(x[1, 0, 2])
    assert function(np.float32(2.0)).shape == ()
    assert function(np.zeros((0, 3), np.float32)).shape == (0, 3)


def test_longer_than_a_block() -> None:
    x = np.linspace(-140, 140, 100_003, dtype=np.float32)
    parts = [mufu.ex2(x[i : i + 777]) for i in range(0, x.size, 777)]
    assert np.array_equal(mufu.ex2(x), np.concatenate(parts))


def test_div_broadcasts() -> None:
    a, b = np.ones((3, 1), np.float32), np.full((1, 4), 2, np.float32)
    assert np.array_equal(mufu.div_full(a, b), np.full((3, 4), 0.5, np.float32))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
@pytest.mark.parametrize("name", UNARY)
def test_other_types_are_refused(name: str, dtype: type) -> None:
    with pytest.raises(TypeError, match=r"x must be float32, got"):
        getattr(mufu, name)(np.ones(3, dtype))


@pytest.mark.parametrize("name", ["div_approx", "div_full"])
def test_div_refuses_other_types(name: str) -> None:
    one = np.float32(1)
    with pytest.raises(TypeError, match=r"a must be float32, got float64"):
        getattr(mufu, name)(np.float64(1), one)
    with pytest.raises(TypeError, match=r"b must be float32, got float64"):
        getattr(mufu, name)(one, np.float64(1))


# The datapath.


@pytest.mark.parametrize(
    ("name", "segments"), [("EX2", 64), ("LG2", 64), ("RCP", 128), ("RSQRT", 128), ("SQRT", 128)]
)
def test_coefficients_have_the_datapaths_widths(name: str, segments: int) -> None:
    rows = np.array(getattr(_mufu_tables, name))
    assert rows.shape == (segments, 3)
    a, b, c = rows.T
    assert a.min() >= 0
    assert a.max() < 1 << 26
    assert np.abs(b).max() < 1 << 17
    assert np.abs(c).max() < 1 << 10
    # Each has one sign throughout: that of the function's slope and curvature.
    assert abs(np.sign(b).sum()) == segments
    assert abs(np.sign(c).sum()) == segments


def test_truncating_square_is_below_the_square_by_less_than_its_rows() -> None:
    # 17 rows, each cut by less than 1, halved and rounded down: less than 9.5 under r^2 / 2^19.
    r = np.arange(1 << 17, dtype=np.float64)
    loss = r * r / 2.0**19 - mufu.truncating_square()
    assert loss.min() >= 0
    assert loss.max() < 9.5
