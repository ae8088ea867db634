"""A mailbox as a kernel sees it: its addresses, and what its words may be."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from sparse_mla_kernel.mailbox.layout import EMPTY_LSE, EPOCH, MailboxLayout
from sparse_mla_kernel.ptx.global_memory import load_global_b64
from sparse_mla_kernel.ptx.system import load_relaxed_sys_b32
from sparse_mla_kernel.schedule import ROW_COLUMNS


class DeviceMailbox(NamedTuple):
    """What a kernel knows of a mailbox, as scalars.

    Args:
        own: Address of this rank's mailbox.
        peers: Address of ``[ranks]`` int64, the addresses of all ranks' mailboxes from here.
        state: Address of the device state, ``STATE_WORDS`` int32.
        report: Address of ``[4]`` int32 of host memory: stage, rank, row and head of a lost wait.
        timeout_ns: How long one wait may last.
        rank: This rank.
    """

    own: Int64
    peers: Int64
    state: Int64
    report: Int64
    timeout_ns: Int64
    rank: Int32


# ---- addresses ----------------------------------------------------------------------------------


@cute.jit
def read_parity(mail: DeviceMailbox) -> Int32:
    """The step's parity, 0 or 1. Only the end of the owner merge changes it."""
    return Int32(load_relaxed_sys_b32(mail.state + 4 * EPOCH)) & 1


@cute.jit
def peer_mailbox(mail: DeviceMailbox, peer: Int32) -> Int64:
    """The address of a rank's mailbox."""
    return load_global_b64(mail.peers + 8 * Int64(peer))


@cute.jit
def query_address(
    base: Int64, parity: Int32, row: Int32, head: Int32, box: cutlass.Constexpr[MailboxLayout]
) -> Int64:
    """The address of a head's 576 query bytes in the mailbox at ``base``."""
    first = (Int64(parity) * box.cap + row) * box.padded + head
    return base + box.query + first * ROW_COLUMNS


@cute.jit
def partial_slot(
    parity: Int32, sender: Int32, row: Int32, head: Int32, box: cutlass.Constexpr[MailboxLayout]
) -> Int64:
    """The slot of a partial: payload ``1024 x slot`` and LSE ``4 x slot`` bytes into its region.

    Args:
        sender: The rank whose keys the partial is of.
        head: The head's number among those of its owner.
    """
    block = (Int64(parity) * box.ranks + sender) * box.cap + row
    return block * box.owner_heads + head


# ---- words --------------------------------------------------------------------------------------


@cute.jit
def query_word(word: Uint32) -> Uint32:
    """Four E4M3 bytes with each 0xFF as 0x7F: every NaN is positive, no word is the sentinel."""
    # A byte's low seven bits are all ones where adding one carries into its top bit.
    nan = ((word & Uint32(0x7F7F7F7F)) + Uint32(0x01010101)) & Uint32(0x80808080)
    return word & ~nan


@cute.jit
def payload_word(word: Uint32) -> Uint32:
    """Two BF16 with each -0 as +0; negative subnormals stay. No word is the sentinel."""
    magnitude = word & Uint32(0x7FFF7FFF)
    nonzero = (magnitude + Uint32(0x7FFF7FFF)) & Uint32(0x80008000)
    return magnitude | (word & nonzero)


@cute.jit
def is_sendable(lse2: Float32) -> cutlass.Boolean:
    """Whether a row with this LSE is sent: NaN and infinity are not, nor what EMPTY_LSE covers."""
    return lse2 > Float32(EMPTY_LSE) and lse2 < Float32.inf
