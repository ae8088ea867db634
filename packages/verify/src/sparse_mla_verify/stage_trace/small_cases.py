"""The small cases whose stages are traced: few keys, several chunks, two tiles of heads a CTA."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparse_mla_verify.inputs.cases import (
    COLUMNS,
    NAN_BYTE,
    SEED,
    SPARE_ROWS,
    UNIT_SCALE,
    Case,
    all_cases,
    e4m3_bytes,
)

FAMILY = "small"


def small_cases(schedule: str) -> tuple[Case, ...]:
    """The cases of the recording, on a schedule; the first row of each has masked ids."""
    many = tuple(range(561, -1, -17))  # 34 rows: the low-latency kernels give a CTA 32 heads
    return (
        _small("few-keys", "2 rows of 300 and 37 keys", 32, (300, 37), 320, schedule),
        _small("chunks", "2 rows of 2000 and 1031 keys", 16, (2000, 1031), 2048, schedule),
        _small("two-tiles", "34 rows of 0 to 561 keys", 32, many, 576, schedule),
    )


def case_named(name: str, schedule: str) -> Case:
    """A small case, or one of a case family, by its name. Raises ValueError for another name."""
    families = [name.split("/")[0]]
    try:
        others = () if families == [FAMILY] else all_cases(families, schedule, pending=True)
    except ValueError:
        others = ()
    for case in (*small_cases(schedule), *others):
        if case.name == name:
            return case
    known = ", ".join(case.name for case in small_cases(schedule))
    raise ValueError(
        f"case must be {known} or a case of a family (`sparse-mla-audit list`), got {name!r}"
    )


def _small(
    name: str, about: str, heads: int, counts: tuple[int, ...], width: int, schedule: str
) -> Case:
    """Unit normal queries and keys; every seventh id of the first row's list is masked."""
    rng = np.random.default_rng([SEED, heads, width])
    total = width + SPARE_ROWS
    kv = np.full((total, COLUMNS), NAN_BYTE, np.uint8)
    places = rng.permutation(total).astype(np.int32)
    named, spare = places[:width], places[width:]
    kv[named] = e4m3_bytes(rng.standard_normal((width, COLUMNS)))
    rows = np.resize(spare, (len(counts), width))
    for row, count in zip(rows, counts, strict=True):
        row[:count] = rng.permutation(named)[:count]
    masked = np.arange(3, counts[0], 7)
    rows[0, masked] = np.resize(np.array([-1, total, -(2**31), 2**31 - 1]), len(masked))
    made = Case(
        family=FAMILY,
        name=f"{FAMILY}/{name}",
        about=about,
        query=e4m3_bytes(rng.standard_normal((len(counts), heads, COLUMNS))),
        kv=kv,
        rows=rows,
        valid=np.array(counts, np.int32),
        scale_log2=UNIT_SCALE,
        out_scale=1.0,
        heads=heads,
    )
    return replace(made, schedule=schedule)
