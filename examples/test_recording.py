import numpy as np
import pytest

from examples.recording import Recording, Rows


def rows(seed=0):
    rng = np.random.default_rng(seed)
    latent = rng.integers(0, 1 << 16, (3, 16, 8), np.uint16)
    return Rows(latent, rng.integers(0, 1 << 32, (3, 16), np.uint32))


def test_a_recording_comes_back_as_it_was(tmp_path):
    recording = Recording()
    recording.add("case", rows(), "inputs", note=1)
    recording.save(tmp_path)
    loaded = Recording.load(tmp_path)
    assert loaded.facts == recording.facts
    assert loaded.arrays["case/latent"].shape == (3, 4, 8)
    np.testing.assert_array_equal(loaded.arrays["case/lse"], rows().lse)


@pytest.mark.parametrize("name", ["latent", "lse"])
def test_one_bit_changes_the_digest_of_its_row(name):
    changed = rows()
    getattr(changed, name)[1, 15] ^= 1
    same = [a == b for a, b in zip(rows().digests(), changed.digests(), strict=True)]
    assert same == [True, False, True]
    assert sum(rows().differing(changed)) > 0


def test_differing_counts_encodings_not_values():
    zero = Rows(np.zeros((1, 1, 2), np.uint16), np.zeros((1, 1), np.uint32))
    minus = Rows(np.array([[[0x8000, 0]]], np.uint16), np.array([[0x80000000]], np.uint32))
    assert zero.differing(minus) == (1, 1)


def test_no_recording_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path)
