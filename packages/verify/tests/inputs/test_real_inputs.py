"""The stored activations are what docs/real-inputs.md says, and have the outliers they are for."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparse_mla_verify.inputs import real_inputs
from sparse_mla_verify.inputs.cases import (
    COLUMNS,
    LATENT,
    NAN_BYTE,
    all_cases,
    e4m3_values,
    exact_logits,
)
from sparse_mla_verify.measure.predict import assess

ROOT = Path(__file__).parents[4]
FILE_SHA256 = "8b53f43907a5047dfe6f399e2d9285d2aca3297144f7e7d8b6895fc0b2fe2ead"
CACHE, QUERY = "kv, as E4M3", "query, as E4M3"


@pytest.fixture(scope="module")
def inputs():
    return real_inputs.load()


@pytest.fixture(scope="module")
def made():
    return all_cases(["real-activations"])


def used_kv(case):
    ids = [case.rows[r, : case.counts[r]] for r in range(case.batch)]
    return case.kv[np.concatenate(ids)]


def test_the_file_is_the_one_that_was_made(inputs):
    assert hashlib.sha256(real_inputs.FILE.read_bytes()).hexdigest() == FILE_SHA256
    assert inputs.kv.shape == (384, COLUMNS)
    assert inputs.query.shape == (5, 48, COLUMNS)
    assert inputs.keys.shape == (5, 256)


def test_the_file_is_read_only_when_its_cases_are_made():
    code = (
        "from sparse_mla_verify.inputs import cases, real_inputs; "
        "cases.all_cases(['tiny']); assert real_inputs.load.cache_info().currsize == 0; "
        "cases.all_cases(['real-activations']); assert real_inputs.load.cache_info().currsize == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_text_is_the_licence(inputs):
    text = (ROOT / "packages" / "verify" / inputs.made["text"]).read_bytes()
    assert hashlib.sha256(text).hexdigest() == inputs.made["text_sha256"]
    assert text == (ROOT / "LICENSE").read_bytes()


def test_every_byte_is_finite_and_each_tensor_reaches_448(inputs):
    for tensor in (inputs.kv, inputs.query):
        assert not np.any(tensor & 0x7F == NAN_BYTE)
        assert np.abs(e4m3_values(tensor)).max() == 448
    assert len(np.unique(inputs.kv, axis=0)) == len(inputs.kv)


def test_the_scales_are_exact_and_multiply_up(inputs):
    made = inputs.made
    product = made["softmax_scale"] * made["query_scale"] * made["kv_scale"] * np.log2(np.e)
    assert inputs.scale_log2 == float(np.float32(inputs.scale_log2))
    assert np.float32(product) == np.float32(inputs.scale_log2)
    assert inputs.out_scale == made["kv_scale"] == float(np.float32(made["kv_scale"]))


def test_the_stored_figures_are_those_of_the_bytes(inputs):
    figures = inputs.made["figures"]
    for name, tensor in ((CACHE, inputs.kv), (QUERY, inputs.query)):
        assert real_inputs.outliers(e4m3_values(tensor)) == pytest.approx(figures[name], abs=0.011)


def test_the_outlier_channels_hold_in_what_a_case_reads(made, cases):
    """The bounds lie under the figures measured, and well over what random inputs have."""
    names = real_inputs.FIGURES
    bounds = dict(zip(names, (15, 25, 6, 8, 20), strict=True))
    for case in made:
        found = real_inputs.outliers(e4m3_values(used_kv(case)))
        assert all(found[name] > bound for name, bound in bounds.items()), (case.name, found)
        query = case.query[: case.batch, : case.heads]
        assert real_inputs.outliers(e4m3_values(query))[names[3]] > 5
    normal = real_inputs.outliers(e4m3_values(used_kv(cases["normal/checkpoint"])))
    assert not any(normal[name] > bound for name, bound in bounds.items()), normal


def test_the_outliers_are_of_the_latent_and_so_of_v(inputs):
    top = np.abs(e4m3_values(inputs.kv)).max(axis=0)
    assert np.argmax(top) < LATENT
    assert top[:LATENT].max() > 5 * np.median(top[LATENT:])


def test_attention_is_neither_uniform_nor_on_one_key(made):
    for case in made:
        bits = []
        for row in range(case.batch):
            logits = exact_logits(case, row)
            weight = np.exp2(logits - logits.max(axis=1, keepdims=True))
            weight /= weight.sum(axis=1, keepdims=True)
            bits.append(-np.sum(weight * np.log2(weight), axis=1) / np.log2(case.counts[row]))
        share = np.concatenate(bits)  # of the entropy of equal weights
        assert 0.4 < np.median(share) < 0.9, case.name
        assert np.percentile(share, 10) < 0.4  # some heads are sharp
        assert 0.8 < np.percentile(share, 90) < 0.95  # some broad


def test_no_token_attends_to_a_later_one(inputs):
    tokens = np.arange(379, 384)
    assert np.all(inputs.keys <= tokens[:, None])
    assert all(len(set(keys)) == 256 for keys in inputs.keys.tolist())


def test_the_reference_stays_within_its_bounds(made):
    for case in made:
        assessment = assess(case)
        assert assessment.bounds.outside == assessment.bounds.unbounded == 0
        assert assessment.bounds.elements == case.batch * case.heads * (LATENT + 1)


def test_a_seed_moves_the_rows_of_the_cache_and_nothing_else(made):
    case, other = made[0], all_cases(["real-activations"], seed=7)[0]
    assert not np.array_equal(case.rows, other.rows)
    assert np.array_equal(case.query, other.query)
    assert np.array_equal(used_kv(case), used_kv(other))


def test_outliers_knows_a_planted_one():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1000, 100))
    assert real_inputs.outliers(values)["column RMS / median"] < 1.2
    assert abs(real_inputs.outliers(values)["kurtosis"] - 3) < 0.1
    values[:, 7] *= 20
    assert 18 < real_inputs.outliers(values)["column RMS / median"] < 22


def test_the_document_shows_the_stored_figures(inputs):
    page = (ROOT / "docs" / "real-inputs.md").read_text()
    assert real_inputs.markdown(inputs.made["figures"]) in page
    assert "\n".join(inputs.made["printed"]) in page
    for case in all_cases(["real-activations"]):
        assert f"`{case.name}`" in page
        assert ", ".join(map(str, case.counts)) in page
