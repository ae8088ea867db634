"""Which batches run this kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sparse_mla_kernel.checks import check_int
from sparse_mla_kernel.schedule import TILE_HEADS

#: Small batches, where one cluster launch saves a reduction kernel. Provisional: no recorded run of
#: the benchmark stands behind it yet (docs/benchmark.md says how its table is made).
TABLE = "1-5:sparse"

_ENTRY = re.compile(r"([0-9]+)(?:-([0-9]+))?:(sparse|split)")


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
    if not isinstance(text, str):
        raise TypeError(f"table is a {type(text).__name__}; it may be a str such as '1-8:sparse'")
    table: dict[int, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(entry)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if match is None or not 1 <= first <= last <= 65535:
            raise ValueError(
                f"table has the entry {entry!r}; it may be FIRST-LAST:sparse or FIRST-LAST:split, "
                "1 <= FIRST <= LAST <= 65535"
            )
        table.update(dict.fromkeys(range(first, last + 1), match[3]))
    return table


def sparse_for(rows: int, gathered: int, padded: int, *, table: str | None = None) -> bool:
    """Whether a batch runs this kernel.

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
