"""Which batches run this kernel, and by which schedule.

Both answers come from tables made by the benchmark (docs/benchmark.md says how). They decide about
speed, and the second about bits too: a row's bits depend on its schedule, and :func:`schedule_for`
picks a batch's by its size. Whoever wants a row to have the same bits in every batch picks one
schedule, such as ``LOW_LATENCY``, and keeps to it; :func:`schedule_for` is then not asked.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from sparse_mla_kernel.checks import check_int
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

#: The schedules that a table may name.
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
_MOST_ROWS = 65535


def parse_table(text: str) -> Mapping[int, str]:
    """Read a policy table: ``"1-2:split,3-8:sparse"``; later entries win.

    Args:
        text: Entries ``FIRST-LAST:NAME`` or ``ROWS:NAME``, comma-separated; the name is ``sparse``
            (this kernel) or ``split`` (a general split-KV decode).

    Returns:
        The name for each batch size that the table names.

    Raises:
        TypeError: ``text`` is no str.
        ValueError: An entry is malformed.
    """
    table: dict[int, str] = {}
    for entry in _entries(text, "1-8:sparse"):
        match = _ENTRY.fullmatch(entry)
        sizes = _sizes(match)
        if match is None or not sizes:
            raise ValueError(
                f"table has the entry {entry!r}; it may be FIRST-LAST:sparse or FIRST-LAST:split, "
                f"1 <= FIRST <= LAST <= {_MOST_ROWS}"
            )
        table.update(dict.fromkeys(sizes, match[3]))
    return table


def parse_schedules(text: str) -> Mapping[int, Mapping[int, Schedule]]:
    """Read a table of schedules: ``"1-8x96:low-latency,9-16x96:low-latency-4"``; later entries win.

    Args:
        text: Entries ``FIRST-LASTxHEADS:NAME`` or ``ROWSxHEADS:NAME``, comma-separated; the name is
            a key of ``NAMED``.

    Returns:
        By head count, then by batch size, the schedule; only what the table names.

    Raises:
        TypeError: ``text`` is no str.
        ValueError: An entry is malformed, or there is none.
    """
    table: dict[int, dict[int, Schedule]] = {}
    for entry in _entries(text, "1-8x96:low-latency"):
        match = _SHAPE.fullmatch(entry)
        sizes, heads = _sizes(match), int(match[3]) if match else 0
        if match is None or not sizes or heads < TILE_HEADS or heads % TILE_HEADS:
            raise ValueError(
                f"table has the entry {entry!r}; it may be FIRST-LASTxHEADS:NAME, 1 <= FIRST <= "
                f"LAST <= {_MOST_ROWS}, HEADS a positive multiple of {TILE_HEADS}, NAME one of "
                + ", ".join(NAMED)
            )
        table.setdefault(heads, {}).update(dict.fromkeys(sizes, NAMED[match[4]]))
    if not table:
        raise ValueError("table has no entry; it may have one or more")
    return table


def sparse_for(rows: int, gathered: int, padded: int, *, table: str | None = None) -> bool:
    """Whether a batch runs this kernel.

    The shipped table is of latent mode with what :func:`schedule_for` picks, against FlashMLA's
    sparse decode. The base schedule, the only one of push mode and the default elsewhere, is slower
    than FlashMLA at many of the same points (docs/benchmark.md): who runs it makes a table of it.

    Args:
        rows: Decode rows of the batch.
        gathered: Query heads gathered from all ranks.
        padded: Query heads that a row of the q mailbox has.
        table: A policy table (:func:`parse_table`); the shipped one if left out.

    Returns:
        True if ``gathered`` is a positive multiple of 16 and at most ``padded``, and the table says
        ``sparse`` for ``rows``.

    Raises:
        TypeError: A size is no int.
        ValueError: The table is malformed.
    """
    for name, value in (("rows", rows), ("gathered", gathered), ("padded", padded)):
        check_int(name, value)
    fits = 0 < gathered <= padded and gathered % TILE_HEADS == 0
    return fits and parse_table(TABLE if table is None else table).get(rows) == "sparse"


def schedule_for(rows: int, heads: int, *, table: str | None = None) -> Schedule:
    """The fastest schedule for a batch, for ``compile_sparse(..., schedule=...)``; no push mode.

    A size that the table does not name has the schedule of the next larger one that it names, and
    one past the largest that of the largest: first the heads, then the rows.

    The bits of a row depend on its schedule alone, so that with this choice they can change with
    the size of the batch around it. Whoever needs them not to pins one schedule.

    Args:
        rows: Decode rows of the batch.
        heads: Query heads that are used.
        table: A table of schedules (:func:`parse_schedules`); the shipped one if left out.

    Returns:
        The schedule.

    Raises:
        TypeError: A size is no int.
        ValueError: A size is out of range, or the table is malformed.
    """
    check_int("rows", rows)
    check_int("heads", heads)
    if rows < 1:
        raise ValueError(f"rows is {rows}; it may be 1 or more")
    if heads < TILE_HEADS or heads % TILE_HEADS:
        raise ValueError(f"heads is {heads}; it may be a positive multiple of {TILE_HEADS}")
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
    """The least size that is named and not below this one; the largest if there is none."""
    sizes = sorted(named)
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]


def _entries(text: str, example: str) -> list[str]:
    if not isinstance(text, str):
        raise TypeError(f"table is a {type(text).__name__}; it may be a str such as {example!r}")
    return [part for part in map(str.strip, text.split(",")) if part]


def _sizes(match: re.Match[str] | None) -> range:
    """The batch sizes of an entry; none if they are out of order or out of range."""
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    return range(first, last + 1) if first >= 1 and last <= _MOST_ROWS else range(0)
