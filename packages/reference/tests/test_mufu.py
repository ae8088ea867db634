"""The MUFU models against recorded results, encodings compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparse_mla_reference import _mufu_tables, mufu

DATA = Path(__file__).parent / "data"
FRACTIONS = np.arange(1 << 23, dtype=np.float64) / 2.0**23
NAN, INF, ONE, MIN_NORMAL = 0x7FFFFFFF, 0x7F800000, 0x3F800000, 0x00800000


def floats(*bits: int) -> np.ndarray:
    return np.array(bits, dtype=np.uint32).view(np.float32)


def bits_of(x: np.ndarray) -> list[str]:
    assert x.dtype == np.float32
    return [f"{b:08X}" for b in np.atleast_1d(x).view(np.uint32).tolist()]


def hex_of(*bits: int) -> list[str]:
    return [f"{b:08X}" for b in bits]


@pytest.fixture(scope="module")
def octave() -> np.ndarray:
    """uint32 [2^23]: what an H200 returned for 2^f, f = 0, 2^-23, ..., 1 - 2^-23.

    The recording (NVIDIA H200, driver 580.159) holds the difference from the rounded 2^f. No 2^f
    of the octave lies closer than 28 float64 units to a rounding boundary, so any libm's exp2 will
    do to undo it.
    """
    delta = np.load(DATA / "mufu_ex2_octave_h200.npz")["delta"].astype(np.int64)
    nearest = np.rint(np.exp2(FRACTIONS) * 2.0**23).astype(np.int64)
    return (nearest + delta - (1 << 23) + ONE).astype(np.uint32)


class TestEx2:
    def test_octave(self, octave: np.ndarray) -> None:
        # x in [1, 2) has the fraction's own spacing: all 2^23 fractions, one exponent up.
        got = mufu.ex2((1.0 + FRACTIONS).astype(np.float32)).view(np.uint32)
        assert np.count_nonzero(got != octave + np.uint32(1 << 23)) == 0

    def test_small_positive(self, octave: np.ndarray) -> None:
        # Below 1 the argument has bits under 2^-23, which are cut off.
        x = np.arange(0x33000000, ONE, 97, dtype=np.uint32).view(np.float32)
        t = np.floor(x.astype(np.float64) * 2.0**23).astype(np.int64)
        assert np.array_equal(mufu.ex2(x).view(np.uint32), octave[t])

    def test_negative(self, octave: np.ndarray) -> None:
        # Negative arguments: the complement of t, except at whole numbers.
        x = np.arange(0xB3000000, 0xC3170000, 1009, dtype=np.uint32).view(np.float32)
        t = np.floor(np.abs(x.astype(np.float64)) * 2.0**23).astype(np.int64)
        k = np.where(t & 0x7FFFFF, -t - 1, -t)
        want = octave[k & 0x7FFFFF].astype(np.int64) + (k >> 23 << 23)
        want[want < MIN_NORMAL] = 0
        assert np.array_equal(mufu.ex2(x).view(np.uint32), want.astype(np.uint32))

    @pytest.mark.parametrize(
        ("x", "want"),
        [
            (0x00000000, ONE),
            (0x80000000, ONE),
            (0x00000001, ONE),
            (0x807FFFFF, ONE),
            (0x7F800000, INF),
            (0xFF800000, 0),
            (0x7FC00000, NAN),
            (0x7F800001, NAN),
            (0xFFFFFFFF, NAN),
            (0x3F800000, 0x40000000),
            (0xBF800000, 0x3F000000),
            (0x42FE0000, 0x7F000000),  # 127
            (0x43000000, INF),  # 128
            (0xC2FC0000, MIN_NORMAL),  # -126
            (0xC2FC0001, 0),  # below -126: flushed
            (0xC3160000, 0),  # -150
            (0x7F7FFFFF, INF),
            (0xFF7FFFFF, 0),
        ],
    )
    def test_special(self, x: int, want: int) -> None:
        assert bits_of(mufu.ex2(floats(x))) == hex_of(want)

    def test_whole_numbers_are_exact(self) -> None:
        whole = np.arange(-126, 128)
        assert np.array_equal(mufu.ex2(whole.astype(np.float32)), np.exp2(whole).astype(np.float32))

    def test_shape_is_kept_and_input_untouched(self) -> None:
        x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
        before = x.copy()
        y = mufu.ex2(x)
        assert y.shape == (4, 2, 3)
        assert np.array_equal(x, before)
        assert y[1, 0, 2] == mufu.ex2(x[1, 0, 2])
        assert mufu.ex2(np.float32(2.0)).shape == ()
        assert mufu.ex2(np.zeros((0, 3), np.float32)).shape == (0, 3)

    def test_longer_than_a_block(self) -> None:
        x = np.linspace(-140, 140, 100_003, dtype=np.float32)
        parts = [mufu.ex2(x[i : i + 777]) for i in range(0, x.size, 777)]
        assert np.array_equal(mufu.ex2(x), np.concatenate(parts))

    @pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
    def test_other_types_are_refused(self, dtype: type) -> None:
        with pytest.raises(TypeError, match=r"x must be a float32 array, got"):
            mufu.ex2(np.ones(3, dtype))


def test_ex2_coefficients_have_the_datapaths_widths() -> None:
    assert len(_mufu_tables.EX2) == 64
    a, b, c = np.array(_mufu_tables.EX2).T
    assert a.min() >= 1 << 25
    assert a.max() < 1 << 26
    assert b.min() > 0
    assert b.max() < 1 << 16
    assert c.min() > 0
    assert c.max() < 1 << 10


def test_truncating_square_is_at_most_its_dropped_bits_low() -> None:
    # 17 rows, each cut by less than 1, halved and rounded down: less than 9.5 under r^2 / 2^19.
    r = np.arange(1 << 17, dtype=np.float64)
    loss = r * r / 2.0**19 - mufu.truncating_square(17)
    assert loss.min() >= 0
    assert loss.max() < 9.5
