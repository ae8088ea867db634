"""Where merged rows go: tensors, or the mailboxes of the ranks that own the heads."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from sparse_mla_kernel.arithmetic.finish import lse_nat
from sparse_mla_kernel.mailbox.device import (
    DeviceMailbox,
    partial_slot,
    payload_word,
    peer_mailbox,
)
from sparse_mla_kernel.mailbox.layout import EMPTY_LSE_BITS, MailboxLayout
from sparse_mla_kernel.ptx.convert import as_b32
from sparse_mla_kernel.ptx.global_memory import store_global_b32x2
from sparse_mla_kernel.ptx.system import (
    red_add_relaxed_sys,
    store_relaxed_sys_b32,
    store_relaxed_sys_b32x2,
)
from sparse_mla_kernel.schedule import LATENT_COLUMNS

# ---- tensors ------------------------------------------------------------------------------------


@cute.jit
def write_columns(gColumns: cute.Pointer, low: Uint32, high: Uint32) -> None:
    """Four columns of a head, as two words of BF16 pairs, to their place in the latent tensor."""
    store_global_b32x2(gColumns.toint(), low, high)


@cute.jit
def write_lse(mLse: cute.Tensor, row: Int32, head: Int32, lse2: Float32) -> None:
    """The LSE of a head, natural, to the LSE tensor.

    Args:
        mLse: ``[batch, padded]`` f32.
        row: The row.
        head: The head.
        lse2: The base-2 LSE.
    """
    mLse[row, head] = lse_nat(lse2)


# ---- mailboxes of the owners --------------------------------------------------------------------


@cute.jit
def slots_at_owner(
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    head: Int32,
    column: Int32,
    box: cutlass.Constexpr[MailboxLayout],
) -> tuple[Int64, Int64]:
    """Where a head's row goes in its owner's mailbox: a column's address, and the LSE's.

    The owner's address is a load away. A kernel asks for it long before there is a row to send.
    """
    base = peer_mailbox(mail, head // box.owner_heads)
    slot = partial_slot(parity, mail.rank, row, head % box.owner_heads, box)
    return base + box.payload + 2 * (slot * LATENT_COLUMNS + column), base + box.lse + 4 * slot


@cute.jit
def send_columns(address: Int64, low: Uint32, high: Uint32) -> None:
    """Four columns of a head, as two words of BF16 pairs, to its owner."""
    store_relaxed_sys_b32x2(address, payload_word(low), payload_word(high))


@cute.jit
def send_lse(
    mail: DeviceMailbox,
    address: Int64,
    lse2: Float32,
    head: Int32,
    sends: Boolean,
    box: cutlass.Constexpr[MailboxLayout],
) -> None:
    """The base-2 LSE of a head to its owner; that of an empty row if its payload is not sent.

    Args:
        mail: This rank's mailbox.
        address: From :func:`slots_at_owner`.
        lse2: The base-2 LSE.
        head: The head, among all ranks' heads.
        sends: Whether ``lse2`` is one with which a payload goes (``is_sendable``).
        box: The mailbox's layout.
    """
    if sends:
        store_relaxed_sys_b32(address, as_b32(lse2))
    else:
        _send_empty(mail, head // box.owner_heads, address, lse2, box)


@cute.jit
def _send_empty(
    mail: DeviceMailbox,
    owner: Int32,
    address: Int64,
    lse2: Float32,
    box: cutlass.Constexpr[MailboxLayout],
) -> None:
    """Send the LSE of a row without payload; count the row at its owner unless it had no keys."""
    if lse2 != -Float32.inf:
        counter = peer_mailbox(mail, owner) + box.dropped + 4 * Int64(mail.rank)
        red_add_relaxed_sys(counter, Int32(1))
        # A thread that sees the LSE also sees the count.
        cute.arch.fence_acq_rel_sys()
    store_relaxed_sys_b32(address, Uint32(EMPTY_LSE_BITS))
