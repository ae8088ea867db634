import json
from dataclasses import replace

import numpy as np
import pytest

from sparse_mla_verify.evidence import recordings as r
from sparse_mla_verify.evidence.evidence import recorded_case, split_stale
from sparse_mla_verify.measure.predict import assess


@pytest.fixture
def saved(synthetic, tmp_path):
    path = tmp_path / "synthetic.json"
    synthetic.save(path)
    return path


def test_a_recording_comes_back_as_it_was(synthetic, saved):
    back = r.load(saved)
    assert (back.host, back.cases, back.source) == (synthetic.host, synthetic.cases, r.SYNTHETIC)
    assert (back.machine_code, back.checks, back.outcomes) == (
        synthetic.machine_code,
        synthetic.checks,
        synthetic.outcomes,
    )
    assert back.arrays.keys() == synthetic.arrays.keys()
    for name, array in synthetic.arrays.items():
        assert np.array_equal(back.arrays[name], array)
        assert back.arrays[name].dtype == array.dtype


def test_another_schema_is_refused(saved):
    plain = json.loads(saved.read_text()) | {"schema": r.SCHEMA + 1}
    saved.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="schema must be 1, got"):
        r.load(saved)


def test_arrays_of_another_recording_are_refused(saved):
    beside = saved.with_suffix(".npz")
    data = bytearray(beside.read_bytes())
    data[len(data) // 2] ^= 1
    beside.write_bytes(data)
    with pytest.raises(ValueError, match="arrays must be those that"):
        r.load(saved)


def without_lse(recording):
    return replace(recording, arrays={n: a for n, a in recording.arrays.items() if "/lse" not in n})


def with_case(recording, **changes):
    first, *rest = recording.cases
    return replace(recording, cases=(replace(first, **changes), *rest))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (without_lse, "/lse is none, not"),
        (lambda s: replace(s, arrays={n: a[:, :1] for n, a in s.arrays.items()}), " is .*, not"),
        (lambda s: replace(s, host=replace(s.host, arch="sm_70")), "arch is sm_70, not one of"),
        (lambda s: with_case(s, digests=()), "has not a digest of each of"),
        (
            lambda s: with_case(s, digests=(("a", "b", "c", "d", "e", "f", "g"),)),
            "has not a digest",
        ),
        (lambda s: with_case(s, signature="b1"), "must be a signature"),
        (lambda s: replace(s, machine_code={"b1": "aa"}), "must be a signature"),
    ],
)
def test_a_recording_that_lacks_a_part_is_refused(synthetic, tmp_path, changed, why):
    path = tmp_path / "changed.json"
    changed(synthetic).save(path)
    with pytest.raises(ValueError, match=why):
        r.load(path)


@pytest.mark.parametrize("part", ["host", "cases", "machine_code", "arrays_sha256", "source"])
def test_a_file_without_a_part_is_refused(saved, part):
    plain = json.loads(saved.read_text())
    del plain[part]
    saved.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="must be a recording"):
        r.load(saved)


@pytest.mark.parametrize("name", ["push_h200", "hardware_h200", "guarded_h200"])
def test_a_file_of_another_kind_is_named_as_one_before_its_arrays_are_looked_for(name):
    with pytest.raises(ValueError, match=r"got a file of another kind, without .*arrays_sha256"):
        r.load(r.FOLDER / f"{name}.json")


def test_every_lse_and_the_small_latents_are_kept(synthetic, few):
    for case in few:
        assert f"{case.name}/lse" in synthetic.arrays
        whole = case.tiles <= r.WHOLE_TILES
        assert (f"{case.name}/latent" in synthetic.arrays) == whole
    assert {case.tiles <= r.WHOLE_TILES for case in few} == {True, False}


def test_a_flipped_latent_bit_changes_its_tile_alone(few, synthetic):
    case, record = few[2], synthetic.cases[2]
    latent = assess(case).latent.copy()
    assert r.differing_tiles(record, latent) == []
    latent[1, 37, 200] ^= 1
    assert r.differing_tiles(record, latent) == [(1, 2)]


def test_the_recorded_case_sees_a_flipped_bit_of_each_output(few, synthetic):
    for case, record in zip(few, synthetic.cases, strict=True):
        right = assess(case)
        same = recorded_case(case, record, synthetic.arrays, right)
        assert (same.tiles_differing, same.lse_differing, same.details) == (0, 0, ())
        latent, lse = right.latent.copy(), right.lse.copy()
        latent[0, 0, 511] ^= 1
        lse[-1, -1] ^= 1
        wrong = assess(case)
        wrong.latent[...], wrong.lse[...] = latent, lse
        other = recorded_case(case, record, synthetic.arrays, wrong)
        assert (other.tiles_differing, other.lse_differing) == (1, 1)
        assert other.details


def test_other_shapes_are_refused(few, synthetic):
    with pytest.raises(ValueError, match="latent must have the tiles of"):
        r.differing_tiles(synthetic.cases[0], assess(few[0]).latent[:1])


def test_cases_of_other_inputs_are_stale(few, synthetic, cases):
    paired, stale = split_stale([*few, cases["normal/short"], cases["counts/short"]], synthetic)
    assert [case.name for case, _ in paired] == [case.name for case in few]
    assert stale == ("normal/short", "counts/short")  # not recorded; recorded with fewer rows


def test_signatures_survive_their_keys(cases):
    for case in cases.values():
        assert r.signature_of(case.signature.key) == case.signature
    with pytest.raises(ValueError, match="key must be a signature"):
        r.signature_of("b1-h2")
