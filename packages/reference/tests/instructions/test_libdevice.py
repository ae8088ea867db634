"""log2f: special values, exact powers, one ULP everywhere, its step off 1."""

import hashlib

import numpy as np
import pytest

from sparse_mla_reference.instructions.libdevice import log2f


def test_specials():
    x = np.array([np.inf, -np.inf, np.nan, -1.0, 0.0, -0.0, -(2.0**-140)], np.float32)
    got = log2f(x).view(np.uint32).tolist()
    nan, inf, low = 0x7FFFFFFF, 0x7F800000, 0xFF800000
    assert got == [inf, nan, nan, nan, low, low, nan]


def test_powers_of_two_are_exact():
    k = np.arange(-149, 128)
    np.testing.assert_array_equal(log2f(np.ldexp(1.0, k).astype(np.float32)), k)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0x00000001, 0x00800000), (0x00800000, 0x3F000000), (0x3F000000, 0x40000000),
     (0x40000000, 0x43E00000), (0x43E00000, 0x4F000000), (0x4F000000, 0x7F800000)],
    ids=["subnormal", "small", "around one", "below 448", "totals", "large"],
)  # fmt: skip
def test_within_one_ulp(low, high):
    """The CUDA C++ Programming Guide states 1 ulp for log2f over the full range."""
    rng = np.random.default_rng(4)
    x = rng.integers(low, high, 150_000, np.uint32).view(np.float32)
    exact = np.log2(x.astype(np.float64))
    got = log2f(x).astype(np.float64)
    nonzero = exact != 0
    ulp = np.spacing(np.abs(exact[nonzero]).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(got - exact)[nonzero] / ulp) <= 1.0
    assert (got[~nonzero] == 0).all()


def test_mantissas_switch_at_sqrt_half():
    """The reduction takes x just below sqrt(1/2) from the binade under it; 0x3F3504F3 is the first
    float32 above, published in the algorithm."""
    edge = np.array([0x3F3504F2, 0x3F3504F3, 0x3F3504F4], np.uint32).view(np.float32)
    got = log2f(edge).astype(np.float64)
    assert np.max(np.abs(got - np.log2(edge.astype(np.float64)))) < 2.0**-24
    assert (np.diff(got) >= 0).all()


def test_input_dtype_is_checked():
    with pytest.raises(TypeError, match="x must be float32, got float64"):
        log2f(np.array([1.0]))


def test_the_last_bit_of_every_coefficient():
    """Both ends of the reduced range, where a coefficient that is one bit off shows. The digest is
    that of the model which gave an H200's result for each of the 2^32 inputs."""
    ends = [np.arange(n, n + (1 << 18), dtype=np.uint32) for n in (0x3F3504F3, 0x3FB104F3)]
    switches = (0x003504F3 + (np.arange(1, 254) << 23)).astype(np.uint32)  # in every binade
    results = log2f(np.concatenate([*ends, switches]).view(np.float32))
    digest = hashlib.sha256(results.astype("<f4").tobytes()).hexdigest()
    assert digest == "8d2b7c442260fd393fa97507b7745e270b49fb56d80cac20028bade0593a4c5c"
