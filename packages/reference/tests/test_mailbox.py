"""Words of the mailbox: what is sent is never a sentinel, and else what was meant."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sparse_mla_reference import Mailbox, mailbox
from sparse_mla_reference.mailbox import (
    EMPTY_LSE,
    LSE_SENTINEL,
    PAYLOAD_SENTINEL,
    QUERY_SENTINEL,
    NotArrived,
    Overrun,
    as_words,
    receive,
    send,
)

CODES = np.arange(65536, dtype=np.uint32).astype(np.uint16)


def test_every_query_byte():
    code = np.arange(256, dtype=np.uint8)
    sent = mailbox.query_bytes(code)
    assert np.array_equal(sent[:255], code[:255])
    assert sent[255] == 0x7F
    assert np.array_equal(mailbox.query_bytes(code.view(ml_dtypes.float8_e4m3fn)), sent)
    assert code[255] == 255


def test_no_query_word_is_the_sentinel():
    every = np.full((1, 4), 0xFF, np.uint8)
    assert as_words(mailbox.query_bytes(every)).item() == 0x7F7F7F7F != QUERY_SENTINEL


def test_every_bf16():
    """All 65,536 encodings: -0 alone is changed, and neither half of a word can be 0x8000."""
    sent = mailbox.payload_bits(CODES)
    changed = np.flatnonzero(sent != CODES)
    assert changed.tolist() == [0x8000]
    assert sent[0x8000] == 0
    assert not np.any(sent == 0x8000)
    assert np.array_equal(mailbox.payload_bits(CODES.view(ml_dtypes.bfloat16)), sent)


@pytest.mark.parametrize("other", [0, 1, 0x8000, 0x8001, 0x7F7F, 0xFF7F, 0x7FFF, 0xFFFF])
def test_no_payload_word_is_the_sentinel(other):
    for pair in (CODES, np.full_like(CODES, other)), (np.full_like(CODES, other), CODES):
        words = as_words(mailbox.payload_bits(np.stack(pair, axis=-1)))
        assert not np.any(words == PAYLOAD_SENTINEL)


def test_words_are_little_endian():
    assert as_words(np.array([[1, 2, 3, 4]], np.uint8)).tolist() == [[0x04030201]]
    assert as_words(np.array([[0x1122, 0x3344]], np.uint16)).tolist() == [[0x33441122]]
    values = mailbox.values_of(np.array([[0x3F80BF80]], np.uint32))
    assert values.astype(np.float32).tolist() == [[-1.0, 1.0]]


EDGES = [np.nextafter(EMPTY_LSE, np.float32(0)), np.finfo(np.float32).max]
LSE = np.array([0.0, -0.0, 1.0, -66854.859, 3.4e38, -2.9999e38, 1e-45, *EDGES], np.float32)
NOT_SENT = np.array(
    [EMPTY_LSE, -3.1e38, -3.4028235e38, -np.inf, np.inf, np.nan, -np.nan], np.float32
)


def test_lse_words():
    assert np.array_equal(mailbox.lse_words(LSE), LSE.view(np.uint32))
    assert mailbox.is_sent(LSE).all()
    assert not mailbox.is_dropped(LSE).any()
    assert np.all(mailbox.lse_words(NOT_SENT).view(np.float32) == np.float32(-3.0e38))
    assert not mailbox.is_sent(NOT_SENT).any()
    assert mailbox.is_dropped(NOT_SENT).tolist() == [True, True, True, False, True, True, True]


def test_the_lse_sentinel_is_a_nan():
    assert np.isnan(np.uint32(LSE_SENTINEL).view(np.float32))
    patterns = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800000], np.uint32).view(
        np.float32
    )
    assert not np.any(mailbox.lse_words(patterns) == LSE_SENTINEL)


def test_wrong_dtypes():
    with pytest.raises(TypeError, match=r"row must be bfloat16 or uint16 in .*, got float16"):
        mailbox.payload_bits(np.array([0], np.float16))
    swapped = np.dtype(np.uint16).newbyteorder()
    with pytest.raises(TypeError, match="row must be bfloat16 or uint16 in native byte order"):
        mailbox.payload_bits(np.array([0x8000], swapped))
    with pytest.raises(TypeError, match="lse2 must be float32, got float64"):
        mailbox.lse_words(np.array([0], np.float64))
    with pytest.raises(TypeError, match="query"):
        mailbox.query_bytes(np.array([0], np.float32))


def test_an_empty_mailbox():
    box = Mailbox.empty(3, 2, 5, padded=8)
    assert box.query.shape == (2, 5, 8, 144)
    assert box.payload.shape == (2, 2, 5, 3, 256)
    assert box.lse.shape == (2, 2, 5, 3)
    for region, word in ((box.query, 2**32 - 1), (box.payload, 2**31), (box.lse, 2**32 - 1)):
        assert np.all(region == word)
    assert box.dropped.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((0, 2, 5), "owner_heads must be 1 or more, got 0"),
        ((3, 0, 5), "ranks must be"),
        ((3, 2, 0), "cap must be"),
        ((3, 2, 5, 5), "padded must be at least 6"),
    ],
)
def test_wrong_sizes(sizes, says):
    with pytest.raises(ValueError, match=says):
        Mailbox.empty(*sizes)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (("a", 1, 1), r"^owner_heads must be an integer, got 'a'$"),
        ((1.5, 1, 1), r"^owner_heads must be an integer, got 1\.5$"),
        ((True, 1, 1), r"^owner_heads must be an integer, got True$"),
        ((1, None, 1), r"^ranks must be an integer, got None$"),
        ((1, 1, "a"), r"^cap must be an integer, got 'a'$"),
        ((1, 1, 1, 1.5), r"^padded must be an integer, got 1\.5$"),
    ],
)
def test_sizes_of_another_kind(sizes, says):
    with pytest.raises(TypeError, match=says):
        Mailbox.empty(*sizes)


def test_sizes_may_be_integers_of_numpy():
    sizes: Any = np.array([3, 2, 5, 8])
    assert Mailbox.empty(*sizes).lse.shape == (2, 2, 5, 3)


def test_sending_and_receiving():
    place = np.full(3, LSE_SENTINEL, np.uint32)
    with pytest.raises(NotArrived, match="3 words"):
        receive(place, LSE_SENTINEL)
    send(place[:2], np.array([1, 2], np.uint32), LSE_SENTINEL)
    with pytest.raises(NotArrived, match="1 words"):
        receive(place, LSE_SENTINEL)
    assert place.tolist() == [1, 2, LSE_SENTINEL]
    with pytest.raises(Overrun, match="2 words were not read"):
        send(place, np.array([4, 5, 6], np.uint32), LSE_SENTINEL)
    with pytest.raises(ValueError, match="must not hold the sentinel"):
        send(place[2:], np.array([LSE_SENTINEL], np.uint32), LSE_SENTINEL)
    assert receive(place[:2], LSE_SENTINEL).tolist() == [1, 2]
    assert np.all(place == LSE_SENTINEL)
