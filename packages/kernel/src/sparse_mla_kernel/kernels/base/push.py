"""Push: merged rows straight into the mailboxes of the ranks that own their heads."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from sparse_mla_kernel.arithmetic.finish import lse_log2, normalise, output_factor
from sparse_mla_kernel.kernels.base.layout import SharedLayout
from sparse_mla_kernel.kernels.base.merge import merge_columns, weigh_partials
from sparse_mla_kernel.mailbox.device import (
    DeviceMailbox,
    is_sendable,
    partial_slot,
    payload_word,
    peer_mailbox,
)
from sparse_mla_kernel.mailbox.layout import EMPTY_LSE_BITS, MailboxLayout
from sparse_mla_kernel.ptx.convert import as_b32
from sparse_mla_kernel.ptx.system import (
    red_add_relaxed_sys,
    store_relaxed_sys_b32,
    store_relaxed_sys_b32x2,
)
from sparse_mla_kernel.schedule import LATENT_COLUMNS, TILE_HEADS


@cute.jit
def slots_at_owner(
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    tile: Int32,
    cta: Int32,
    layout: cutlass.Constexpr[SharedLayout],
    box: cutlass.Constexpr[MailboxLayout],
) -> tuple[Int64, Int64]:
    """Where the warp's head goes: addresses of this lane's first two payload words, of the LSE.

    Asked for long before there is anything to send: the owner's address is a load away.
    """
    head = tile * TILE_HEADS + cute.arch.warp_idx()
    base = peer_mailbox(mail, head // box.owner_heads)
    slot = partial_slot(parity, mail.rank, row, head % box.owner_heads, box)
    column = cta * layout.cta_columns + 4 * cute.arch.lane_idx()
    payload_address = base + box.payload + 2 * (slot * LATENT_COLUMNS + column)
    return payload_address, base + box.lse + 4 * slot


@cute.jit
def push_merged(
    mail: DeviceMailbox,
    payload_address: Int64,
    lse_address: Int64,
    smem: Int32,
    tile: Int32,
    cta: Int32,
    out_scale: Float32,
    layout: cutlass.Constexpr[SharedLayout],
    box: cutlass.Constexpr[MailboxLayout],
) -> None:
    """As ``SparseDcpDecode.merge``, to where :func:`slots_at_owner` says, the LSE in base 2.

    A row whose LSE says that it is empty, or that is not finite, sends no payload.
    """
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()
    rWeight = cute.make_rmem_tensor(layout.schedule.split, Float32)
    rRow = cute.make_rmem_tensor(4, Float32)
    top, total = weigh_partials(rWeight, smem, warp, layout)
    lse2 = lse_log2(top, total)
    sends = is_sendable(lse2)
    if cta == 0 and lane == 0:
        if sends:
            store_relaxed_sys_b32(lse_address, as_b32(lse2))
        else:
            owner = (tile * TILE_HEADS + warp) // box.owner_heads
            _send_empty(mail, owner, lse_address, lse2, box)
    if sends:
        for start in cutlass.range_constexpr(0, layout.cta_columns, 128):
            column = start + 4 * lane
            if column < layout.cta_columns:
                merge_columns(rRow, rWeight, smem, warp, column, layout)
                low, high = normalise(rRow, total, output_factor(total, out_scale))
                store_relaxed_sys_b32x2(
                    payload_address + 2 * start, payload_word(low), payload_word(high)
                )


@cute.jit
def _send_empty(
    mail: DeviceMailbox,
    owner: Int32,
    lse_address: Int64,
    lse2: Float32,
    box: cutlass.Constexpr[MailboxLayout],
) -> None:
    """Send the LSE of a row without payload; count the row at its owner unless it had no keys."""
    if lse2 != -Float32.inf:
        counter = peer_mailbox(mail, owner) + box.dropped + 4 * Int64(mail.rank)
        red_add_relaxed_sys(counter, Int32(1))
        # Whoever sees the LSE also sees the count.
        cute.arch.fence_acq_rel_sys()
    store_relaxed_sys_b32(lse_address, Uint32(EMPTY_LSE_BITS))
