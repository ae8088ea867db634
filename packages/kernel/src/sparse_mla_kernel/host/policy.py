"""Which batches run this kernel, and by which schedule.

:func:`sparse_for` says whether a batch runs this kernel, :func:`schedule_for` by which schedule.
Both read tables that the benchmark made (docs/benchmark.md says how), and both decide about speed.

:func:`schedule_for` decides about bits too: a row's bits depend on its schedule, and the schedule
that :func:`schedule_for` picks depends on the size of the batch. To give a row the same bits in
every batch, use one schedule, such as ``LOW_LATENCY``, for all batches instead.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from sparse_mla_kernel.checks import MAX_BATCH, check_int, kind_of, one_of
from sparse_mla_kernel.schedule import BASE, LOW_LATENCY, TILE_HEADS, Schedule

# policy: written by `sparse-mla-audit bench policy FILE --max-keys 2048`
# The run: NVIDIA H200, driver 580.159.04, 2026-11-30.
TABLE = "1-16:sparse"
SCHEDULES = (
    "1-8x16:low-latency, 9-16x16:low-latency-4,"
    "1-3x64:low-latency, 4-8x64:low-latency-4, 9-16x64:low-latency-2,"
    "1-2x96:low-latency, 3-8x96:low-latency-4, 9-16x96:low-latency-2,"
    "1x128:low-latency, 2-6x128:low-latency-4, 7-16x128:low-latency-2,"
)
# /policy

#: The schedules that a table can name.
NAMED: Mapping[str, Schedule] = MappingProxyType(
    {
        "base": BASE,
        "low-latency": LOW_LATENCY,
        "low-latency-4": replace(LOW_LATENCY, split=4),
        "low-latency-2": replace(LOW_LATENCY, split=2),
    }
)

_ENTRY = re.compile(r"([0-9]+)(?:-([0-9]+))?:(sparse|split)")
_SHAPE = re.compile(rf"([0-9]+)(?:-([0-9]+))?x([0-9]+):({'|'.join(NAMED)})")


def parse_table(text: str) -> Mapping[int, str]:
    """Read a policy table: ``"1-2:split,3-8:sparse"``; later entries win.

    Args:
        text: Entries ``FIRST-LAST:NAME`` or ``ROWS:NAME``, comma-separated; the name is ``sparse``
            (this kernel) or ``split`` (a general split-KV decode).

    Returns:
        ``"sparse"`` or ``"split"`` by batch size, for the batch sizes that the text names.

    Raises:
        TypeError: ``text`` is not a str.
        ValueError: An entry is malformed.
    """
    table: dict[int, str] = {}
    for entry in _entries(text, "1-8:sparse"):
        match = _ENTRY.fullmatch(entry)
        sizes = _sizes(match)
        if match is None or not sizes:
            raise ValueError(
                "table must have entries FIRST-LAST:sparse or FIRST-LAST:split with "
                f"1 <= FIRST <= LAST <= {MAX_BATCH}, got the entry {entry!r}"
            )
        table.update(dict.fromkeys(sizes, match[3]))
    return table


def parse_schedules(text: str) -> Mapping[int, Mapping[int, Schedule]]:
    """Read a table of schedules: ``"1-8x96:low-latency,9-16x96:low-latency-4"``; later entries win.

    Args:
        text: Entries ``FIRST-LASTxHEADS:NAME`` or ``ROWSxHEADS:NAME``, comma-separated; the name is
            a key of ``NAMED``.

    Returns:
        Schedules by head count and then by batch size, for the sizes that the text names.

    Raises:
        TypeError: ``text`` is not a str.
        ValueError: An entry is malformed, or the text has no entry.
    """
    table: dict[int, dict[int, Schedule]] = {}
    for entry in _entries(text, "1-8x96:low-latency"):
        match = _SHAPE.fullmatch(entry)
        sizes, heads = _sizes(match), int(match[3]) if match else 0
        if match is None or not sizes or heads < TILE_HEADS or heads % TILE_HEADS:
            raise ValueError(
                "table must have entries FIRST-LASTxHEADS:NAME with "
                f"1 <= FIRST <= LAST <= {MAX_BATCH}, HEADS a positive multiple of {TILE_HEADS} "
                f"and NAME {one_of(NAMED)}, got the entry {entry!r}"
            )
        table.setdefault(heads, {}).update(dict.fromkeys(sizes, NAMED[match[4]]))
    if not table:
        raise ValueError(f"table must have one entry or more, got {text!r}")
    return table


def sparse_for(rows: int, gathered: int, padded: int, *, table: str | None = None) -> bool:
    """Whether a batch runs this kernel.

    The shipped table compares this kernel, in latent mode and with the schedule that
    :func:`schedule_for` picks, with FlashMLA's sparse decode. The base schedule, which is the
    default and the only one of push mode, is slower than FlashMLA at many of the same sizes
    (docs/benchmark.md). To decide for the base schedule, make a table of its own times.

    Args:
        rows: Decode rows of the batch.
        gathered: Query heads gathered from all ranks.
        padded: Query heads that a row of the q mailbox has.
        table: A table for :func:`parse_table`; the shipped one if left out.

    Returns:
        True if ``gathered`` is a positive multiple of 16 and at most ``padded``, and the table says
        ``sparse`` for ``rows``.

    Raises:
        TypeError: A size is not an int, or the table is not a str.
        ValueError: The table is malformed.
    """
    for name, value in (("rows", rows), ("gathered", gathered), ("padded", padded)):
        check_int(name, value)
    fits = 0 < gathered <= padded and gathered % TILE_HEADS == 0
    return fits and parse_table(TABLE if table is None else table).get(rows) == "sparse"


def schedule_for(rows: int, heads: int, *, table: str | None = None) -> Schedule:
    """The fastest schedule for a batch in latent mode, for ``compile_sparse(..., schedule=...)``.

    First the head count is looked up in the table, then the row count. A count that the table does
    not name counts as the next larger one that the table names, or as the largest if it is larger
    than all.

    A row's bits depend on its schedule, so that with this choice they can change with the size of
    the batch. To give a row the same bits in every batch, use one schedule for all batches instead.

    Args:
        rows: Decode rows of the batch.
        heads: Query heads that are used.
        table: A table for :func:`parse_schedules`; the shipped one if left out.

    Returns:
        The schedule.

    Raises:
        TypeError: A size is not an int, or the table is not a str.
        ValueError: A size is out of range, or the table is malformed.
    """
    check_int("rows", rows)
    check_int("heads", heads)
    if rows < 1:
        raise ValueError(f"rows must be 1 or more, got {rows}")
    if heads < TILE_HEADS or heads % TILE_HEADS:
        raise ValueError(f"heads must be a positive multiple of {TILE_HEADS}, got {heads}")
    if table is None:
        return _shipped(rows, heads)
    return _look_up(parse_schedules(table), rows, heads)


@functools.cache
def _shipped(rows: int, heads: int) -> Schedule:
    return _look_up(parse_schedules(SCHEDULES), rows, heads)


def _look_up(table: Mapping[int, Mapping[int, Schedule]], rows: int, heads: int) -> Schedule:
    of_heads = table[_next(table, heads)]
    return of_heads[_next(of_heads, rows)]


def _next(named: Mapping[int, object], size: int) -> int:
    """The smallest named size that is at least ``size``, or else the largest named size."""
    sizes = sorted(named)
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]


def _entries(text: str, example: str) -> list[str]:
    if not isinstance(text, str):
        raise TypeError(f"table must be a str such as {example!r}, got {kind_of(text)}")
    return [part for part in map(str.strip, text.split(",")) if part]


def _sizes(match: re.Match[str] | None) -> range:
    """The batch sizes of an entry; an empty range if they are out of order or out of range."""
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    return range(first, last + 1) if first >= 1 and last <= MAX_BATCH else range(0)
