from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from examples.flashmla import model
from examples.flashmla.cases import HEADS, cases
from examples.flashmla.record import VARIANT_CASE, predict, variants
from sparse_mla_reference import bf16

CASES = {case.name: case for case in cases()}
PAGE = Path(__file__).parents[2] / "docs" / "modelling.md"


@pytest.fixture(scope="module")
def predictions(recording):
    """The model's rows by case, over the splits that the run's scheduler chose."""
    tables = {name: recording.arrays[f"{name}/metadata"] for name in CASES}
    return {name: predict(case, tables[name]) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_model_predicts_every_bit(recording, predictions, name):
    case, seen = CASES[name], recording.facts["cases"][name]
    assert case.digest() == seen["inputs"], "the case's inputs are not those of the recording"
    np.testing.assert_array_equal(predictions[name].kept(), recording.arrays[f"{name}/latent"])
    np.testing.assert_array_equal(predictions[name].lse, recording.arrays[f"{name}/lse"])
    assert predictions[name].digests() == seen["digests"]


def test_run_had_every_case_and_no_difference(recording):
    seen = recording.facts["cases"]
    assert set(seen) == set(CASES)
    assert {(c["differing_latent"], c["differing_lse"]) for c in seen.values()} == {(0, 0)}


def test_cases_split_as_they_are_meant_to(recording):
    """None, none, none, a block each, several blocks each."""

    def splits(name):
        table, case = recording.arrays[f"{name}/metadata"], CASES[name]
        return [model.splits_of(table, case.blocks, row) for row in case.kept]

    for name in ("one_block", "scaled", "blocks"):
        assert all(row == [(0, CASES[name].blocks)] for row in splits(name))
    assert all(stop - start == 1 for row in splits("splits") for start, stop in row)
    assert all(len(row) > 1 for row in splits("splits") + splits("long_splits"))
    assert any(stop - start > 1 for row in splits("long_splits") for start, stop in row)


def test_variants_explain_what_the_run_counted(recording, predictions):
    """The model's own rows are the run's (above), so the counts can be made again from them."""
    case, table = CASES[VARIANT_CASE], recording.arrays[f"{VARIANT_CASE}/metadata"]
    counts = variants(case, predictions[VARIANT_CASE], table)
    assert counts == recording.facts["variants"]
    explained = {name: c["latent"] + c["lse"] for name, c in counts.items()}
    most = HEADS * (model.LATENT + 1)
    assert explained.pop("as the SASS reads") == most
    # Not told apart by these outputs; see the page.
    assert explained.pop("1 / sum correctly rounded") == most
    assert max(explained.values()) < most


def test_page_has_the_runs_figures(recording):
    page = PAGE.read_text()
    for name, count in recording.facts["variants"].items():
        line = f"| {name} | {count['latent']:,} | {count['lse']} |"
        assert line in page


def test_log_of_the_scale_is_the_same_either_way():
    for case in CASES.values():
        exact = np.float32(case.softmax_scale * np.log2(np.e))
        assert exact == np.float32(case.softmax_scale) * model.LOG2_E


def test_logf_is_within_an_ulp():
    x = np.exp(np.random.default_rng(0).uniform(-87, 88, 100_000)).astype(np.float32)
    exact = np.log(x.astype(np.float64))
    error = np.abs(model.logf(x) - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert error.max() < 1
    edges = model.logf(np.array([0, 1, np.inf, np.nan, -1, 1e-40], np.float32))
    np.testing.assert_array_equal(
        edges[:5], np.array([-np.inf, 0, np.inf, np.nan, np.nan], np.float32)
    )
    np.testing.assert_allclose(edges[5], np.log(np.float64(np.float32(1e-40))), rtol=1e-7)


def test_splits_of_reads_the_table():
    table = np.array([[0, 1, 0, 2, 0, 0, 0, 0], [1, 1, 2, 3, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0]])
    rows = [model.splits_of(table.astype(np.int32), 4, row) for row in range(3)]
    assert rows == [[(0, 4)], [(0, 2), (2, 3), (3, 4)], [(0, 4)]]


def test_dequantise_rounds_twice_and_masks():
    """BF16(scale), then BF16 of the product."""
    scale = np.full((2, 4), 1 + 2**-8 + 2**-20, np.float32)  # just over a tie: 1 + 2^-7
    codes = np.full((2, 512), 0x39, np.uint8)  # 1.125
    rope = np.ones((2, 64), ml_dtypes.bfloat16)
    keys = model.dequantise(model.Tokens(codes, scale, rope, np.array([True, False])))
    # 1.125 (1 + 2^-7) = 1.1337890625: between 1.1328125 and 1.140625, nearer the first.
    assert set(bf16.decode(keys[0]).tolist()) == {1.1328125, 1.0}
    assert not keys[1].view(np.uint16).any()
