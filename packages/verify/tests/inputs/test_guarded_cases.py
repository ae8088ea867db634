import numpy as np
import pytest

from sparse_mla_verify.evidence.recordings import load, shipped
from sparse_mla_verify.inputs.cases import NAN_BYTE
from sparse_mla_verify.inputs.guarded_cases import (
    MAPPED,
    MORE_ROWS,
    OUTSIDE,
    ROWS,
    SHAPES,
    guarded_case,
    unnamed,
)
from sparse_mla_verify.inputs.schedules import BASE, LOW_LATENCY, REFERENCE
from sparse_mla_verify.measure.predict import predict


@pytest.fixture(scope="module", params=SHAPES)
def case(request):
    return guarded_case(request.param, BASE)


def counting(case):
    return np.arange(case.rows.shape[1]) < case.counts[:, None]


def inside(case):
    return (case.rows >= 0) & (case.rows < ROWS)


def test_all_that_counts_is_a_row_of_the_cache_or_one_of_the_ids_outside(case):
    assert case.kv.shape == (ROWS, 576)
    assert case.kv.nbytes == MAPPED == 9 * 2**21
    within = counting(case)
    assert set(case.rows[within & ~inside(case)]) == set(OUTSIDE)
    assert set(case.rows[~within]) <= {ROWS, -1}
    named = np.unique(case.rows[inside(case)])
    assert (named[0], named[-1]) == (0, ROWS - 1)
    assert not np.any(case.kv[named] & 0x7F == NAN_BYTE)
    assert np.all(np.delete(case.kv, named, axis=0) == NAN_BYTE)


def test_ids_outside_stand_everywhere_and_entries_past_the_count_exist():
    case = guarded_case("guarded/32-heads", BASE)
    shares = [np.mean(inside(case)[r, :n]) for r, n in enumerate(case.counts)]
    assert min(shares) == 0  # a row of them alone
    assert any(np.sum(inside(case)[r, :n]) == 1 for r, n in enumerate(case.counts))
    assert np.all(case.counts < case.rows.shape[1])
    first = {case.rows[r, 0] in OUTSIDE for r in range(case.batch)}
    last = {case.rows[r, n - 1] in OUTSIDE for r, n in enumerate(case.counts)}
    assert first == last == {True, False}


def test_rows_that_no_list_names_stand_past_the_counts_alone(case):
    other, within = unnamed(case), counting(case)
    assert set(other.rows[~within]) == {ROWS, ROWS + 1}
    longer = ROWS + MORE_ROWS
    assert not np.any((other.rows[within] >= ROWS) & (other.rows[within] < longer))
    assert np.array_equal(other.rows[within & inside(case)], case.rows[within & inside(case)])
    assert np.array_equal(inside(other)[within], inside(case)[within])
    assert other.digest() != case.digest()


def test_the_reference_gives_the_same_bits_either_way():
    case = guarded_case("guarded/16-heads", LOW_LATENCY).row(0)
    (latent, lse), other = predict(case), predict(unnamed(case))
    assert np.array_equal(latent, other[0])
    assert np.array_equal(lse, other[1])
    assert not np.any(latent == 0)
    assert not np.any(lse == 0)


def test_the_kernels_are_those_of_the_other_recordings_in_both_sizes_of_clusters():
    from sparse_mla_kernel.kernels.low_latency.decode import tiles_of

    for schedule, model in REFERENCE.items():
        made = [guarded_case(name, schedule) for name in SHAPES]
        path = shipped(schedule)
        assert path is not None
        assert {c.signature.key for c in made} <= load(path).machine_code.keys()
        if schedule != BASE:
            assert {tiles_of(c.batch, c.heads, model.split) for c in made} == {1, 2}
        # Rows of which each CTA has one chunk, and of which it has several.
        counts = np.concatenate([c.counts for c in made])
        assert counts.min() <= model.chunk < model.split * model.chunk < counts.max()
