"""What the compiler made of a step's kernels."""

import re
from collections.abc import Callable

import pytest
import torch

from sparse_mla_kernel import (
    LOW_LATENCY,
    Artifact,
    MailboxLayout,
    Schedule,
    compile_step,
    cross_compile,
    cross_compile_step,
)

BOX = MailboxLayout(padded=96, owner_heads=12, ranks=8, cap=5)


@pytest.fixture(scope="module")
def step(compiles: None) -> dict[str, Artifact]:
    return cross_compile_step(5, 256, BOX)


def count(artifact: Artifact, pattern: str) -> int:
    return len(re.findall(rf"^\s*(?:@%p\d+ )?{pattern}", artifact.ptx, re.MULTILINE))


def test_nothing_spills(step: dict[str, Artifact]) -> None:
    for artifact in step.values():
        sass = artifact.sass()
        assert "EXIT" in sass  # the disassembly is one
        assert "STL" not in sass
        assert ".local" not in artifact.ptx


@pytest.mark.parametrize("name", ["query_exchange", "push_decode", "owner_merge"])
def test_early_launch(step: dict[str, Artifact], name: str) -> None:
    """Nothing is loaded from memory before the wait for the predecessor."""
    ptx = step[name].ptx
    wait = ptx.index("griddepcontrol.wait;")
    assert ptx.count("griddepcontrol.wait;") == 1
    assert wait < ptx.index("griddepcontrol.launch_dependents;")
    assert not re.search(r"\b(ld|st|red|atom)\.(relaxed|global)", ptx[:wait])


def test_the_exchange(step: dict[str, Artifact]) -> None:
    """432 threads of 448 have a vector: one load, one store."""
    assert count(step["query_exchange"], r"ld\.global\.v4\.b32") == 1
    assert count(step["query_exchange"], r"st\.relaxed\.sys\.global\.v4\.b32") == 1
    assert ".reqntid 448" in step["query_exchange"].ptx


def test_the_decode(step: dict[str, Artifact]) -> None:
    """Two vectors a thread, each asked for once and then polled; one re-armed; one pair sent."""
    decode = step["push_decode"]
    assert count(decode, r"ld\.relaxed\.sys\.global\.v4\.b32") == 4
    assert count(decode, r"st\.relaxed\.sys\.global\.v4\.b32") == 1
    assert count(decode, r"st\.relaxed\.sys\.global\.v2\.b32") == 1
    assert count(decode, r"red\.relaxed\.sys\.global\.add\.s32") == 1
    assert count(decode, r"barrier\.cluster\.wait") == 2
    assert count(decode, r"barrier\.cluster\.arrive\.relaxed") == 1
    # The first chunk's copies and the later ones'; the query is never copied in bulk.
    assert count(decode, r"cp\.async\.bulk") == 2
    # No result of its own: weak stores to global memory are all gone.
    assert count(decode, r"st\.global") == 0


def test_the_merge(step: dict[str, Artifact]) -> None:
    merge = step["owner_merge"]
    # A look at 8 words and its repetition, besides 4 looks at the device state.
    assert count(merge, r"ld\.relaxed\.sys\.global\.b32") == 2 * 8 + 4
    assert count(merge, r"ld\.relaxed\.sys\.global\.v2\.b32") == 2 * 8
    assert count(merge, r"st\.relaxed\.sys\.global\.v2\.b32") == 8
    assert count(merge, r"atom\.relaxed\.gpu\.global\.add\.s32") == 1
    assert count(merge, r"div\.rn\.f32") == 8
    assert count(merge, r"ex2\.approx\.ftz\.f32") == 8
    assert count(merge, r"cvt\.rn\.bf16x2\.f32") == 2
    assert not re.search(r"\b(add|sub|mul|fma)(\.rn)?\.ftz", merge.ptx)


@pytest.mark.parametrize("name", ["push_decode", "owner_merge"])
def test_every_wait_is_bounded(step: dict[str, Artifact], name: str) -> None:
    """Each poll has a clock at its start and one in its loop, and each loop can report."""
    clocks = len(re.findall(r"%globaltimer;", step[name].ptx))
    reports = count(step[name], r"atom\.relaxed\.gpu\.global\.cas\.b32")
    assert (clocks, reports) == (4, 2)


@pytest.mark.compiler
def test_latent_mode_has_none_of_it() -> None:
    artifact = cross_compile(5, 96, 96, 256, 5)
    assert "relaxed.sys" not in artifact.ptx
    assert "globaltimer" not in artifact.ptx
    assert count(artifact, r"barrier\.cluster\.wait") == 1


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_120a"])
def test_other_architectures(arch: str) -> None:
    for artifact in cross_compile_step(2, 64, MailboxLayout(16, 8, 2, 2), arch).values():
        assert f".target {arch}" in artifact.ptx


@pytest.mark.compiler
@pytest.mark.parametrize("owner_heads", [1, 6, 16, 32])
def test_other_sizes(owner_heads: int) -> None:
    ranks = {1: 16, 6: 8, 16: 8, 32: 4}[owner_heads]
    box = MailboxLayout(owner_heads * ranks + 8, owner_heads, ranks, 70000)
    for artifact in cross_compile_step(3, 64, box).values():
        assert artifact.cubin.startswith(b"\x7fELF")


@pytest.mark.compiler
@pytest.mark.parametrize("split", [1, 2, 8])
def test_other_schedules(split: int) -> None:
    box = MailboxLayout(16, 8, 2, 2)
    step = cross_compile_step(2, 64, box, schedule=Schedule(split=split))
    vectors = 16 * 36 // split
    assert count(step["push_decode"], r"st\.relaxed\.sys\.global\.v4\.b32") == -(-vectors // 512)


def test_push_and_step_are_the_same_decode(step: dict[str, Artifact]) -> None:
    alone = cross_compile(5, 96, 96, 256, 5, push=(12, 8, 5))
    assert alone.code_sha256 == step["push_decode"].code_sha256


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param(cross_compile_step, id="cross_compile_step"),
        pytest.param(
            lambda *sizes, **given: compile_step(*sizes, device=torch.device("cpu"), **given),
            id="compile_step",
        ),
    ],
)
def test_what_cannot_be_compiled(compiler: Callable) -> None:
    says = r"^schedule\.kernel must be 'base' in push mode, got 'low_latency'$"
    with pytest.raises(ValueError, match=says):
        compiler(2, 16, BOX, schedule=LOW_LATENCY)
    with pytest.raises(TypeError, match=r"^schedule must be a sparse_mla_kernel\.Schedule, got "):
        compiler(2, 16, BOX, schedule="base")
    with pytest.raises(TypeError, match=r"^box must be a MailboxLayout, got None$"):
        compiler(2, 16, None)


def test_the_architecture_is_checked() -> None:
    says = "^arch must be sm_90a, sm_100a, sm_103a or sm_120a, got 'sm_80'$"
    with pytest.raises(ValueError, match=says):
        cross_compile_step(2, 16, BOX, "sm_80")
