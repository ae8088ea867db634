"""The kernels of the hardware comparison, compiled for sm_90a; and the shipped recording."""

import functools

import numpy as np
import pytest

from sparse_mla_verify.audit.collect import dsl_version
from sparse_mla_verify.evidence.recordings import FOLDER
from sparse_mla_verify.hardware import arithmetic, instructions, kernels
from sparse_mla_verify.hardware.comparison import digest
from sparse_mla_verify.hardware.record import (
    GPU,
    GROUPS,
    families_of,
    instruction_of,
    load,
    names_of,
    shortcomings,
    tables_hash,
)
from sparse_mla_verify.hardware.sweeps import SWEEPS, expected_hash

RECORDING = FOLDER / "hardware_h200.json"


@functools.cache
def built(name):
    return kernels.build(name)[1]


def test_everything_that_is_compared_has_a_kernel():
    assert set(kernels.names()) == set(names_of(GROUPS))


@pytest.mark.compiler
@pytest.mark.parametrize("name", kernels.names())
def test_it_compiles_to_the_instruction(name):
    artifact = built(name)
    assert kernels.expected_sass(name) in artifact.sass()
    if name != "log2f":
        assert instruction_of(name) in artifact.ptx


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"name must be one of ex2, .*, got 'sin'"):
        kernels.build("sin")


@pytest.mark.compiler
def test_emulated_e4m3_unpacks_and_chains_from_zero():
    """What the model SM90_E4M3 says: two HMMA, the first from zero, then an FADD."""
    lines = [line for line in built("SM90_E4M3").sass().splitlines() if "HMMA" in line]
    starts = [line for line in lines if ", RZ" in line]
    assert len(starts) * 2 == len(lines) > 0
    assert "F2FP.F16.E4M3.UNPACK_B" in built("SM90_E4M3").sass()


# ---- the shipped recording ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording():
    return load(RECORDING)


def part_of(recording, name, family):
    parts = next(c.parts for c in recording.compared if c.name == name)
    return next(part for part in parts if part.name == family)


def test_the_models_say_how_much_of_them_was_compared(recording):
    for compared in recording.compared:
        if compared.name in instructions.INSTRUCTIONS:
            evidence = instructions.INSTRUCTIONS[compared.name].model.evidence
            assert (evidence.verified, evidence.elements) == (recording.host.gpu, compared.inputs)


def test_it_is_a_complete_gpu_run_without_a_mismatch(recording):
    assert recording.source == GPU
    assert recording.host.gpu_count >= 1
    assert shortcomings(recording) == []
    assert recording.seconds < 600


def test_todays_models_have_the_recorded_tables(recording):
    assert {c.name: c.tables for c in recording.compared} == {
        name: tables_hash(name) for name in names_of(GROUPS)
    }


@pytest.mark.compiler
def test_todays_kernels_are_the_recorded_ones(recording):
    assert dsl_version() == recording.host.dsl
    assert {c.name: c.machine_code for c in recording.compared} == {
        name: built(name).code_sha256 for name in kernels.names()
    }


@pytest.mark.parametrize("name", SWEEPS)
def test_the_models_give_the_recorded_hash_of_a_binade(recording, name):
    hashes = part_of(recording, name, families_of(name)[0]).results_digest
    for head in (126, 510):
        assert f"{expected_hash(name, head):016x}" == hashes[16 * head : 16 * head + 16]


@pytest.mark.parametrize("name", [*arithmetic.OPERATIONS, *instructions.INSTRUCTIONS])
def test_the_models_give_the_recorded_digests_of_every_family(recording, name):
    kind = arithmetic if name in arithmetic.OPERATIONS else instructions
    for family in families_of(name):
        part = part_of(recording, name, family)
        inputs, want = kind.expected(name, family, 0)
        assert digest(*inputs) == part.inputs_digest, family
        assert digest(want.astype(np.uint32)) == part.results_digest, family
