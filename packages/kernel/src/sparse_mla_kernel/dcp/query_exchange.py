"""Query exchange: the sender's kernel stores a rank's query heads into every rank's mailbox.

The decode kernel is the reader: ``io.query`` waits for these words and re-arms them.
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from sparse_mla_kernel.io.query import ROW_VECTORS, VECTOR_BYTES
from sparse_mla_kernel.mailbox.device import (
    DeviceMailbox,
    peer_mailbox,
    query_address,
    query_word,
    read_parity,
)
from sparse_mla_kernel.mailbox.layout import MailboxLayout
from sparse_mla_kernel.ptx.global_memory import load_global_b32x4
from sparse_mla_kernel.ptx.system import store_relaxed_sys_b32x4

WARP = 32
#: Threads of a CTA at most.
THREADS = 512


class QueryExchange:
    """The sender's kernel. A CTA stores one row's heads of this rank into one peer's mailbox.

    Args:
        batch: Decode rows.
        box: The mailbox's layout.
    """

    def __init__(self, batch: int, box: MailboxLayout) -> None:
        self.batch = batch
        self.box = box
        self.vectors = box.owner_heads * ROW_VECTORS
        self.passes = -(-self.vectors // THREADS)
        self.threads = -(-self.vectors // (self.passes * WARP)) * WARP

    @cute.jit
    def __call__(self, mQuery: cute.Tensor, mail: DeviceMailbox, stream: object) -> None:
        """Launch on ``stream``, as a programmatic dependent of what runs there.

        Args:
            mQuery: ``[batch, owner_heads, 576]`` E4M3 bytes, this rank's heads.
            mail: This rank's mailbox.
            stream: A DSL stream handle.
        """
        self.kernel(mQuery, mail).launch(
            grid=(self.batch, self.box.ranks, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mQuery: cute.Tensor, mail: DeviceMailbox) -> None:
        """Store the CTA's heads, 16 bytes at a time. A word's arrival is its own announcement."""
        box = self.box
        t, _, _ = cute.arch.thread_idx()
        row, peer, _ = cute.arch.block_idx()

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        source = mQuery[row, None, None].iterator.toint()
        first_head = mail.rank * box.owner_heads
        base = peer_mailbox(mail, peer)
        target = query_address(base, read_parity(mail), row, first_head, box)
        for i in cutlass.range_constexpr(self.passes):
            vector = t + i * self.threads
            if vector < self.vectors:
                offset = VECTOR_BYTES * vector
                words = load_global_b32x4(source + offset)
                store_relaxed_sys_b32x4(target + offset, *[query_word(word) for word in words])
