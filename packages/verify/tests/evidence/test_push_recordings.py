"""The recordings of push mode that come with the package, on a computer without a GPU."""

import pytest

from sparse_mla_verify.audit import collect
from sparse_mla_verify.audit.collect import dsl_version
from sparse_mla_verify.evidence.push_recordings import key_of, load, sizes_of
from sparse_mla_verify.evidence.recordings import FOLDER

ONE, TWO = "push_h200.json", "push_h200_x2.json"


@pytest.fixture(params=[ONE, TWO])
def recording(request):
    return load(FOLDER / request.param)


def test_no_bit_differed(recording):
    assert [check.name for check in recording.checks if not check.same] == []


def test_one_gpu_emulated_two_four_and_eight_ranks():
    recording = load(FOLDER / ONE)
    assert recording.host.gpu_count == 1
    names = [check.name for check in recording.checks]
    for sizes in ("D=2 x 48", "D=2 x 64", "D=4 x 24", "D=4 x 32", "D=8 x 12", "D=8 x 16"):
        for part in ("special", "steps"):
            assert f"{part}/{sizes} heads" in names


def test_two_gpus_ran_the_steps_the_replays_and_the_loss_of_a_peer():
    recording = load(FOLDER / TWO)
    assert recording.host.gpu_count == 2
    elements = {check.name: check.elements for check in recording.checks}
    a_step = 5 * 96 * 513  # both ranks' latents and LSEs of 5 rows
    assert elements["steps"] == elements["steps, delayed"] == 2000 * a_step
    assert elements["graph of 1"] == elements["graph of 1, new inputs"] == 1000 * a_step
    assert elements["graph of 3"] == 3 * 1000 * a_step
    assert elements["lost peer"] > 0
    assert elements["after reset"] > 0


def test_the_step_is_three_times_as_fast_as_collectives():
    times = {(t.name, t.mode): t.us for t in load(FOLDER / TWO).timings}
    for mode in ("graph", "eager"):
        for baseline in ("a", "b"):
            assert times[baseline, mode] >= 3 * times["step", mode]


@pytest.mark.compiler
def test_todays_source_compiles_to_the_cubins_that_two_gpus_ran():
    """`nox -s audit` compiles all of them; these are among those of one GPU."""
    one, two = load(FOLDER / ONE), load(FOLDER / TWO)
    assert two.machine_code.items() <= one.machine_code.items()
    assert dsl_version() == two.host.dsl
    (sizes,) = {sizes_of(key) for key in two.machine_code}
    assert collect.compile_step(*sizes, f"{two.host.arch}a") == two.machine_code


def test_a_cubins_name_gives_its_sizes():
    assert sizes_of(key_of("decode", 5, 48, 2, 16)) == (5, 48, 2, 16)
    with pytest.raises(ValueError, match="key must be a kernel's name"):
        sizes_of("decode-b5-o48")
