"""Cases for a cache that lies amid unmapped addresses, where reading what is masked faults.

Their ids outside the cache name rows at which there is no memory.
"""

import functools
import zlib
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from sparse_mla_verify.inputs.cases import COLUMNS, NAN_BYTE, SEED, UNIT_SCALE, Case, e4m3_bytes

ROWS = 32768  # of 576 bytes: 9 x 2 MiB, a multiple of what can be mapped
MAPPED = ROWS * COLUMNS
#: Ids outside the cache, and so outside the mapped range.
OUTSIDE = (-1, ROWS, ROWS + 1, 2**31 - 1, -(2**31))


@dataclass(frozen=True)
class ListShape:
    """A case's heads, the width of its lists and each row's count."""

    heads: int
    width: int
    counts: tuple[int, ...]


#: Clusters of 16 and of 32 heads; rows of one chunk and of several, whatever the schedule. The
#: kernels are those of cases that the recordings hold.
SHAPES = MappingProxyType(
    {
        "guarded/16-heads": ListShape(16, 2048, (100, 1100, 640)),
        "guarded/checkpoint": ListShape(96, 256, (256, 255, 240, 192, 128)),
        "guarded/32-heads": ListShape(
            96, 1100, (1099, 1025, 577, 513, 512, 511, 129, 128, 65, 64, 33, 8)
        ),
    }
)

#: Where ids outside the cache stand in a list of n; row r of a case has the place r mod 7.
PLACES = MappingProxyType(
    {
        "every seventh": lambda n: np.arange(n) % 7 == 0,
        "first": lambda n: np.arange(n) == 0,
        "last": lambda n: np.arange(n) == n - 1,
        "second half": lambda n: np.arange(n) >= n // 2,
        "second quarter": lambda n: (np.arange(n) >= n // 4) & (np.arange(n) < n // 2),
        "all but one": lambda n: np.arange(n) != n // 3,
        "all": lambda n: np.arange(n) >= 0,
    }
)

#: How a case is run: with the cache that is mapped, and as if it had two rows more.
OUTSIDE_CACHE, UNNAMED = "ids outside the cache", "rows that no list names"
GIVEN = OUTSIDE_CACHE, UNNAMED
MORE_ROWS = 2


@functools.lru_cache(2 * len(SHAPES))
def guarded_case(name: str, schedule: str) -> Case:
    """A case of `SHAPES` whose every id outside the cache is one of `OUTSIDE`.

    Past the counts stand ids outside the cache, N and -1. The first and the last row of the cache
    are keys, every row that is none is NaN.
    """
    shape = SHAPES[name]
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    batch = len(shape.counts)
    query = e4m3_bytes(rng.standard_normal((batch, shape.heads, COLUMNS)))
    ids = 1 + rng.permutation(ROWS - 2)[: sum(shape.counts)]
    rows = np.resize(np.array([ROWS, -1], np.int32), (batch, shape.width))
    places = list(PLACES.values())
    for r, (n, start) in enumerate(zip(shape.counts, np.cumsum((0, *shape.counts)), strict=False)):
        outside = places[r % len(places)](n)
        given = np.resize(np.roll(np.array(OUTSIDE, np.int64), -r), n)
        rows[r, :n] = np.where(outside, given, ids[start : start + n])
    rows[0, 1:3] = 0, ROWS - 1
    named = np.unique(rows[(rows >= 0) & (rows < ROWS)])
    kv = np.full((ROWS, COLUMNS), NAN_BYTE, np.uint8)
    kv[named] = e4m3_bytes(rng.standard_normal((len(named), COLUMNS)))
    return Case(
        family="guarded",
        name=name,
        about=f"{batch} rows of {shape.heads} heads; {ROWS} cache rows between unmapped addresses",
        query=query,
        kv=kv,
        rows=rows,
        valid=np.array(shape.counts, np.int32),
        scale_log2=UNIT_SCALE,
        out_scale=1.0,
        heads=shape.heads,
        schedule=schedule,
    )


def unnamed(case: Case) -> Case:
    """A case as it is given to a kernel that takes the cache to be two rows longer than it is.

    Those rows are unmapped, and named past the counts alone: a kernel that reads what doesn't count
    faults, though the id be inside. The reference gives the same bits.
    """
    rows = case.rows.copy()
    counts = np.arange(rows.shape[1]) < case.counts[:, None]
    more = (rows >= ROWS) & (rows < ROWS + MORE_ROWS)
    rows[counts & more] = 2**31 - 1
    past = np.resize(ROWS + np.arange(MORE_ROWS, dtype=np.int32), rows.shape)
    return replace(case, rows=np.where(counts, rows, past).astype(np.int32))


def as_given(name: str, schedule: str, given: str) -> Case:
    """A case as a kernel is given it: `given` is one of `GIVEN`."""
    case = guarded_case(name, schedule)
    return case if given == OUTSIDE_CACHE else unnamed(case)
