import hashlib
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from examples.recording import Rows
from examples.triton_decode import model
from examples.triton_decode.cases import COUNTS, HEADS, WIDTH, cases
from examples.triton_decode.record import predict
from sparse_mla_reference import bf16, e4m3, tensor_core
from sparse_mla_reference.instructions.float32 import add, mul

CASES = {case.name: case for case in cases()}
PAGE = Path(__file__).parents[2] / "docs" / "modelling.md"


@pytest.mark.parametrize("name", CASES)
def test_model_predicts_every_bit(recording, name):
    case, seen = CASES[name], recording.facts["cases"][name]
    assert case.digest() == seen["inputs"], "the case's inputs are not those of the recording"
    predicted = Rows.of(*predict(case))
    np.testing.assert_array_equal(predicted.kept(), recording.arrays[f"{name}/latent"])
    np.testing.assert_array_equal(predicted.lse, recording.arrays[f"{name}/lse"])
    assert predicted.digests() == seen["digests"]


def test_run_had_every_case_and_no_difference(recording):
    seen = recording.facts["cases"]
    assert set(seen) == set(CASES)
    assert [(c["differing_latent"], c["differing_lse"]) for c in seen.values()] == [(0, 0)] * 4


def swapped_sum(p):
    """The kernel's tree with a warp's two exchanges in the other order."""
    lanes = add(p[:, 0::2], p[:, 1::2]).reshape(-1, 8, 4)
    return model._butterfly(model._butterfly(lanes[..., [0, 2, 1, 3]], 4), 8)


FAULTS = {
    "C added after the products": ("MMA", tensor_core.SM90_E4M3),
    "order of the sum": ("warp_tree_sum", swapped_sum),
    "logit not fused": ("fma", lambda a, b, c: add(mul(a, b), c)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_model_is_noticed(recording, fault, monkeypatch):
    monkeypatch.setattr(model, *FAULTS[fault])
    case = CASES["normal"]
    assert Rows.of(*predict(case)).digests() != recording.facts["cases"]["normal"]["digests"]


@pytest.mark.parametrize("name", ["normal", "rising"])
def test_model_is_attention(name):
    """Against float64: P in E4M3 errs by 2^-4 of itself at most, or 2^-10 where it is subnormal."""
    case = CASES[name]
    latent, lse = predict(case)
    for b, n in enumerate(case.valid):
        keys = e4m3.decode(case.kv[case.rows[b, :n]]).astype(np.float64)
        s = e4m3.decode(case.query[b]) @ keys.T * np.float64(case.scale_log2)
        p = np.exp2(s)
        if n == 0:
            assert not latent[b].view(np.uint16).any()
            assert (lse[b] == -np.inf).all()
            continue
        exact = p @ keys[:, :512] / p.sum(1, keepdims=True) * case.out_scale
        bound = np.abs(keys[:, :512]).max() * case.out_scale * 2**-4
        assert np.abs(bf16.decode(latent[b]) - exact).max() < bound
        np.testing.assert_allclose(lse[b], np.log(p.sum(1)), atol=2e-6)


def test_nan_stays_in_its_heads():
    latent, lse = predict(CASES["nan"])
    bad = np.isnan(lse)
    assert bad[0].nonzero()[0].tolist() == [5]
    assert bad[1].all()
    assert not bad[2:].any()
    np.testing.assert_array_equal(np.isnan(bf16.decode(latent)).any(-1), bad)


def test_counts_cover_full_part_single_and_none():
    assert [n % model.BLOCK == 0 for n in COUNTS] == [True, False, False, True]
    assert min(COUNTS) == 0


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernel as Triton compiles it here, if it is the version that the page and run name."""
    triton = pytest.importorskip("triton", reason="Triton is not installed: the cubin isn't made")
    if triton.__version__ != "3.6.0":
        pytest.skip(f"the cubin is that of Triton 3.6.0, here is {triton.__version__}")
    from examples.triton_decode.kernel import cross_compile

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        return cross_compile(HEADS, WIDTH).asm["cubin"]


def test_cubin_is_the_one_that_ran(compiled, recording):
    assert hashlib.sha256(compiled).hexdigest() == recording.facts["cubin_sha256"]


def test_page_quotes_the_kernels_sass(compiled, tmp_path):
    """Every instruction in the page's ``sass`` blocks is in the cubin, in that order."""
    from triton import knobs

    (tmp_path / "kernel.cubin").write_bytes(compiled)
    command = [knobs.nvidia.nvdisasm.path, "-c", str(tmp_path / "kernel.cubin")]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [instruction(line) for line in sass.splitlines()]
    blocks = re.findall(r"```sass\n(.*?)```", PAGE.read_text(), re.DOTALL)
    quoted = [instruction(line) for block in blocks for line in block.splitlines() if line]
    assert len(quoted) > 20
    position = 0
    for quote in quoted:
        assert quote in lines[position:], f"{quote} isn't there, after line {position}"
        position = lines.index(quote, position) + 1


def instruction(line):
    """Without address, comment, reuse flags and spacing."""
    text = re.sub(r"/\*.*?\*/|//.*|\.reuse|;", "", line)
    return " ".join(text.split())
