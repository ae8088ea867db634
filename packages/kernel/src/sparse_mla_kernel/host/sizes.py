"""The static sizes of a decode kernel: all that it is compiled for, but for the architecture."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_mla_kernel.checks import check_cap, check_geometry, check_push, check_schedule
from sparse_mla_kernel.schedule import BASE, Schedule
from sparse_mla_kernel.schedule.registry import LATENT, PUSH

#: Push mode's sizes: ``(owner_heads, ranks, cap)``, the heads that one rank owns, the ranks, and
#: the rows of the mailbox.
Push = tuple[int, int, int]


@dataclass(frozen=True)
class DecodeSizes:
    """The sizes and the schedule that one decode kernel is compiled for.

    Args:
        batch: Decode rows.
        heads: Query heads that are used: a multiple of 16, at most ``padded``.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        cap: Rows of the q mailbox, at least ``batch``.
        push: ``(owner_heads, ranks, cap)`` for push mode, with ``owner_heads x ranks = heads`` and
            the same ``cap``; None for latent mode.
        schedule: The order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or the schedule's kernel does not have the mode.
    """

    batch: int
    heads: int
    padded: int
    width: int
    cap: int
    push: Push | None = None
    schedule: Schedule = BASE

    def __post_init__(self) -> None:
        check_geometry(self.batch, self.heads, self.padded, self.width)
        check_cap(self.cap, self.batch)
        if self.push is not None:
            check_push(self.push, self.heads, self.cap)
        check_schedule(self.schedule, mode=LATENT if self.push is None else PUSH)
