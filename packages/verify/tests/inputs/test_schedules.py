"""The layers agree on what each schedule is, and evidence of one is not taken for another's."""

import pytest

import sparse_mla_kernel.kernels.base.layout as base_layout
import sparse_mla_kernel.kernels.low_latency.layout as low_latency_layout
from sparse_mla_verify.audit.collect import cross_compiled
from sparse_mla_verify.evidence import recordings
from sparse_mla_verify.evidence.instruction_checks import check_structure
from sparse_mla_verify.inputs.cases import Signature, all_cases
from sparse_mla_verify.inputs.schedules import (
    BASE,
    LOW_LATENCY,
    REFERENCE,
    kernel_schedule,
)
from sparse_mla_verify.measure.predict import predict


@pytest.mark.parametrize("name", list(REFERENCE))
def test_kernel_and_reference_state_the_same_schedule(name):
    ours, theirs = kernel_schedule(name), REFERENCE[name]
    for field in ("split", "chunk", "qk_chains", "mma", "deal"):
        assert getattr(ours, field) == getattr(theirs, field), field
    # P and V meet in steps of the MMA's K. A warp sums P over the keys of one MMA, or over a chunk,
    # of which each of its lanes has two keys.
    layout = {"e4m3": base_layout, "f16": low_latency_layout}[ours.mma]
    assert theirs.pv_keys == layout.MMA_K
    assert theirs.warp_keys == (layout.TILE_KEYS if ours.mma == "e4m3" else 2 * layout.WARP)
    assert theirs.qk_order == ("blocked" if ours.mma == "f16" else "strided")


def test_a_signature_names_its_schedule():
    signature = Signature(5, 96, 128, 256, 8, LOW_LATENCY)
    assert signature.key == "b5-h96-p128-w256-c8-low-latency"
    assert recordings.signature_of(signature.key) == signature
    assert recordings.signature_of("b5-h96-p128-w256-c8").schedule == BASE
    with pytest.raises(ValueError, match="key must be a signature"):
        recordings.signature_of("b5-h96-p128-w256-c8-fast")
    with pytest.raises(ValueError, match=r"schedule must be one of .*, got 'fast'"):
        all_cases([], "fast")


def test_a_case_has_other_bits_and_the_same_inputs_on_another_schedule():
    base, low = (all_cases(["head-counts"], name)[0] for name in (BASE, LOW_LATENCY))
    assert base.digest() == low.digest()
    assert (predict(base)[0] != predict(low)[0]).any()


@pytest.mark.compiler
@pytest.mark.parametrize("rows", [5, 12])
def test_the_low_latency_code_is_what_the_claims_say(rows):
    artifact = cross_compiled(Signature(rows, 96, 96, 1100, rows, LOW_LATENCY), "sm_90a")
    wrong = {name: f.reason for name, f in check_structure(artifact).items() if not f.ok}
    assert not wrong
