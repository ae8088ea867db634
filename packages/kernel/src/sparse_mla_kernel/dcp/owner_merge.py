"""Owner merge: the ranks' partials of a head to its final row, on the rank that owns the head.

Rounding steps, in float32, ranks in order; ``lse_d`` is rank d's base-2 LSE:

| # | step | arithmetic |
|---|---|---|
| O1 | ``m = max lse_d`` over the ranks that are not empty | exact |
| O2 | ``w_d = exp2(lse_d - m)``; 0 for an empty rank | subtract, EX2 |
| O3 | ``total = total + w_d``, from 0 | add |
| O4 | ``w_d = w_d / total`` | correctly rounded division |
| O5 | ``row = fma(w_d, payload_d, row)``, from 0 | fused |
| O6 | the row to BF16 | nearest even |
| O7 | ``LSE2 = m + log2f(total)``; natural: times f32(ln 2) | add; multiply |

A head whose ranks are all empty has the row 0 and the LSE -inf.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from sparse_mla_kernel.arithmetic.finish import lse_nat
from sparse_mla_kernel.mailbox.device import DeviceMailbox, partial_slot, read_parity
from sparse_mla_kernel.mailbox.layout import (
    EMPTY_LSE_BITS,
    EPOCH,
    LSE_SENTINEL,
    PAYLOAD_SENTINEL,
    TICKET,
    MailboxLayout,
)
from sparse_mla_kernel.mailbox.waits import Stage, poll
from sparse_mla_kernel.ptx.convert import as_f32, cvt_bf16x2
from sparse_mla_kernel.ptx.global_memory import store_global_b32x2
from sparse_mla_kernel.ptx.math import add_rn, div_rn, ex2_approx_ftz, fma_rn, max_f32, sub_rn
from sparse_mla_kernel.ptx.system import (
    atom_add_relaxed_gpu,
    load_relaxed_sys_b32,
    load_relaxed_sys_b32x2,
    store_relaxed_sys_b32,
    store_relaxed_sys_b32x2,
)
from sparse_mla_kernel.schedule import LATENT_COLUMNS

#: Columns of a thread: two words of BF16 pairs.
COLUMNS = 4
THREADS = LATENT_COLUMNS // COLUMNS


class OwnerMerge:
    """The owner's kernel. A CTA has one head of one row, a thread four of its columns.

    Args:
        batch: Decode rows.
        box: The mailbox's layout.
    """

    def __init__(self, batch: int, box: MailboxLayout) -> None:
        self.batch = batch
        self.box = box

    @cute.jit
    def __call__(
        self, mLatent: cute.Tensor, mLse: cute.Tensor, mail: DeviceMailbox, stream: object
    ) -> None:
        """Launch on ``stream``, as a programmatic dependent of what runs there.

        Args:
            mLatent: ``[batch, owner_heads, 512]`` BF16, out.
            mLse: ``[batch, owner_heads]`` f32, out, natural log.
            mail: This rank's mailbox.
            stream: A DSL stream handle.
        """
        self.kernel(mLatent, mLse, mail).launch(
            grid=(self.box.owner_heads, self.batch, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mLatent: cute.Tensor, mLse: cute.Tensor, mail: DeviceMailbox) -> None:
        """Wait, re-arm, merge; the grid's last CTA ends the step."""
        box = self.box
        t, _, _ = cute.arch.thread_idx()
        head, row, _ = cute.arch.block_idx()

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # Receive
        parity = read_parity(mail)
        rLse = cute.make_rmem_tensor(box.ranks, Uint32)
        rPair = cute.make_rmem_tensor((2, box.ranks), Uint32)
        lost = _receive_lse(rLse, mail, parity, row, head, box)
        gone = _receive_payload(rPair, rLse, mail, parity, row, head, box)
        lost = lost or gone

        # Merge
        rWeight = cute.make_rmem_tensor(box.ranks, Float32)
        rRow = cute.make_rmem_tensor(COLUMNS, Float32)
        top, total = _weigh(rWeight, rLse, box)
        _weighted_sum(rRow, rWeight, rPair, box)
        low, high = _finish(rRow, total, lost)
        gOut = mLatent[row, head, None].iterator + COLUMNS * t
        store_global_b32x2(gOut.toint(), low, high)
        if t == 0:
            lse2 = add_rn(top, cute.math.log2(total)) if total != 0.0 else -Float32.inf  # O7
            mLse[row, head] = lse_nat(lse2) if not lost else Float32.nan  # O7

        # Re-arm: the LSE words once the whole CTA has read them
        _rearm_payload(rLse, mail, parity, row, head, box)
        cute.arch.sync_threads()
        if t < box.ranks:
            slot = partial_slot(parity, t, row, head, box)
            store_relaxed_sys_b32(mail.own + box.lse + 4 * slot, Uint32(LSE_SENTINEL))
        if t == 0:
            _end_step(mail, self.batch * box.owner_heads)


@cute.jit
def _receive_lse(
    rLse: cute.Tensor,
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    head: Int32,
    box: cutlass.Constexpr[MailboxLayout],
) -> Boolean:
    """Every rank's LSE word of a head. All are asked for at once, until none is missing.

    Args:
        rLse: ``[ranks]`` words, out.

    Returns:
        Whether this thread gave up.
    """
    return poll(
        lambda: _load_lse(rLse, mail, parity, row, head, box),
        _is_rank,
        lambda rank: rank,
        mail,
        Stage.PARTIAL,
        row,
        head,
    )


def _is_rank(missing: Int32) -> Boolean:
    """Whether a look named a rank whose word is missing."""
    return missing >= 0


@cute.jit
def _load_lse(
    rLse: cute.Tensor,
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    head: Int32,
    box: cutlass.Constexpr[MailboxLayout],
) -> Int32:
    """One look at the LSE words; the lowest rank whose word is missing, or -1."""
    for d in cutlass.range_constexpr(box.ranks):
        slot = partial_slot(parity, Int32(d), row, head, box)
        rLse[d] = load_relaxed_sys_b32(mail.own + box.lse + 4 * slot)
    missing = Int32(-1)
    for d in cutlass.range_constexpr(box.ranks - 1, -1, -1):
        missing = Int32(d) if rLse[d] == Uint32(LSE_SENTINEL) else missing
    return missing


@cute.jit
def _receive_payload(
    rPair: cute.Tensor,
    rLse: cute.Tensor,
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    head: Int32,
    box: cutlass.Constexpr[MailboxLayout],
) -> Boolean:
    """This thread's columns of every rank that sent a payload; +0 for the others.

    Args:
        rPair: ``[2, ranks]`` words of two BF16, out.
        rLse: ``[ranks]`` words.

    Returns:
        Whether this thread gave up.
    """
    return poll(
        lambda: _load_payload(rPair, rLse, mail, parity, row, head, box),
        _is_rank,
        lambda rank: rank,
        mail,
        Stage.PARTIAL,
        row,
        head,
    )


@cute.jit
def _load_payload(
    rPair: cute.Tensor,
    rLse: cute.Tensor,
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    head: Int32,
    box: cutlass.Constexpr[MailboxLayout],
) -> Int32:
    """One look at the payload words; the lowest rank of which one is missing, or -1."""
    for d in cutlass.range_constexpr(box.ranks):
        low = Uint32(0)
        high = Uint32(0)
        if sent_payload(rLse[d]):
            low, high = load_relaxed_sys_b32x2(_pair_address(mail, parity, d, row, head, box))
        rPair[0, d] = low
        rPair[1, d] = high
    missing = Int32(-1)
    sentinel = Uint32(PAYLOAD_SENTINEL)
    for d in cutlass.range_constexpr(box.ranks - 1, -1, -1):
        absent = rPair[0, d] == sentinel or rPair[1, d] == sentinel
        missing = Int32(d) if absent else missing
    return missing


@cute.jit
def sent_payload(lse_word: Uint32) -> Boolean:
    """Whether the rank that sent (or has not sent) this LSE word also sends a payload.

    A word that never came stands for none: its wait was given up.
    """
    return lse_word != Uint32(EMPTY_LSE_BITS) and lse_word != Uint32(LSE_SENTINEL)


@cute.jit
def _pair_address(
    mail: DeviceMailbox,
    parity: Int32,
    sender: cutlass.Constexpr[int],
    row: Int32,
    head: Int32,
    box: cutlass.Constexpr[MailboxLayout],
) -> Int64:
    t, _, _ = cute.arch.thread_idx()
    slot = partial_slot(parity, Int32(sender), row, head, box)
    return mail.own + box.payload + 2 * (slot * LATENT_COLUMNS + COLUMNS * t)


@cute.jit
def _rearm_payload(
    rLse: cute.Tensor,
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    head: Int32,
    box: cutlass.Constexpr[MailboxLayout],
) -> None:
    """Put the sentinel back over the payload words that this thread has read."""
    sentinel = Uint32(PAYLOAD_SENTINEL)
    for d in cutlass.range_constexpr(box.ranks):
        if sent_payload(rLse[d]):
            address = _pair_address(mail, parity, d, row, head, box)
            store_relaxed_sys_b32x2(address, sentinel, sentinel)


@cute.jit
def _weigh(
    rWeight: cute.Tensor, rLse: cute.Tensor, box: cutlass.Constexpr[MailboxLayout]
) -> tuple[Float32, Float32]:
    """Each rank's weight (O1 to O4); 0 for one that sent no payload.

    Args:
        rWeight: ``[ranks]`` f32, out; NaN if no rank sent a payload.
        rLse: ``[ranks]`` words.

    Returns:
        ``(top, total)``: the largest LSE, and the sum of the weights relative to it.
    """
    top = -Float32.inf
    for d in cutlass.range_constexpr(box.ranks):
        top = max_f32(top, as_f32(rLse[d])) if sent_payload(rLse[d]) else top  # O1
    total = Float32(0.0)
    for d in cutlass.range_constexpr(box.ranks):
        weight = ex2_approx_ftz(sub_rn(as_f32(rLse[d]), top))  # O2
        rWeight[d] = weight if sent_payload(rLse[d]) else Float32(0.0)
        total = add_rn(total, rWeight[d])  # O3
    for d in cutlass.range_constexpr(box.ranks):
        rWeight[d] = div_rn(rWeight[d], total)  # O4
    return top, total


@cute.jit
def _weighted_sum(
    rRow: cute.Tensor,
    rWeight: cute.Tensor,
    rPair: cute.Tensor,
    box: cutlass.Constexpr[MailboxLayout],
) -> None:
    """Four columns of the weighted sum, ranks in order (O5)."""
    rRow.fill(0.0)
    for d in cutlass.range_constexpr(box.ranks):
        for i in cutlass.range_constexpr(COLUMNS):
            word = rPair[i // 2, d]
            bits = word << 16 if i % 2 == 0 else word & Uint32(0xFFFF0000)
            rRow[i] = fma_rn(rWeight[d], as_f32(bits), rRow[i])  # O5


@cute.jit
def _finish(rRow: cute.Tensor, total: Float32, lost: Boolean) -> tuple[Uint32, Uint32]:
    """The row as BF16 (O6); 0 if no rank sent a payload, NaN if a word never came."""
    for i in cutlass.range_constexpr(COLUMNS):
        value = rRow[i] if total != 0.0 else Float32(0.0)
        rRow[i] = value if not lost else Float32.nan
    return cvt_bf16x2(rRow[0], rRow[1]), cvt_bf16x2(rRow[2], rRow[3])  # O6


@cute.jit
def _end_step(mail: DeviceMailbox, ctas: cutlass.Constexpr[int]) -> None:
    """Count this CTA; the last one moves the epoch on. All of them have read it before."""
    if atom_add_relaxed_gpu(mail.state + 4 * TICKET, Int32(1)) == ctas - 1:
        store_relaxed_sys_b32(mail.state + 4 * TICKET, Uint32(0))
        epoch = load_relaxed_sys_b32(mail.state + 4 * EPOCH)
        store_relaxed_sys_b32(mail.state + 4 * EPOCH, epoch + 1)
