"""Inputs of the recorded run, made from seeds."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.recording import input_digest
from sparse_mla_reference import e4m3

HEADS, WIDTH, CACHE_ROWS, COLUMNS = 32, 256, 2048, 576
COUNTS = (256, 100, 1, 0)  # four full blocks; one and a part; a single key; none
NAN = np.uint8(e4m3.NAN)


@dataclass(frozen=True)
class Case:
    """Arguments of ``decode_attention``."""

    name: str
    query: NDArray[np.uint8]
    kv: NDArray[np.uint8]
    rows: NDArray[np.int32]
    valid: NDArray[np.int32]
    scale_log2: np.float32
    out_scale: np.float32

    def digest(self) -> str:
        """Of all inputs."""
        scales = np.array([self.scale_log2, self.out_scale])
        return input_digest(self.query, self.kv, self.rows, self.valid, scales)


Values = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.uint8]]


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return e4m3.encode(rng.standard_normal(shape))


def _codes(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Every finite encoding alike, subnormals and +-448 included."""
    code = rng.integers(0, 254, shape)
    return (code + (code >= NAN)).astype(np.uint8)


def _case(name: str, seed: int, values: Values, scale_log2: float, out_scale: float) -> Case:
    rng = np.random.default_rng(seed)
    query = values(rng, (len(COUNTS), HEADS, COLUMNS))
    kv = values(rng, (CACHE_ROWS, COLUMNS))
    rows = np.stack([rng.permutation(CACHE_ROWS)[:WIDTH] for _ in COUNTS]).astype(np.int32)
    valid = np.array(COUNTS, np.int32)
    unused = np.setdiff1d(np.arange(CACHE_ROWS), _used(rows, valid))
    kv[unused] = NAN  # nothing of these may reach an output
    rows[np.arange(WIDTH) >= valid[:, None]] = -1
    return Case(name, query, kv, rows, valid, np.float32(scale_log2), np.float32(out_scale))


def _used(rows: NDArray[np.int32], valid: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([row[:n] for row, n in zip(rows, valid, strict=True)])


def _rising() -> Case:
    """The keys grow along the list: the max rises in every block."""
    case = _case("rising", 3, _normal, 0.06, 1.0)
    row = case.rows[0]
    factor = np.linspace(0.1, 4, WIDTH)[:, None]
    case.kv[row] = e4m3.encode(e4m3.decode(case.kv[row]) * factor)
    return case


def _nan() -> Case:
    """A NaN in a query's head and one in a value, both used."""
    case = _case("nan", 4, _normal, 0.06, 1.0)
    case.query[0, 5, 40] = NAN
    case.kv[case.rows[1, 70], 300] = NAN
    return case


def cases() -> list[Case]:
    """All cases of the run."""
    return [
        _case("normal", 1, _normal, 0.06, 0.37),
        _case("codes", 2, _codes, 2.0**-14, 1.25),
        _rising(),
        _nan(),
    ]
