import re
from dataclasses import dataclass

import pytest

from sparse_mla_verify.audit.collect import cross_compiled
from sparse_mla_verify.evidence.instruction_checks import CODE_CHECKS, Code, check_structure
from sparse_mla_verify.inputs.cases import Signature
from sparse_mla_verify.inputs.schedules import (
    BASE,
    LOW_LATENCY,
    LOW_LATENCY_2,
    LOW_LATENCY_4,
)


@dataclass(frozen=True)
class Text:
    """An artifact of given text."""

    ptx: str
    disassembly: str
    arch: str = "sm_90a"

    def sass(self) -> str:
        return self.disassembly


@pytest.fixture(scope="module")
def text(artifact):
    return Text(artifact.ptx, artifact.sass())


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_every_check_holds_on_every_architecture(cases, arch):
    found = check_structure(cross_compiled(cases["normal/checkpoint"].signature, arch))
    assert found.keys() == CODE_CHECKS.keys()
    assert [f"{name}: {f.reason}" for name, f in found.items() if not f.ok] == []


WAIT = r"\tgriddepcontrol\.wait;"
PTX_FAULTS = [
    ("waits-before-reads", WAIT, ""),
    ("waits-before-reads", WAIT, "\t@%p1 griddepcontrol.wait;"),
    ("waits-before-reads", WAIT, "\tld.global.b32 %r1, [%rd1];\n\tgriddepcontrol.wait;"),
    (
        "waits-before-reads",
        WAIT,
        "\tld.global.nc.v2.b32 {%r1, %r2}, [%rd1];\n\tgriddepcontrol.wait;",
    ),
    ("waits-before-reads", WAIT, "\tld.b32 %r1, [%rd1];\n\tgriddepcontrol.wait;"),
    ("waits-before-reads", WAIT, "\tprefetch.global.L2 [%rd1];\n\tgriddepcontrol.wait;"),
    ("waits-before-reads", WAIT, "\t@%p1 bra $L__after;\n\tgriddepcontrol.wait;\n$L__after:"),
    ("waits-before-reads", WAIT, "\t@%p1 ret;\n\tgriddepcontrol.wait;"),
    ("launches-dependents-at-once", r"\tgriddepcontrol\.launch_dependents;", ""),
    ("launches-dependents-at-once", WAIT, "\tgriddepcontrol.wait;\n\tld.global.b32 %r1, [%rd1];"),
    ("gathers-asynchronously", r"cp\.async\.bulk[.\w:]*", "cp.async.cg.shared.global"),
    ("gathers-asynchronously", r"mbarrier::complete_tx::bytes (?=\[%r\d+\], \[%rd)", "bulk_group "),
    ("merges-over-the-cluster", r"st\.async[.\w:]*", "st.shared::cluster.f32"),
    ("merges-over-the-cluster", r"\tbarrier\.cluster\.wait[^;]*;", ""),
    ("merges-over-the-cluster", r"(st\.async[.\w:]*)\.f32", r"\1.b16"),
    ("merges-over-the-cluster", r"(st\.async[.\w:]*)\.f32", r"\1.b32"),
    (
        "gathers-asynchronously",
        WAIT,
        "\tcp.async.cg.shared.global [%r1], [%rd1], 16, %r2;\n"
        "\tcp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];\n\tgriddepcontrol.wait;",
    ),
    ("multiplies-into-fp32", r"\.e4m3\.e4m3\.f32", ".e4m3.e5m2.f32"),
    ("multiplies-into-fp32", r"f32\.e4m3\.e4m3\.f32", "f16.e4m3.e4m3.f16"),
    ("multiplies-into-fp32", WAIT, "\twgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 x;\n"),
    ("exponentiates-by-ex2", r"ex2\.approx\.ftz\.f32", "ex2.approx.f32"),
    ("exponentiates-by-ex2", r"ex2\.approx\.ftz\.f32", "ex2.approx.ftz.bf16"),
    ("exponentiates-by-ex2", r"mul\.rn\.f32", "mul.rn.ftz.f32"),
    ("exponentiates-by-ex2", r"div\.rn\.f32", "div.full.f32"),
    ("divides-correctly-rounded", r"div\.rn\.f32", "div.approx.f32"),
    ("divides-correctly-rounded", r"div\.rn\.f32", "mul.rn.f32"),
    ("divides-correctly-rounded", WAIT, "\trcp.rn.f32 %r1, %r2;\n"),
    ("rounds-to-nearest", r"fma\.rn\.f32", "fma.rz.f32"),
    ("rounds-to-nearest", r"add\.rn\.f32", "add.rn.bf16x2"),
    ("converts-by-contract", r"cvt\.rn\.satfinite\.e4m3x2", "cvt.rn.satfinite.e5m2x2"),
    ("converts-by-contract", r"cvt\.rn\.satfinite\.e4m3x2", "cvt.rn.relu.satfinite.e4m3x2"),
    ("converts-by-contract", r"cvt\.rn\.bf16x2\.f32", "cvt.rz.bf16x2.f32"),
    ("converts-by-contract", WAIT, "\tcvt.rn.f16.f32 %rs1, %r2;\n"),
    ("keeps-registers", WAIT, "\tst.local.b32 [%rd1], %r1;\n"),
]
SCHEDULES = (BASE, LOW_LATENCY, LOW_LATENCY_4, LOW_LATENCY_2)


@pytest.mark.compiler
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_cluster_barrier_is_needed(schedule):
    """Whichever `barrier.cluster` is left out, on some path something comes too early."""
    made = cross_compiled(Signature(1, 16, 16, 2048, 1, schedule), "sm_90a")
    check = CODE_CHECKS["merges-over-the-cluster"]
    assert check(Code(made)).ok
    barriers = list(re.finditer(r"\tbarrier\.cluster\.(arrive|wait)[^;]*;", made.ptx))
    assert len(barriers) >= 2
    for barrier in barriers:
        without = made.ptx[: barrier.start()] + made.ptx[barrier.end() :]
        found = check(Code(Text(without, "")))
        assert not found.ok, f"without the {barrier[1]} at {barrier.start()}"
        assert "has no cluster barrier" in found.reason


HMMA = r"(HMMA\.16816\.F32 (R\d+), R\d+, R\d+), "
SASS_FAULTS = [
    ("waits-first-in-sass", r"ACQBULK", "NOP"),
    ("waits-first-in-sass", r"PREEXIT", "NOP"),
    ("waits-first-in-sass", r"ACQBULK", "LDG.E R2, [R2.64] ;\n/*0001*/ ACQBULK"),
    ("waits-first-in-sass", r" ACQBULK", " @P0 ACQBULK"),
    ("multiplies-by-the-model", HMMA + r"\2(?= ;)", r"\1, RZ"),  # both from zero, then added
    ("multiplies-by-the-model", HMMA + r"RZ", r"\1, R200"),  # C inside
    ("multiplies-by-the-model", r"\bFADD\b", "FADD.RZ"),
    ("multiplies-by-the-model", r"\bFADD\b", "FFMA"),
    ("multiplies-by-the-model", r"\.H1", ""),
    ("multiplies-by-the-model", r"HMMA\.16816\.F32", "HMMA.16816.F16"),
    ("multiplies-by-the-model", r"HMMA\.16816\.F32", "QMMA.16832.F32.E4M3.E4M3"),
    ("keeps-registers", r"ACQBULK", "STL [R1], R2"),
    ("keeps-registers", r"ACQBULK", "LDL.64 R2, [R1]"),
]


def planted(source, pattern, replacement, once):
    text, count = re.subn(pattern, replacement, source, count=1 if once else 0)
    assert count > 0, f"{pattern} is not there: the fault was not planted"
    return text


@pytest.mark.parametrize("once", [True, False], ids=["once", "everywhere"])
@pytest.mark.parametrize(("check", "pattern", "replacement"), PTX_FAULTS)
def test_a_fault_in_the_ptx_is_found(text, check, pattern, replacement, once):
    faulty = Text(planted(text.ptx, pattern, replacement, once), text.disassembly)
    assert not CODE_CHECKS[check](Code(faulty)).ok


@pytest.mark.parametrize("once", [True, False], ids=["once", "everywhere"])
@pytest.mark.parametrize(("check", "pattern", "replacement"), SASS_FAULTS)
def test_a_fault_in_the_sass_is_found(text, check, pattern, replacement, once):
    if check == "multiplies-by-the-model" and once and "FADD" in pattern:
        # The first FADD need not be one of a product's: take the first after an HMMA.
        head, tail = text.disassembly.split("HMMA", 1)
        faulty = Text(text.ptx, head + "HMMA" + planted(tail, pattern, replacement, once))
    else:
        faulty = Text(text.ptx, planted(text.disassembly, pattern, replacement, once))
    assert not CODE_CHECKS[check](Code(faulty)).ok


def test_an_empty_kernel_passes_no_check():
    found = check_structure(Text("", ""))
    assert not [name for name, finding in found.items() if finding.ok]
