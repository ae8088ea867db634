import numpy as np
import pytest

from sparse_mla_verify.measure.poisoned import POISONS, poisoned, run_poisoned
from sparse_mla_verify.measure.predict import predict


@pytest.fixture(scope="module")
def case(cases):
    padded = cases["head-counts/32"]
    assert padded.padded > padded.heads
    return padded


def test_a_whole_run_has_nothing_to_report(case, stand_in):
    output = run_poisoned(stand_in(), case)
    latent, lse = predict(case)
    assert (output.unwritten, output.strayed) == (0, 0)
    assert output.rerun.same
    assert np.array_equal(output.latent, latent)
    assert np.array_equal(output.lse, lse)
    assert output.elements == latent.size + lse.size


@pytest.mark.parametrize("which", [0, 1], ids=["latent", "lse"])
def test_an_element_left_out_is_unwritten(case, stand_in, which):
    def leave_out(*buffers):
        poison = next(p[which] for p in POISONS.values() if buffers[which][-1].flat[-1] == p[which])
        buffers[which][1, 3] = poison

    output = run_poisoned(stand_in(leave_out), case)
    assert output.unwritten == (512, 1)[which]
    assert not output.rerun.same


def test_an_element_that_equals_one_poison_counts_as_written(case, stand_in):
    def write_poison(latent, lse):
        latent[0, 0, 0] = POISONS["finite"][0]
        lse[0, 0] = POISONS["NaN"][1]

    output = run_poisoned(stand_in(write_poison), case)
    assert output.unwritten == 0
    assert output.rerun.same


@pytest.mark.parametrize("place", ["head", "row"])
def test_a_write_past_heads_or_batch_has_strayed(case, stand_in, place):
    def stray(latent, lse):
        if place == "head":
            latent[0, case.heads, 5] = 0
        else:
            lse[case.batch, 0] = 0

    assert run_poisoned(stand_in(stray), case).strayed == len(POISONS)


def test_a_run_that_differs_from_the_next_is_seen(case, stand_in):
    runs = []

    def drift(latent, lse):
        runs.append(1)
        latent[0, 0, 0] ^= len(runs)

    assert run_poisoned(stand_in(drift), case).rerun.differing == 1


def test_poisons_have_the_kinds_they_are_called():
    for name, (latent, lse) in POISONS.items():
        value = np.array([lse], np.uint32).view(np.float32)[0]
        assert np.isnan(value) == (name == "NaN")
        assert (latent & 0x7F80 == 0x7F80) == (name == "NaN")
        assert latent != 0x7FFF
        assert lse != 0x7FFFFFFF


def test_buffers_have_a_guard_row(case):
    latent, lse = poisoned(case, "NaN")
    assert latent.shape == (case.batch + 1, case.padded, 512)
    assert lse.shape == (case.batch + 1, case.padded)
