"""The owner's merge: against a scalar restatement, at the edges, and against the exact answer."""

import ml_dtypes
import numpy as np
import pytest

from sparse_mla_reference import IDEAL, SM90, bf16, fma, libdevice, mufu, owner_merge
from sparse_mla_reference.instructions.float32 import add, div, mul
from sparse_mla_reference.mailbox import EMPTY_LSE
from sparse_mla_reference.ulp import same_bits

F = np.float32


def merged(payload, lse2, *, machine=SM90):
    """``owner_merge`` of rows of a few columns; the other columns are zeros."""
    columns = payload.shape[-1]
    wide = np.zeros((*payload.shape[:-1], 512), payload.dtype)
    wide[..., :columns] = payload
    latent, lse = owner_merge(wide, lse2, machine=machine)
    return latent[..., :columns], lse


def scalar_merge(payload, lse2):
    """Steps O1 to O7 for one head, one number at a time."""
    live = [d for d in range(len(lse2)) if lse2[d] != EMPTY_LSE]
    if not live:
        return np.zeros(payload.shape[1], ml_dtypes.bfloat16), F(-np.inf)
    top = max(lse2[d] for d in live)
    weights, total = [], np.array(0, F)
    for d in range(len(lse2)):
        w = mufu.ex2(add(lse2[d], -top)) if d in live else F(0)
        weights.append(w)
        total = add(total, w)
    shares = [div(w, total) for w in weights]
    row = []
    for column in range(payload.shape[1]):
        acc = np.array(0, F)
        for d, share in enumerate(shares):
            acc = fma(share, payload[d, column] if d in live else F(0), acc)
        row.append(acc)
    lse = add(top, libdevice.log2f(np.asarray(total)))
    return bf16.encode(np.array(row, F)), mul(lse, F(np.log(2.0)))


def drawn(seed, ranks, heads, columns=8):
    rng = np.random.default_rng(seed)
    payload = bf16.encode(rng.normal(0, 3, (ranks, heads, columns)).astype(F))
    lse2 = rng.normal(0, 6, (ranks, heads)).astype(F)
    lse2[rng.random(lse2.shape) < 0.3] = EMPTY_LSE
    return payload, lse2


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_scalar_restatement(ranks):
    payload, lse2 = drawn(ranks, ranks, 40)
    latent, lse = merged(payload, lse2)
    values = bf16.decode(payload)
    for head in range(40):
        row, one = scalar_merge(values[:, head], lse2[:, head])
        assert same_bits(latent[head], row).all()
        assert same_bits(lse[head], np.asarray(one)).all()


def test_one_rank_is_the_identity():
    """A weight of 1 changes nothing; log2f(1) is +0."""
    payload, lse2 = drawn(1, 1, 50)
    latent, lse = merged(payload, lse2)
    live = lse2[0] != EMPTY_LSE
    assert same_bits(latent[live], payload[0][live]).all()
    assert same_bits(lse[live], mul(lse2[0][live], F(np.log(2.0)))).all()


def test_the_empty_ranks_payload_is_not_read():
    payload, lse2 = drawn(5, 4, 60)
    poisoned = payload.copy()
    poisoned[lse2 == EMPTY_LSE] = np.nan
    expected, actual = merged(payload, lse2), merged(poisoned, lse2)
    for want, got in zip(expected, actual, strict=True):
        assert same_bits(want, got).all()


def test_all_empty():
    payload = np.full((3, 2, 4), np.nan, ml_dtypes.bfloat16)
    latent, lse = merged(payload, np.full((3, 2), EMPTY_LSE))
    assert not latent.view(np.uint16).any()
    assert np.all(lse == -np.inf)


@pytest.mark.parametrize("level", [-66854.859, 0.0, -2.9e38, 3e38])
def test_equal_ranks_at_any_level(level):
    """Equal LSEs of D ranks give the mean, and log2(D) more."""
    payload = np.repeat(bf16.encode(np.array([[[1.0, -2.5, 0.0, 2.0**-126]]], F)), 4, axis=0)
    latent, lse = merged(payload, np.full((4, 1), F(level)))
    assert same_bits(latent[0], payload[0, 0]).all()
    assert lse[0] == mul(add(F(level), F(2)), F(np.log(2.0)))


def test_special_payloads():
    smallest, largest = F(2.0**-133), F(3.3895314e38)
    values = np.array([[[-smallest, -smallest, largest, -largest, 0.0]]], F)
    payload = bf16.encode(np.repeat(values, 2, axis=0))
    assert payload.view(np.uint16)[0, 0].tolist() == [0x8001, 0x8001, 0x7F7F, 0xFF7F, 0]
    latent, _ = merged(payload, np.array([[0.0], [0.0]], F))
    assert same_bits(latent[0], payload[0, 0]).all()


def test_a_far_rank_weighs_nothing_but_an_infinity():
    """0 x inf is NaN: a payload that overflowed shows, whatever it weighs."""
    payload = bf16.encode(np.array([[[1.0, 1.0]], [[5.0, np.inf]]], F))
    latent, lse = merged(payload, np.array([[0.0], [-200.0]], F))
    assert latent.view(np.uint16)[0].tolist() == [0x3F80, 0x7FFF]
    assert lse[0] == 0


def test_close_to_the_exact_answer():
    payload, lse2 = drawn(11, 8, 200, columns=16)
    latent, lse = merged(payload, lse2)
    exact, exact_lse = merged(payload.astype(np.float64), lse2.astype(np.float64), machine=IDEAL)
    live = np.any(lse2 != EMPTY_LSE, axis=0)
    assert np.array_equal(np.isneginf(lse), ~live)
    largest = np.abs(bf16.decode(payload)).max()
    # Half an ulp of BF16, and a few float32 roundings of terms that may cancel.
    bound = 2.0**-8 * np.abs(exact) + 2.0**-19 * largest
    assert np.all(np.abs(latent.astype(np.float64) - exact) <= bound)
    assert np.allclose(lse[live], exact_lse[live], rtol=1e-6, atol=1e-6)


def test_inputs_are_left_alone():
    payload, lse2 = drawn(3, 3, 4)
    before = payload.copy(), lse2.copy()
    merged(payload, lse2, machine=SM90)
    assert same_bits(before[0], payload).all()
    assert same_bits(before[1], lse2).all()


@pytest.mark.parametrize(
    ("payload", "lse2", "error", "says"),
    [
        (np.zeros((2, 3, 512)), np.zeros((2, 3), F), TypeError, "payload must be float32"),
        (np.zeros((2, 3, 512), F), np.zeros((2, 3)), TypeError, "lse2 must be float32"),
        (
            np.zeros((2, 3, 512), F),
            np.zeros((2, 4), F),
            ValueError,
            r"got \[2, 3, 512\] and \[2, 4\]",
        ),
        (np.zeros((0, 3, 512), F), np.zeros((0, 3), F), ValueError, "D of 1 or more"),
        (np.zeros((2, 3, 4), F), np.zeros((2, 3), F), ValueError, r"512\].*got \[2, 3, 4\]"),
        (
            np.zeros((2, 1, 512), F),
            np.array([[0.0], [-np.inf]], F),
            ValueError,
            r"lse2 must be EMPTY_LSE .*convert.*, got -inf at \[1, 0\]",
        ),
        (np.zeros(4, F), np.zeros((), F), ValueError, "payload must be"),
    ],
)
def test_wrong_arguments(payload, lse2, error, says):
    with pytest.raises(error, match=says):
        owner_merge(payload, lse2)


def test_the_machine_is_not_its_name():
    with pytest.raises(TypeError, match=r"machine must be a Machine of .*, got str"):
        owner_merge(np.zeros((2, 3, 512), F), np.zeros((2, 3), F), machine="SM90")  # type: ignore[arg-type]


def test_one_head_alone_needs_no_axis():
    rng = np.random.default_rng(57)
    payload = rng.standard_normal((3, 512)).astype(np.float32)
    lse2 = rng.uniform(-9, 9, 3).astype(np.float32)
    latent, lse = owner_merge(payload, lse2)
    together = owner_merge(payload[:, None], lse2[:, None])
    assert same_bits(latent, together[0][0]).all()
    assert same_bits(lse, together[1][0]).all()
