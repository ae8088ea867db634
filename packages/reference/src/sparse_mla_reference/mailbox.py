"""One rank's mailbox: the words that ranks send each other, and which words they never send.

There are no flags: a word has arrived when it is no longer the sentinel of its region. So nothing
that is sent may look like a sentinel:

>>> import numpy as np
>>> query_bytes(np.uint8([0xFE, 0xFF, 0x7F])).tolist()  # 0xFF, a NaN, is sent as 0x7F
[254, 127, 127]
>>> payload_bits(np.uint16([0x8000, 0x8001, 0x3F80])).tolist()  # -0 is sent as +0
[0, 32769, 16256]
>>> [hex(w) for w in lse_words(np.float32([1.0, -np.inf, np.nan]))]  # no LSE: EMPTY_LSE
['0x3f800000', '0xff61b1e6', '0xff61b1e6']
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.formats.e4m3 import as_bytes
from sparse_mla_reference.instructions.float32 import as_float32
from sparse_mla_reference.schedule import LATENT, ROW

QUERY_SENTINEL = 0xFFFFFFFF  # four E4M3 negative NaNs
PAYLOAD_SENTINEL = 0x80000000  # the BF16 pair +0, -0
LSE_SENTINEL = 0xFFFFFFFF  # a float32 NaN
# The LSE of a row without payload: finite, so that no merge forms inf - inf.
EMPTY_LSE = np.float32(-3.0e38)
PARITIES = 2


def query_bytes(query: NDArray[Any]) -> NDArray[np.uint8]:
    """E4M3 bytes as they are sent: 0xFF as 0x7F.

    Args:
        query: uint8 or ``float8_e4m3fn``, any shape.

    Raises:
        TypeError: another dtype.
    """
    code = as_bytes("query", query)
    return np.where(code == 0xFF, np.uint8(0x7F), code)


def payload_bits(row: NDArray[Any]) -> NDArray[np.uint16]:
    """BF16 encodings as they are sent: -0 as +0.

    Args:
        row: ``ml_dtypes.bfloat16`` or uint16, any shape.

    Raises:
        TypeError: another dtype.
    """
    row = np.asarray(row)
    if row.dtype != ml_dtypes.bfloat16 and row.dtype != np.uint16:
        raise TypeError(f"row must be bfloat16 or uint16 in native byte order, got {row.dtype}")
    bits = row.view(np.uint16)
    return np.where(bits == 0x8000, np.uint16(0), bits)


def is_sent(lse2: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether a row with this base-2 LSE is sent: float32, any shape.

    A row whose LSE is NaN or infinite is not sent. Neither is a row whose LSE is ``EMPTY_LSE`` or
    less: a reader would take it for a row without keys.

    Raises:
        TypeError: ``lse2`` is not float32.
    """
    lse2 = as_float32("lse2", lse2)
    return np.asarray((lse2 > EMPTY_LSE) & (lse2 < np.inf))


def is_dropped(lse2: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether a row with this LSE is counted as lost: it has keys (its LSE is not -inf) and is not
    sent.

    Raises:
        TypeError: ``lse2`` is not float32.
    """
    return np.asarray(~is_sent(lse2) & (np.asarray(lse2) != -np.inf))


def lse_words(lse2: NDArray[Any]) -> NDArray[np.uint32]:
    """Base-2 LSEs as they are sent; ``EMPTY_LSE`` stands for a row that is not sent.

    Raises:
        TypeError: ``lse2`` is not float32.
    """
    return np.where(is_sent(lse2), lse2, EMPTY_LSE).astype(np.float32).view(np.uint32)


class NotArrived(Exception):
    """A word is still its sentinel: a reader has to wait."""


class Overrun(Exception):
    """A word was sent before the last one in its place was read."""


@dataclass(frozen=True, eq=False)
class Mailbox:
    """The memory of one rank, in words.

    Attributes:
        query: [2, cap, padded, 144] uint32, four E4M3 bytes each: all ranks' query heads.
        payload: [2, D, cap, H, 256] uint32, two BF16 each: partial rows of this rank's heads.
        lse: [2, D, cap, H] uint32: their base-2 LSEs.
        dropped: [D] int32: non-finite rows that each rank did not send.
    """

    query: NDArray[np.uint32]
    payload: NDArray[np.uint32]
    lse: NDArray[np.uint32]
    dropped: NDArray[np.int32]

    @classmethod
    def empty(cls, owner_heads: int, ranks: int, cap: int, padded: int | None = None) -> "Mailbox":
        """A mailbox of sentinels.

        Args:
            owner_heads: heads H that one rank owns.
            ranks: ranks D.
            cap: rows.
            padded: heads in a row of ``query``; D * H if left out.

        Raises:
            TypeError: a size is no integer.
            ValueError: a size is less than 1, or ``padded`` less than D * H.
        """
        sizes = {"owner_heads": owner_heads, "ranks": ranks, "cap": cap}
        for name, value in (sizes if padded is None else {**sizes, "padded": padded}).items():
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name} must be an integer, got {value!r}")
        heads = ranks * owner_heads
        room = heads if padded is None else padded
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if room < heads:
            raise ValueError(f"padded must be at least {heads} (ranks x owner_heads), got {room}")
        shape = (PARITIES, ranks, cap, owner_heads)
        return cls(
            np.full((PARITIES, cap, room, ROW // 4), QUERY_SENTINEL, np.uint32),
            np.full((*shape, LATENT // 2), PAYLOAD_SENTINEL, np.uint32),
            np.full(shape, LSE_SENTINEL, np.uint32),
            np.zeros(ranks, np.int32),
        )


def send(place: NDArray[np.uint32], words: NDArray[np.uint32], sentinel: int) -> None:
    """Store words into a view of a mailbox.

    Raises:
        Overrun: a word of ``place`` is not the sentinel.
        ValueError: one of ``words`` is.
    """
    if np.any(words == sentinel):
        count = int(np.sum(words == sentinel))
        raise ValueError(f"words must not hold the sentinel {sentinel:#x}, got {count} of it")
    if np.any(place != sentinel):
        raise Overrun(f"{int(np.sum(place != sentinel))} words were not read yet")
    place[...] = words


def receive(place: NDArray[np.uint32], sentinel: int) -> NDArray[np.uint32]:
    """A copy of the words in a view of a mailbox, which is re-armed.

    Raises:
        NotArrived: a word is the sentinel; nothing is changed.
    """
    if np.any(place == sentinel):
        raise NotArrived(f"{int(np.sum(place == sentinel))} words have not arrived")
    words = place.copy()
    place[...] = sentinel
    return words


def as_words(array: NDArray[Any]) -> NDArray[np.uint32]:
    """Bytes or 16-bit encodings as little-endian words of 32 bits, along the last axis.

    Returns:
        uint32, a new array if need be.
    """
    return np.ascontiguousarray(array).view("<u4").astype(np.uint32, copy=False)


def values_of(words: NDArray[np.uint32]) -> NDArray[Any]:
    """The BF16 values of payload words: [..., n] uint32 to [..., 2 n] ``ml_dtypes.bfloat16``."""
    return np.ascontiguousarray(words, "<u4").view(ml_dtypes.bfloat16)
