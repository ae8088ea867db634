"""One-input operations that are compared on all 2^32 encodings of a float32.

A result is one 32-bit word. A conversion to a pair is run twice, with the input as the high and as
the low half and 1.0 as the other, so that both halves see every input and no exchange of them goes
unnoticed; `_pair8` and `_pair16` say how the two runs share the word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import bf16, e4m3, e5m2, fp16, libdevice, minifloat, mufu
from sparse_mla_verify.hardware.hashing import (
    BLOCK,
    HEAD,
    block_hash,
    head_hash,
)

# Elements that a model gets at once: its temporaries stay in a core's cache.
_PIECE = 1 << 15

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Sweep:
    """An operation on all encodings.

    Attributes:
        name: identifier.
        group: the group of the command line that it belongs to.
        instruction: the PTX, or the function, that the GPU runs.
        sass: text that its machine code must have.
        model: float32 inputs to the words that the GPU should give.
        tables: the constants that decide the model's results, for their hash.
    """

    name: str
    group: str
    instruction: str
    sass: str
    model: Callable[[NDArray[np.float32]], Words]
    tables: Any

    def expected(self, head: int) -> Words:
        """The model's words for the 2^23 encodings of a sign and exponent, 0 to 511."""
        encodings = np.arange(head << 23, (head + 1) << 23, dtype=np.uint32)
        with np.errstate(all="ignore"):
            pieces = [
                self.model(encodings[i : i + _PIECE].view(np.float32))
                for i in range(0, HEAD, _PIECE)
            ]
        return np.concatenate(pieces)


def expected_hash(name: str, head: int) -> int:
    """The hash of `Sweep.expected`, by the operation's name: the work of a process."""
    words = SWEEPS[name].expected(head).reshape(-1, BLOCK)
    return head_hash(np.array([block_hash(block) for block in words]))


def _float(function: Callable[[Any], Any]) -> Callable[[NDArray[np.float32]], Words]:
    def words(x: NDArray[np.float32]) -> Words:
        return np.asarray(function(x)).view(np.uint32)

    return words


def _pair8(encode: Callable[[Any], Any]) -> Callable[[NDArray[np.float32]], Words]:
    """(x, 1.0) in the upper 16 bits, (1.0, x) in the lower."""
    one = int(encode(np.ones(1, np.float32))[0])

    def words(x: NDArray[np.float32]) -> Words:
        code = encode(x).astype(np.uint32)
        return np.asarray(code << np.uint32(24) | np.uint32(one << 16 | one << 8) | code)

    return words


def _pair16(x: NDArray[np.float32]) -> Words:
    """The high half of (x, 1.0) and the low half of (1.0, x)."""
    code = bf16.encode(x).view(np.uint16).astype(np.uint32)
    return np.asarray(code << np.uint32(16) | code)


def _fp16(x: NDArray[np.float32]) -> Words:
    return np.asarray(fp16.encode(x).view(np.uint16).astype(np.uint32))


def _mufu(name: str, sass: str, tables: mufu.Quadratic) -> Sweep:
    instruction = f"{name}.approx.ftz.f32"
    return Sweep(name, "mufu", instruction, sass, _float(getattr(mufu, name)), tables)


_LOG2_TABLES = [hex(bits) for bits in libdevice._LOG2_COEFFICIENTS.view(np.uint32).tolist()]

_ALL = (
    _mufu("ex2", "MUFU.EX2", mufu.EX2),
    _mufu("lg2", "MUFU.LG2", mufu.LG2),
    _mufu("rcp", "MUFU.RCP", mufu.RCP),
    _mufu("rsqrt", "MUFU.RSQ", mufu.RSQRT),
    Sweep("cvt_e4m3x2", "convert", "cvt.rn.satfinite.e4m3x2.f32", "F2FP.SATFINITE.E4M3.F32",
          _pair8(e4m3.encode), minifloat.E4M3),
    Sweep("cvt_e5m2x2", "convert", "cvt.rn.satfinite.e5m2x2.f32", "F2FP.SATFINITE.E5M2.F32",
          _pair8(e5m2.encode), minifloat.E5M2),
    Sweep("cvt_bf16x2", "convert", "cvt.rn.bf16x2.f32", "F2FP.BF16.F32",
          _pair16, minifloat.BF16),
    Sweep("cvt_f16", "convert", "cvt.rn.f16.f32", "F2F.F16.F32", _fp16, minifloat.FP16),
    Sweep("log2f", "arithmetic", "libdevice __nv_log2f (cute.math.log2)", "FFMA",
          _float(libdevice.log2f), _LOG2_TABLES),
)  # fmt: skip
SWEEPS = {sweep.name: sweep for sweep in _ALL}
