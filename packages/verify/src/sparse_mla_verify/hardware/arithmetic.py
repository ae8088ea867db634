"""Two- and three-input float32 operations, on operands chosen to make rounding hard."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import float32
from sparse_mla_reference.instructions.fma import fma

# 8 families x 12 chunks x 2^20 operands: 100,663,296.
CHUNK = 1 << 20
CHUNKS = 12

Floats = NDArray[np.float32]
Rng = np.random.Generator
Operands = tuple[Floats, Floats, Floats]


@dataclass(frozen=True)
class Operation:
    """A float32 operation with a single rounding, to nearest even; subnormals kept.

    Attributes:
        name: identifier.
        instruction: its PTX.
        sass: text that its machine code must have.
        model: of operands a, b, c; c is unused where the operation takes two.
    """

    name: str
    instruction: str
    sass: str
    model: Callable[[Floats, Floats, Floats], Any]


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("add", "add.rn.f32", "FADD", lambda a, b, c: float32.add(a, b)),
        Operation("mul", "mul.rn.f32", "FMUL", lambda a, b, c: float32.mul(a, b)),
        Operation("fma", "fma.rn.f32", "FFMA", fma),
        Operation("div", "div.rn.f32", "MUFU.RCP", lambda a, b, c: float32.div(a, b)),
    )
}


def _float(rng: Rng, low: int, high: int, count: int = CHUNK) -> Floats:
    """Random signs and fractions, exponents from low to high inclusive (-127: subnormals)."""
    field = rng.integers(low + 127, high + 128, count, dtype=np.uint32)
    rest = rng.integers(0, 1 << 32, count, dtype=np.uint32) & np.uint32(0x807FFFFF)
    return np.asarray(rest | field << np.uint32(23)).view(np.float32)


def _nudged(rng: Rng, x: Floats, most: int = 2) -> Floats:
    """x with its encoding moved by up to `most`."""
    step = rng.integers(-most, most + 1, x.size, dtype=np.int64)
    return (x.view(np.uint32).astype(np.int64) + step).astype(np.uint32).view(np.float32)


def _uniform(rng: Rng) -> Operands:
    """Every encoding alike, NaN and infinities among them."""
    a, b, c = (rng.integers(0, 1 << 32, CHUNK, dtype=np.uint32).view(np.float32) for _ in "abc")
    return a, b, c


def _close(rng: Rng) -> Operands:
    """Exponents within two of each other: sums that carry or cancel a few bits."""
    return _float(rng, -1, 1), _float(rng, -1, 1), _float(rng, -2, 2)


def _ties(rng: Rng) -> Operands:
    """Sums whose tail is half a unit in the last place, or next to it."""
    a = _float(rng, -20, 20)
    half = np.abs(np.spacing(a)) * np.float32(0.5)
    b = _nudged(rng, half, 1) * rng.choice(np.array([-1, 1], np.float32), CHUNK)
    one = (1 + rng.integers(-3, 4, CHUNK) * 2.0**-23).astype(np.float32)
    pick = rng.random(CHUNK) < 0.5
    # fma: a near-tie between the product's own tail and c.
    return a, np.where(pick, b, one), np.where(pick, _nudged(rng, half, 1), b)


def _cancelling(rng: Rng) -> Operands:
    """b near -a, and c near -a b: what is left is the operands' last bits."""
    a, b = _float(rng, -30, 30), _float(rng, -30, 30)
    pick = rng.random(CHUNK) < 0.5
    b = np.where(pick, _nudged(rng, -a), b)
    return a, b, _nudged(rng, -(a * b))


def _quotients(rng: Rng) -> Operands:
    """a = q b rounded, for q of 24 and of 25 bits: quotients at or next to a tie."""
    b = _float(rng, -40, 40)
    q = _float(rng, -40, 40).astype(np.float64)
    tail = rng.integers(0, 2, CHUNK) * 2.0**-24
    a = (q * (1 + tail) * b.astype(np.float64)).astype(np.float32)
    return _nudged(rng, a, 1), b, _float(rng, -80, 80)


def _subnormal(rng: Rng) -> Operands:
    """Operands or results below 2^-126."""
    a = _float(rng, -127, -100)
    b = np.where(rng.random(CHUNK) < 0.5, _float(rng, -127, -110), _float(rng, -30, 30))
    return a, b, np.where(rng.random(CHUNK) < 0.5, _float(rng, -127, -120), a)


def _overflow(rng: Rng) -> Operands:
    """Results about 2^128."""
    a = _float(rng, 120, 127)
    b = np.where(rng.random(CHUNK) < 0.5, _float(rng, 120, 127), _float(rng, -4, 8))
    return a, b, _float(rng, 120, 127)


def _specials(rng: Rng) -> Operands:
    """Zeros, infinities, NaN of both signs and kinds, extremes, ones; some any number."""
    bits = [0, 1, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000]
    bits += [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    values = np.array(bits + [b | 1 << 31 for b in bits], np.uint32).view(np.float32)

    def draw() -> Floats:
        chosen = rng.integers(0, values.size, CHUNK)
        return np.where(rng.random(CHUNK) < 0.8, values[chosen], _float(rng, -127, 128))

    return draw(), draw(), draw()


OPERAND_FAMILIES: dict[str, Callable[[Rng], Operands]] = {
    "uniform": _uniform,
    "close": _close,
    "ties": _ties,
    "cancelling": _cancelling,
    "quotients": _quotients,
    "subnormal": _subnormal,
    "overflow": _overflow,
    "specials": _specials,
}


@np.errstate(all="ignore")
def operands(family: str, chunk: int) -> Operands:
    """The operands of a chunk: three float32 [CHUNK], the same at every call."""
    return OPERAND_FAMILIES[family](np.random.default_rng([*family.encode(), chunk]))


@np.errstate(all="ignore")
def expected(name: str, family: str, chunk: int) -> tuple[Operands, NDArray[np.uint32]]:
    """A chunk's operands and the encodings of an operation's results: the work of a process."""
    a, b, c = operands(family, chunk)
    return (a, b, c), np.asarray(OPERATIONS[name].model(a, b, c)).view(np.uint32)
