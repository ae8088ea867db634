"""The simulated step: against one decode, in any order, and with ranks as far apart as they get."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse_mla_reference import IDEAL, Mailbox, Rank, dcp_step, decode, e4m3
from sparse_mla_reference.mailbox import (
    LSE_SENTINEL,
    PAYLOAD_SENTINEL,
    QUERY_SENTINEL,
    NotArrived,
)
from sparse_mla_reference.ulp import same_bits

SCALES: dict[str, Any] = {"scale_log2": 0.06, "out_scale": 1.0}


def inputs(seed, ranks, batch=2, owner_heads=2, width=5, rows=12):
    """One step's inputs, each a list over ranks; some rows have no key on some rank or on any."""
    rng = np.random.default_rng(seed)
    query = [e4m3.encode(rng.normal(size=(batch, owner_heads, 576))) for _ in range(ranks)]
    kv = [e4m3.encode(rng.normal(size=(rows, 576))) for _ in range(ranks)]
    ids = [rng.integers(-1, rows, (batch, width)).astype(np.int32) for _ in range(ranks)]
    valid = [rng.integers(0, width + 1, batch).astype(np.int32) for _ in range(ranks)]
    if batch > 1 and seed % 3 == 0:
        for v in valid:
            v[-1] = 0
    return query, kv, ids, valid


def test_one_rank_is_a_decode():
    query, kv, ids, valid = inputs(1, 1, owner_heads=16)
    out = dcp_step(query, kv, ids, valid, **SCALES)
    latent, lse = decode(query[0], kv[0], ids[0], valid[0], **SCALES)
    assert same_bits(out.lse[0], lse).all()
    # A row of BF16 is sent as it is, but for the sign of zero.
    positive = np.where(latent.view(np.uint16) == 0x8000, 0, latent.view(np.uint16))
    assert np.array_equal(out.latent[0].view(np.uint16), positive)
    assert out.dropped.tolist() == [[0]]


def test_ranks_together_are_a_decode_of_all_keys():
    """To within the ranks' BF16: half an ulp of each partial, and of the result."""
    query, kv, ids, _ = inputs(2, 4, owner_heads=4)
    valid = [np.array([5, 3], np.int32)] * 4
    out = dcp_step(query, kv, ids, valid, **SCALES)
    joined = np.concatenate(query, axis=1)
    offsets = np.cumsum([0] + [len(k) for k in kv[:-1]])
    places = [np.where(i < 0, -1, i + o) for i, o in zip(ids, offsets, strict=True)]
    rows = np.full((2, 20), -1, np.int32)
    for b in range(2):
        named = np.concatenate([p[b, : v[b]] for p, v in zip(places, valid, strict=True)])
        rows[b, : len(named)] = named
    count = np.array([20, 12], np.int32)
    latent, lse = decode(joined, np.concatenate(kv), rows, count, **SCALES, machine=IDEAL)
    got = np.concatenate(list(out.latent), axis=1).astype(np.float64)
    assert np.abs(got - latent).max() < 0.1 * np.abs(latent).max()
    assert np.abs(np.concatenate(list(out.lse), axis=1) - lse).max() < 1e-3


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_order_gives_the_same_bits(ranks):
    given_inputs = inputs(3, ranks)
    first = dcp_step(*given_inputs, **SCALES)
    for order in (list(range(ranks))[::-1], [1, 0, *range(2, ranks)]):
        other = dcp_step(*given_inputs, **SCALES, order=order)
        assert same_bits(first.latent, other.latent).all()
        assert same_bits(first.lse, other.lse).all()
        assert np.array_equal(first.dropped, other.dropped)


def test_empty_rows():
    query, kv, ids, _ = inputs(4, 3)
    valid = [np.array(v, np.int32) for v in ([0, 0], [0, 2], [0, 0])]
    out = dcp_step(query, kv, ids, valid, **SCALES)
    assert np.all(out.lse[:, 0] == -np.inf)
    assert not out.latent[:, 0].view(np.uint16).any()
    assert not out.dropped.any()
    # One rank has all of a row's keys: its row is the result, and its LSE.
    alone = dcp_step(query, kv, ids, [np.zeros(2, np.int32), valid[1], valid[0]], **SCALES)
    assert same_bits(alone.lse[:, 1], out.lse[:, 1]).all()


def test_a_nan_row_is_dropped_and_counted():
    query, kv, ids, _ = inputs(5, 2)
    ids = [np.arange(10, dtype=np.int32).reshape(2, 5)] * 2
    valid = [np.array([5, 5], np.int32)] * 2
    sound = dcp_step(
        query, kv, ids, [np.array([5, 5], np.int32), np.array([0, 5], np.int32)], **SCALES
    )
    kv[1][2, 7] = 0x7F  # in row 0's list on rank 1, so all its heads are NaN there
    out = dcp_step(query, kv, ids, valid, **SCALES)
    assert out.dropped.tolist() == [[0, 2], [0, 2]]
    assert np.isfinite(out.lse).all()
    assert same_bits(out.latent, sound.latent).all()
    assert same_bits(out.lse, sound.lse).all()


def test_a_negative_nan_in_the_query():
    """A word of 0xFF, which would be the sentinel, arrives as 0x7F: its head is NaN on every rank,
    so it is empty, and counted."""
    query, kv, ids, _ = inputs(6, 2)
    query[0][1, 1, 572:] = 0xFF
    box = Mailbox.empty(2, 1, 2)
    Rank(0, [box]).exchange(query[0])
    assert box.query[0, 1, 1, 143] == 0x7F7F7F7F
    valid = [np.array([5, 5], np.int32)] * 2
    ids = [np.abs(i) for i in ids]
    out = dcp_step(query, kv, ids, valid, **SCALES)
    assert np.argwhere(np.isneginf(out.lse)).tolist() == [[0, 1, 1]]
    assert out.dropped.tolist() == [[1, 1], [0, 0]]


class Simulation:
    """A group and its inputs, step by step, each rank on its own."""

    def __init__(self, ranks, steps):
        self.steps = [inputs(10 + s, ranks, batch=1, owner_heads=1, width=2) for s in range(steps)]
        self.boxes = [Mailbox.empty(1, ranks, 1) for _ in range(ranks)]
        self.group = [Rank(r, self.boxes) for r in range(ranks)]
        self.done = [0] * ranks  # kernels that each rank has run
        self.results = {}

    def advance(self, r):
        """Run rank r's next kernel, unless it waits or is finished; whether it ran."""
        step, kernel = divmod(self.done[r], 3)
        if step == len(self.steps):
            return False
        query, kv, ids, valid = (x[r] for x in self.steps[step])
        rank = self.group[r]
        try:
            if kernel == 0:
                rank.exchange(query)
            elif kernel == 1:
                rank.decode(kv, ids, valid, batch=1, **SCALES)
            else:
                self.results[step, r] = rank.merge(1)
        except NotArrived:
            return False
        self.done[r] += 1
        return True

    def finish(self):
        while any(self.advance(r) for r in range(len(self.group))):
            pass


STEPS = 5


@pytest.fixture(scope="module")
def expected():
    found = {}
    for ranks in (2, 3):
        for s, step in enumerate(Simulation(ranks, STEPS).steps):
            found[ranks, s] = dcp_step(*step, **SCALES)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_rank_can_overrun_another(ranks, expected, data):
    """Ranks advance in any order that their waits allow: no word is overwritten unread."""
    simulation = Simulation(ranks, STEPS)
    for r in data.draw(st.lists(st.integers(0, ranks - 1), max_size=60)):
        simulation.advance(r)
        assert max(simulation.done) - min(simulation.done) <= 2
    simulation.finish()
    assert simulation.done == [3 * STEPS] * ranks
    for (step, r), (latent, lse) in simulation.results.items():
        assert same_bits(latent, expected[ranks, step].latent[r]).all()
        assert same_bits(lse, expected[ranks, step].lse[r]).all()
    for box in simulation.boxes:
        assert np.all(box.query == QUERY_SENTINEL)
        assert np.all(box.payload == PAYLOAD_SENTINEL)
        assert np.all(box.lse == LSE_SENTINEL)


def test_a_fast_rank_is_held_within_a_step_of_a_slow_one():
    simulation = Simulation(2, STEPS)
    for _ in range(10):
        simulation.advance(0)
    assert simulation.done == [1, 0]  # its decode waits for rank 1's query
    simulation.advance(1)
    for _ in range(10):
        simulation.advance(0)
    assert simulation.done == [2, 1]  # its merge waits for rank 1's partial
    simulation.advance(1)
    for _ in range(10):
        simulation.advance(0)
    assert simulation.done == [4, 2]  # it may send its next query, while rank 1 still has to merge


def test_steps_use_the_halves_in_turn():
    query, kv, ids, valid = inputs(1, 1)
    box = Mailbox.empty(2, 1, 2)
    rank = Rank(0, [box])
    for half in (0, 1, 0):
        assert rank.parity == half
        rank.exchange(query[0])
        assert (box.query[half] != QUERY_SENTINEL).all()
        assert (box.query[1 - half] == QUERY_SENTINEL).all()
        rank.decode(kv[0], ids[0], valid[0], batch=2, **SCALES)
        assert (box.lse[half] != LSE_SENTINEL).all()
        assert (box.lse[1 - half] == LSE_SENTINEL).all()
        rank.merge(2)


def test_the_machine_has_words():
    with pytest.raises(ValueError, match="machine must be a GPU's, got IDEAL"):
        dcp_step(*inputs(1, 2), **SCALES, machine=IDEAL)


def test_wrong_arguments():
    query, kv, ids, valid = inputs(1, 2)
    with pytest.raises(ValueError, match="kv must have one entry a rank, 2"):
        dcp_step(query, kv[:1], ids, valid, **SCALES)
    with pytest.raises(ValueError, match=r"order must be a permutation of 0 to 1, got \[0, 0\]"):
        dcp_step(query, kv, ids, valid, **SCALES, order=[0, 0])
    with pytest.raises(ValueError, match=r"query must be \[B, H, 576\].*\[1, 2, 576\]\]"):
        dcp_step([query[0], query[1][:1]], kv, ids, valid, **SCALES)
    with pytest.raises(ValueError, match=r"query must have one entry a rank.*got 0"):
        dcp_step([], [], [], [], **SCALES)
    with pytest.raises(ValueError, match=r"query must be .*got \[\[2, 2, 575\], \[2, 2, 575\]\]"):
        dcp_step([q[..., :575] for q in query], kv, ids, valid, **SCALES)
    with pytest.raises(TypeError, match=r"machine must be a Machine of .*, got str"):
        dcp_step(query, kv, ids, valid, **SCALES, machine="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "error", "says"),
    [
        (-1, ValueError, "rank must be from 0 to 1, got -1"),
        (2, ValueError, "rank must be from 0 to 1, got 2"),
        (True, TypeError, "rank must be an integer from 0 to 1, got True"),
    ],
)
def test_a_rank_is_one_of_its_group(rank, error, says):
    boxes = [Mailbox.empty(8, 2, 2) for _ in range(2)]
    with pytest.raises(error, match=says):
        Rank(rank, boxes)
    with pytest.raises(ValueError, match=r"mailboxes must be one a rank, .*got 1"):
        Rank(0, boxes[:1])


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        (None, r"^mailboxes must be a sequence of Mailbox, got NoneType$"),
        (3, r"^mailboxes must be a sequence of Mailbox, got int$"),
        ([1], r"^mailboxes\[0\] must be a Mailbox of sparse_mla_reference, .*, got int$"),
        ([Mailbox.empty(1, 2, 1), None], r"^mailboxes\[1\] must be a Mailbox of .*, got NoneType$"),
    ],
)
def test_mailboxes_of_another_kind_are_refused(boxes, says):
    with pytest.raises(TypeError, match=says):
        Rank(0, boxes)


def test_a_group_without_mailboxes_is_refused():
    with pytest.raises(ValueError, match=r"^mailboxes must be one a rank, of 1 or more, got 0$"):
        Rank(0, [])


@pytest.mark.parametrize("name", ["query", "kv", "rows", "valid"])
def test_what_is_no_sequence_over_the_ranks_is_refused(name):
    given = dict(zip(("query", "kv", "rows", "valid"), inputs(1, 2), strict=True))
    with pytest.raises(
        TypeError, match=f"^{name} must be a sequence with one entry a rank, got NoneType$"
    ):
        dcp_step(**{**given, name: None}, **SCALES)


def test_an_order_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"^order must be a sequence of integers, got int$"):
        dcp_step(*inputs(1, 2), **SCALES, order=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2, 1, 576), (3, 8, 576), (2, 8, 575), (2, 8), (2, 9, 576)])
def test_a_query_of_another_shape_is_not_sent(shape):
    boxes = [Mailbox.empty(8, 2, 2) for _ in range(2)]
    with pytest.raises(ValueError, match=r"query must be \[B, 8, 576\] with B at most 2, got"):
        Rank(0, boxes).exchange(np.zeros(shape, np.uint8))
    assert all((box.query == QUERY_SENTINEL).all() for box in boxes)


def test_a_decode_with_wrong_arguments_can_be_repeated():
    query, kv, ids, valid = inputs(1, 1)
    rank = Rank(0, [Mailbox.empty(2, 1, 2)])
    rank.exchange(query[0])
    for changes, says in (
        ({"kv": kv[0][:, :512]}, "kv must be"),
        ({"rows": ids[0][:1]}, "rows must have at least 2"),
        ({"batch": 3}, "batch must be from 0 to 2, got 3"),
        ({"batch": -1}, "batch must be from 0 to 2, got -1"),
    ):
        given_now = {"kv": kv[0], "rows": ids[0], "valid": valid[0], "batch": 2, **changes}
        with pytest.raises(ValueError, match=says):
            rank.decode(**given_now, **SCALES)
    rank.decode(kv[0], ids[0], valid[0], batch=2, **SCALES)
    with pytest.raises(ValueError, match="batch must be from 0 to 2, got 3"):
        rank.merge(3)
    latent, lse = rank.merge(2)
    expected = dcp_step(query, kv, ids, valid, **SCALES)
    assert same_bits(latent, expected.latent[0]).all()
    assert same_bits(lse, expected.lse[0]).all()


def test_inputs_are_left_alone():
    given_inputs = inputs(9, 2)
    before = [[x.copy() for x in kind] for kind in given_inputs]
    dcp_step(*given_inputs, **SCALES)
    for kinds in zip(before, given_inputs, strict=True):
        for want, got in zip(*kinds, strict=True):
            assert np.array_equal(want, got)
