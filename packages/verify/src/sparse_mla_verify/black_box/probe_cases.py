"""Inputs that make a kernel show its conventions, one at a time; everything else is exact.

The latent columns of these queries are zero, so that the rope columns alone make the logits and the
latent columns of the keys are free to be any V. Every cache row is finite.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_verify.inputs.cases import (
    COLUMNS,
    HEAD_TILE,
    LATENT,
    SEED,
    Case,
    e4m3_bytes,
)

PAGE = 64  # the cache has a multiple of so many rows
RUN = 8  # keys that no kernel deals apart
UNITS = (1.0, 2.0**-4, 2.0**-6)  # of the rope columns that make a logit
LEVELS = 64  # to a unit of the logit
NATURAL = float(np.float32(np.log2(np.e)))  # a scale of 1 in natural units


def rng_of(name: str) -> np.random.Generator:
    """Random numbers of a probe's own."""
    return np.random.default_rng([SEED, zlib.crc32(name.encode())])


def probe(
    name: str,
    query: NDArray[Any],
    keys: Sequence[NDArray[Any]],
    *,
    scale_log2: float = 1.0,
    out_scale: float = 1.0,
) -> Case:
    """A case from queries `[batch, heads, 576]` and each row's keys `[n, 576]`, as values."""
    total = sum(map(len, keys))
    spare = rng_of(name).standard_normal((1 + -(total + 1) % PAGE, COLUMNS))
    kv = np.concatenate([spare, *keys])
    width = max(map(len, keys))
    rows = np.zeros((len(keys), width), np.int32)
    ends = np.cumsum([len(spare), *map(len, keys)])
    for row, start, count in zip(rows, ends, map(len, keys), strict=False):
        row[:count] = np.arange(start, start + count)
    return Case(
        family="probe",
        name=name,
        about="",
        query=e4m3_bytes(query),
        kv=e4m3_bytes(kv),
        rows=rows,
        valid=np.array([len(k) for k in keys], np.int32),
        scale_log2=float(np.float32(scale_log2)),
        out_scale=float(np.float32(out_scale)),
        heads=query.shape[1],
    )


def normal(batch: int, count: int, heads: int = HEAD_TILE) -> Case:
    """Unit normal queries and keys, logits of unit deviation: nothing special."""
    rng = rng_of(f"normal {batch} {count}")
    keys = [rng.standard_normal((count, COLUMNS)) for _ in range(batch)]
    query = rng.standard_normal((batch, heads, COLUMNS))
    return probe("normal", query, keys, scale_log2=NATURAL / np.sqrt(COLUMNS))


def _queries(batch: int, heads: int = HEAD_TILE) -> NDArray[np.float64]:
    """Queries `[batch, heads, 576]`: 1 to 1.875 times `UNITS`, the heads in turn."""
    query = np.zeros((batch, heads, COLUMNS))
    factor = 1 + np.arange(heads) % 8 / 8
    query[..., LATENT : LATENT + 3] = factor[:, None] * np.array(UNITS)
    return query


def _keys(level: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.float64]:
    """Keys `[n, 576]` whose logits are -level / 64 times a head's factor, of V `[n, 512]`."""
    keys = np.zeros((len(level), COLUMNS))
    keys[:, :LATENT] = values
    for k, digit in enumerate((level // LEVELS, level // 4 % 16, level % 4)):
        keys[:, LATENT + k] = -digit
    return keys


def _irrational(
    rng: np.random.Generator, count: int, offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Levels whose P is a power of two for no head's factor: a truncation there would be chance."""
    levels = rng.integers(1, 550, 100 * count)
    exponents = (levels[:, None, None] + offsets[:, None]) * (8 + np.arange(8))  # in 1 / 512
    return np.asarray(levels[np.all(exponents % 512 != 0, axis=(1, 2))][:count])


def levels_of_p(count: int = 256) -> Case:
    """P at many levels under one max, in each run of keys, so that the sums show P's rounding.

    In a run of 8, one key has the max and V = 0. Six others make pairs of nearly equal P and
    opposite V, so that the output is the small difference of two roundings. One key is left over.
    """
    rng = rng_of("levels of p")
    level, values = np.zeros(count, np.int64), np.zeros((count, LATENT))
    for start in range(0, count, RUN):
        pair = _irrational(rng, 3, np.array([0, 2]))
        level[start + 1 : start + 7] = np.repeat(pair, 2) + np.tile([0, 2], 3)
        level[start + 7] = _irrational(rng, 1, np.array([0]))[0]
        sign = rng.choice([-1.0, 0.0, 1.0], (3, LATENT))
        values[start + 1 : start + 7] = np.repeat(sign, 2, axis=0) * np.tile([1, -1], 3)[:, None]
        values[start + 7] = rng.choice([-0.0625, 0.0, 0.0625], LATENT)
    return probe("levels of P", _queries(1), [_keys(level, values)])


def moving_max(count: int = 1024) -> Case:
    """The max differs from run to run. P's rounding then shows to which keys' max P is relative."""
    rng = rng_of("moving max")
    rows = []
    for _ in range(2):
        level = np.repeat(rng.integers(0, 350, count // RUN), RUN) + rng.integers(0, 125, count)
        rows.append(_keys(level, rng.choice([-1.0, 1.0], (count, LATENT))))
    return probe("moving max", _queries(len(rows)), rows)


LAYOUTS = (1, 8, 64, 128, 256, 512, 1024)  # keys that stand together with one sign of V


def cancelling_parts(count: int = 2048) -> Case:
    """Equal logits, V = a over some keys and -a + b over as many others, b a small part of a.

    However the keys are divided, in some layout the parts are large and cancel. If a part is
    rounded before the merge, its error is large beside what is left of the output.
    """
    rng = rng_of("cancelling parts")
    rows = []
    for together in LAYOUTS:
        a = rng.integers(8, 16, LATENT) / 8
        values = np.where((np.arange(count) // together % 2 == 0)[:, None], a, -a)
        values[rng.permutation(count)[:61]] += 2.0**-3 * rng.choice([-1, 1], LATENT)
        rows.append(_keys(np.zeros(count, np.int64), values))
    return probe("cancelling parts", _queries(len(rows)), rows)


ALIGNMENTS = tuple(range(6, 33))


def alignment() -> Case:
    """One key a row: its logit is 2^16 - 2^16 + 2^(16 - k), all in one group of 16 columns.

    k is one of `ALIGNMENTS`. A sum that keeps k bits below its largest term has the last one.
    """
    query = np.zeros((len(ALIGNMENTS), HEAD_TILE, COLUMNS))
    keys = []
    for row, k in enumerate(ALIGNMENTS):
        small = 2.0 ** np.array([(16 - k) - (16 - k) // 2, (16 - k) // 2])
        query[row, :, LATENT + np.array([0, 1, 4])] = np.array([256, 256, small[0]])[:, None]
        key = np.zeros((1, COLUMNS))
        key[0, LATENT + np.array([0, 1, 4])] = 256, -256, small[1]
        keys.append(key)
    return probe("alignment", query, keys, scale_log2=2.0**10)


def single_keys() -> Case:
    """One key a row, of logits of 13 bits: the LSE is the logit."""
    rng = rng_of("single keys")
    level = rng.integers(275, 550, 16)
    return probe("single keys", _queries(16), [_keys(k[None], np.zeros(LATENT)) for k in level])


COUNTS = (1, 2, 7, 64, 65, 256, 1000)


def equal_keys() -> Case:
    """Rows of `COUNTS` keys whose logits are all 0: the LSE says how many were counted."""
    rows = [_keys(np.zeros(n, np.int64), np.zeros((n, LATENT))) for n in COUNTS]
    return probe("equal keys", _queries(len(rows)), rows)


def out_roundings() -> Case:
    """Equal logits, so that P is exact, any V and a V scale that is no power of two."""
    rng = rng_of("out roundings")
    rows = [_keys(np.zeros(n, np.int64), rng.standard_normal((n, LATENT))) for n in (1, 3, 5, 7)]
    return probe("out roundings", _queries(4), rows, out_scale=0.37)


def with_ids(case: Case, places: slice, value: int) -> Case:
    """A case with some of its ids replaced."""
    rows = case.rows.copy()
    rows[:, places] = np.int64(value).astype(np.int32)
    return replace(case, rows=rows)
