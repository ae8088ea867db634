import numpy as np
import pytest

from sparse_mla_verify.predict import assess, assess_all


@pytest.mark.parametrize("workers", [1, 2])
def test_pieces_give_what_the_whole_gives(few, workers, monkeypatch):
    monkeypatch.setattr("sparse_mla_verify.predict.ITEM_TILE_KEYS", 100)
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
    latent, lse = (array.copy() for array in (assess(case).latent, assess(case).lse))
    latent[0, 0, 0] ^= 0x4000
    measured = assess_all([case], {case.name: (latent, lse)}, workers=1)[case.name]
    assert measured.bounds.outside == 1
    assert measured.latent[0, 0, 0] != latent[0, 0, 0]


def test_a_row_alone_is_the_row_in_its_batch(few):
    case = few[1]
    whole = assess(case)
    for row in range(case.batch):
        assert np.array_equal(assess(case.row(row)).latent[0], whole.latent[row])
