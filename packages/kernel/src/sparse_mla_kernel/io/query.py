"""Where a query comes from: a tensor, or the mailbox of this rank.

Query rows in a tensor are there when the kernel starts. Those in a mailbox arrive word by word: a
word that is not the sentinel has arrived, and whoever has read it puts the sentinel back.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from sparse_mla_kernel.mailbox.device import DeviceMailbox, query_address
from sparse_mla_kernel.mailbox.layout import QUERY_SENTINEL, MailboxLayout
from sparse_mla_kernel.mailbox.waits import Stage, poll
from sparse_mla_kernel.ptx.shared_memory import store_shared_b32x4
from sparse_mla_kernel.ptx.system import load_relaxed_sys_b32x4, store_relaxed_sys_b32x4
from sparse_mla_kernel.schedule import ROW_COLUMNS

#: A query row is read and written in vectors of four words.
VECTOR_BYTES = 16
ROW_VECTORS = ROW_COLUMNS // VECTOR_BYTES


@cute.jit
def receive_query(
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    first_head: Int32,
    target: Int32,
    stride_bytes: cutlass.Constexpr[int],
    heads: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
    box: cutlass.Constexpr[MailboxLayout],
) -> Boolean:
    """All threads: wait for the query rows of some heads and put them into shared memory.

    Args:
        mail: This rank's mailbox.
        parity: The step's parity.
        row: The row whose heads are waited for.
        first_head: The first of them, among all ranks' heads.
        target: Address of the first head's row in shared memory.
        stride_bytes: Bytes from one row to the next there.
        heads: How many heads.
        threads: How many threads do this, ``0 .. threads - 1`` of the CTA.
        box: The mailbox's layout.

    Returns:
        Whether this thread gave up on any of its words. The threads of a CTA may differ.
    """
    t, _, _ = cute.arch.thread_idx()
    lost = Boolean(False)
    source = query_address(mail.own, parity, row, first_head, box)
    rWords = cute.make_rmem_tensor(4, Uint32)
    for i in cutlass.range_constexpr(-(-heads * ROW_VECTORS // threads)):
        vector = t + i * threads
        if vector < heads * ROW_VECTORS:
            head = vector // ROW_VECTORS
            gone = _wait_vector(
                rWords, source + VECTOR_BYTES * vector, mail, row, first_head + head, box
            )
            lost = lost or gone
            column = VECTOR_BYTES * (vector % ROW_VECTORS)
            store_shared_b32x4(
                target + head * stride_bytes + column, *[rWords[k] for k in range(4)]
            )
    return lost


@cute.jit
def _wait_vector(
    rWords: cute.Tensor,
    address: Int64,
    mail: DeviceMailbox,
    row: Int32,
    head: Int32,
    box: cutlass.Constexpr[MailboxLayout],
) -> Boolean:
    """Wait until none of four words of a query row is the sentinel; whether the wait was given up.

    Args:
        rWords: ``[4]`` words, out.
    """
    return poll(
        lambda: _load_vector(rWords, address),
        lambda missing: missing,
        lambda _: head // box.owner_heads,
        mail,
        Stage.QUERY,
        row,
        head,
    )


@cute.jit
def _load_vector(rWords: cute.Tensor, address: Int64) -> Boolean:
    """One look at four words; whether any of them is missing."""
    a, b, c, d = load_relaxed_sys_b32x4(address)
    rWords[0], rWords[1], rWords[2], rWords[3] = a, b, c, d
    sentinel = Uint32(QUERY_SENTINEL)
    return a == sentinel or b == sentinel or c == sentinel or d == sentinel


@cute.jit
def rearm_query(
    mail: DeviceMailbox,
    parity: Int32,
    row: Int32,
    first_head: Int32,
    share: Int32,
    shares: cutlass.Constexpr[int],
    heads: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
    box: cutlass.Constexpr[MailboxLayout],
) -> None:
    """All threads: put the sentinel back over one share of the query rows of some heads.

    Every CTA of the cluster has read these rows before.

    Args:
        mail: This rank's mailbox.
        parity: The step's parity.
        row: The row.
        first_head: The first head, among all ranks' heads.
        share: Which share this CTA re-arms.
        shares: Into how many shares the rows are divided.
        heads: How many heads.
        threads: How many threads do this.
        box: The mailbox's layout.
    """
    t, _, _ = cute.arch.thread_idx()
    vectors = heads * ROW_VECTORS // shares
    target = query_address(mail.own, parity, row, first_head, box)
    for i in cutlass.range_constexpr(-(-vectors // threads)):
        vector = t + i * threads
        if vector < vectors:
            offset = VECTOR_BYTES * (share * vectors + vector)
            store_relaxed_sys_b32x4(target + offset, *[Uint32(QUERY_SENTINEL)] * 4)
