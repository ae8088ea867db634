"""The mailbox of one rank: where everything lies in it, and what its words may be.

A rank's mailbox is one buffer that every rank of the group can write. Data and arrival are the
same store: a word that differs from its region's sentinel has arrived, so no flag follows the data
and no fence comes before a flag. Every kind of data is kept off its sentinel:

* query, ``0xFFFFFFFF``: the E4M3 byte 0xFF (a negative NaN) is sent as 0x7F.
* payload, ``0x80000000`` (the BF16 pair +0, -0): a BF16 -0 is sent as +0.
* LSE, ``0xFFFFFFFF``: a NaN, and a NaN is never sent; what has no finite LSE sends ``EMPTY_LSE``.

Whoever reads a word puts the sentinel back. Each region has two parities, which alternate from
step to step (``docs/push.md``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate

from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS

QUERY_SENTINEL = 0xFFFFFFFF
PAYLOAD_SENTINEL = 0x80000000
LSE_SENTINEL = 0xFFFFFFFF
#: The LSE of a row that sends no payload: finite, so that no merge forms inf - inf.
EMPTY_LSE = struct.unpack("f", struct.pack("f", -3.0e38))[0]
EMPTY_LSE_BITS = struct.unpack("I", struct.pack("f", -3.0e38))[0]

#: Words of a mailbox's device state: the step's number, and how many CTAs have finished its merge.
EPOCH, TICKET, LOST = 0, 1, 2
STATE_WORDS = 4


@dataclass(frozen=True)
class MailboxLayout:
    """Byte offsets into a mailbox, in the order of the fields; the same on every rank.

    Args:
        padded: Query heads that a row of the q mailbox has room for, at least all ranks' heads.
        owner_heads: Heads H that one rank owns.
        ranks: Ranks D.
        cap: Rows that the mailbox has room for.

    Raises:
        TypeError: A size is no int.
        ValueError: A size is less than 1, or ``padded`` less than all ranks' heads.
    """

    padded: int
    owner_heads: int
    ranks: int
    cap: int

    def __post_init__(self) -> None:
        for name in ("padded", "owner_heads", "ranks", "cap"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if self.padded < self.heads:
            raise ValueError(
                f"padded must be at least ranks x owner_heads, {self.heads}, got {self.padded}"
            )

    @property
    def heads(self) -> int:
        """Heads of all ranks."""
        return self.ranks * self.owner_heads

    @property
    def query_bytes(self) -> int:
        """One parity of ``query [2, cap, padded, 576]`` bytes."""
        return self.cap * self.padded * ROW_COLUMNS

    @property
    def payload_bytes(self) -> int:
        """One parity of ``payload [2, ranks, cap, owner_heads, 512]`` BF16."""
        return self.ranks * self.cap * self.owner_heads * LATENT_COLUMNS * 2

    @property
    def lse_bytes(self) -> int:
        """One parity of ``lse [2, ranks, cap, owner_heads]`` f32."""
        return self.ranks * self.cap * self.owner_heads * 4

    @property
    def _offsets(self) -> list[int]:
        sizes = (2 * self.query_bytes, 2 * self.payload_bytes, 2 * self.lse_bytes, 4 * self.ranks)
        return [0, *accumulate((size + 255) // 256 * 256 for size in sizes)]

    @property
    def query(self) -> int:
        """The gathered query heads of both parities."""
        return self._offsets[0]

    @property
    def payload(self) -> int:
        """The partial rows of this rank's heads, from every rank."""
        return self._offsets[1]

    @property
    def lse(self) -> int:
        """Their base-2 LSEs."""
        return self._offsets[2]

    @property
    def dropped(self) -> int:
        """``[ranks]`` int32: non-finite rows that each rank did not send here."""
        return self._offsets[3]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._offsets[4]
