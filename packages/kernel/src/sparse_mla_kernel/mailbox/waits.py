"""Waiting for a word of another rank, for so long and no longer."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from sparse_mla_kernel.mailbox.device import DeviceMailbox
from sparse_mla_kernel.mailbox.layout import LOST
from sparse_mla_kernel.ptx.system import (
    atom_cas_relaxed_gpu,
    load_relaxed_sys_b32,
    store_relaxed_sys_b32,
)

#: Loads between two looks at the clock, about 20 us of waiting.
SPINS = 32


class Stage(IntEnum):
    """What a rank can wait for; 0 in a report is "nothing was lost"."""

    QUERY = 1
    PARTIAL = 2


@cute.jit
def poll(
    look: Callable[[], Any],
    is_missing: Callable[[Any], Any],
    rank_of: Callable[[Any], Int32],
    mail: DeviceMailbox,
    stage: cutlass.Constexpr[Stage],
    row: Int32,
    head: Int32,
) -> Boolean:
    """Look at words of a mailbox until none of them is missing, or the wait is given up.

    Args:
        look: Loads the words into registers, and says what is missing.
        is_missing: Whether something is, by what ``look`` said.
        rank_of: The rank that it is missing from.
        mail: This rank's mailbox.
        stage: What is waited for.
        row: Of which row.
        head: Of which of that stage's heads.

    Returns:
        Whether this thread gave up.
    """
    found = look()
    lost = Boolean(False)
    if is_missing(found):
        began = cute.arch.globaltimer()
        spins = Int32(0)
        while is_missing(found) and not lost:
            found = look()
            spins += 1
            if is_missing(found):
                lost = _gives_up(spins, began, mail, stage, rank_of(found), row, head)
    return lost


@cute.jit
def _gives_up(
    spins: Int32,
    began: Int64,
    mail: DeviceMailbox,
    stage: cutlass.Constexpr[Stage],
    rank: Int32,
    row: Int32,
    head: Int32,
) -> Boolean:
    """Whether a poll that has failed ``spins`` times ends without its word.

    It ends past the mailbox's timeout, or as soon as another wait of this rank has: the first to
    give up writes the report, and everything that is queued behind it drains without waiting.

    Args:
        spins: Loads that found the sentinel, 1 or more.
        began: ``%globaltimer`` at the first of them.
        stage: What is waited for.
        rank: Whom it is from.
        row: Of which row.
        head: Of which of that stage's heads.
    """
    lost = Boolean(False)
    if spins % SPINS == 0:
        if load_relaxed_sys_b32(mail.state + 4 * LOST) != Uint32(0):
            lost = Boolean(True)
        elif cute.arch.globaltimer() - began > mail.timeout_ns:
            lost = Boolean(True)
            if atom_cas_relaxed_gpu(mail.state + 4 * LOST, Int32(0), Int32(1)) == 0:
                _report(mail, stage, rank, row, head)
    return lost


@cute.jit
def _report(
    mail: DeviceMailbox, stage: cutlass.Constexpr[Stage], rank: Int32, row: Int32, head: Int32
) -> None:
    """Tell the host; the stage comes last, so that the host sees a whole report or none."""
    store_relaxed_sys_b32(mail.report + 4, Uint32(rank))
    store_relaxed_sys_b32(mail.report + 8, Uint32(row))
    store_relaxed_sys_b32(mail.report + 12, Uint32(head))
    cute.arch.fence_acq_rel_sys()
    store_relaxed_sys_b32(mail.report, Uint32(int(stage)))
