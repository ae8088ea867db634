from dataclasses import replace

import numpy as np
import pytest

from sparse_mla_reference import BASE, decode
from sparse_mla_verify.measure.bits import compare_bits
from sparse_mla_verify.measure.predict import assess, assess_all, predict


@pytest.mark.parametrize("workers", [1, 2])
def test_pieces_give_what_the_whole_gives(few, workers, monkeypatch):
    monkeypatch.setattr("sparse_mla_verify.measure.predict.ITEM_TILE_KEYS", 100)
    counted = []
    together = assess_all(few, workers=workers, advance=lambda case, tiles: counted.append(tiles))
    assert sum(counted) == sum(case.tiles for case in few)
    assert len(counted) > len(few)
    for case in few:
        whole, joined = assess(case), together[case.name]
        assert np.array_equal(whole.latent, joined.latent)
        assert np.array_equal(whole.lse, joined.lse)
        assert whole.latent_errors.counts == joined.latent_errors.counts
        assert whole.bounds.elements == joined.bounds.elements


def test_given_results_are_what_is_measured(few):
    case = few[0]
    latent, lse = assess(case).latent.copy(), assess(case).lse.copy()
    latent[0, 0, 0] ^= 0x4000
    measured = assess_all([case], {case.name: (latent, lse)}, workers=1)[case.name]
    assert measured.bounds.outside == 1
    assert measured.latent[0, 0, 0] != latent[0, 0, 0]


@pytest.mark.parametrize("other", [{"split": 2}, {"chunk": 8}, {"qk_chains": 1}, {"warp_keys": 4}])
def test_the_cases_tell_schedules_apart(cases, other):
    """On bytes of all exponents: sums of unit normal products are exact in any order."""
    case = cases["uniform-bytes/checkpoint"].row(0)
    latent, lse = decode(**case.arguments, schedule=replace(BASE, **other))
    ours, ours_lse = predict(case)
    differing = compare_bits("latent", latent, ours).differing
    assert differing + compare_bits("lse", lse, ours_lse).differing > 0


def test_a_row_alone_is_the_row_in_its_batch(few):
    case = few[1]
    whole = assess(case)
    for row in range(case.batch):
        assert np.array_equal(assess(case.row(row)).latent[0], whole.latent[row])
