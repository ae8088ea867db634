"""Where everything lies in a mailbox."""

import pytest

from sparse_mla_kernel import MailboxLayout
from sparse_mla_kernel.mailbox import layout


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ((-1, 2, 3, 4), ValueError, "padded must be 1 or more, got -1"),
        ((16, 0, 1, 1), ValueError, "owner_heads must be 1 or more, got 0"),
        ((16, 1, 0, 1), ValueError, "ranks must be 1 or more, got 0"),
        ((16, 1, 1, 0), ValueError, "cap must be 1 or more, got 0"),
        ((1.5, 1, 1, 1), TypeError, r"padded must be an int, got 1\.5 \(float\)"),
        ((1, True, 1, 1), TypeError, r"owner_heads must be an int, got True \(bool\)"),
        ((1, 1, None, 1), TypeError, r"ranks must be an int, got None \(NoneType\)"),
        ((1, 1, 1, "1"), TypeError, r"cap must be an int, got '1' \(str\)"),
        ((95, 12, 8, 5), ValueError, "padded must be at least ranks x owner_heads, 96, got 95"),
    ],
)
def test_mailboxes_out_of_range(sizes: tuple, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{says}$"):
        MailboxLayout(*sizes)


def test_the_smallest_mailbox() -> None:
    box = MailboxLayout(1, 1, 1, 1)
    assert (box.heads, box.query_bytes, box.payload_bytes, box.lse_bytes) == (1, 576, 1024, 4)
    assert MailboxLayout(96, 12, 8, 5).heads == 96


def test_the_layout() -> None:
    """Regions follow each other without overlap, each on a boundary of 256 bytes."""
    box = MailboxLayout(40, 3, 5, 7)
    regions = [
        (box.query, 2 * box.query_bytes),
        (box.payload, 2 * box.payload_bytes),
        (box.lse, 2 * box.lse_bytes),
        (box.dropped, 4 * box.ranks),
    ]
    assert (box.query_bytes, box.payload_bytes) == (7 * 40 * 576, 5 * 7 * 3 * 1024)
    assert box.lse_bytes == 5 * 7 * 3 * 4
    end = 0
    for start, size in regions:
        assert start % 256 == 0
        assert end <= start < end + 256
        end = start + size
    assert end <= box.size < end + 256


def test_the_last_region_has_a_word_of_each_rank() -> None:
    box = MailboxLayout(65, 1, 65, 1)
    assert box.size - box.dropped == 512  # 65 words of 4 bytes, up to a multiple of 256
    assert MailboxLayout(64, 1, 64, 1).size - MailboxLayout(64, 1, 64, 1).dropped == 256


def test_the_words_of_a_mailbox() -> None:
    """The bits that docs/push.md names, and the places in the device state that kernels address."""
    assert (layout.QUERY_SENTINEL, layout.LSE_SENTINEL) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert layout.PAYLOAD_SENTINEL == 0x80000000
    assert layout.EMPTY_LSE_BITS == 0xFF61B1E6
    assert layout.EMPTY_LSE == -3.0000000054977558e38  # the float32 nearest to -3.0e38
    assert (layout.EPOCH, layout.TICKET, layout.LOST, layout.STATE_WORDS) == (0, 1, 2, 4)
