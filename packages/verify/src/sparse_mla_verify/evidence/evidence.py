"""What claims are decided from: a run on a GPU or a recording of one, against the reference."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_verify.evidence.guarded_recordings import GuardedRecording
from sparse_mla_verify.evidence.instruction_checks import CodeFinding
from sparse_mla_verify.evidence.push_recordings import PushRecording
from sparse_mla_verify.evidence.recordings import (
    Check,
    Host,
    RecordedCase,
    Recording,
    differing_tiles,
)
from sparse_mla_verify.inputs.cases import HEAD_TILE, Case
from sparse_mla_verify.measure.bits import compare_bits
from sparse_mla_verify.measure.poisoned import Output, Runner, run_poisoned
from sparse_mla_verify.measure.predict import Assessment

LIVE, RECORDED, COMPILED = "live", "recorded", "compiled"

Digests = tuple[tuple[str, ...], ...]  # of each row's head tiles
Step = Callable[[str], None]  # told of each case when it is done


@dataclass(frozen=True, eq=False)
class CaseEvidence:
    """One case: what the kernel gave, how it compares with the reference and the exact answer.

    latent `[batch, heads, 512]` and lse `[batch, heads]` are the kernel's encodings. A recording
    has hashes of the latents: the reference's latents stand here, and they are the kernel's where
    the hashes agree.
    """

    case: Case
    latent: NDArray[np.uint16]
    lse: NDArray[np.uint32]
    tiles_differing: int  # latent tiles with any bit that differs from the reference's
    lse_differing: int
    unwritten: int
    strayed: int
    rerun_differing: int
    assessment: Assessment
    details: tuple[str, ...] = ()
    digests: Digests | None = None  # of the kernel's latents; None: those of `latent`


@dataclass(frozen=True)
class Trial:
    """The comparison of a counterfactual with a kernel's bits.

    A tile is 16 heads of a row, and in a push step the heads of one owner. `telling` counts the
    elements (latents and LSEs) in which the kernel and the counterfactual differ. It counts only
    where the kernel's bits are known. A recording has hashes of them, so that they are known where
    they are the contract's.
    """

    name: str
    cases: tuple[str, ...]
    tiles: int = 0
    tiles_of_contract: int = 0  # whose bits, LSEs included, are the contract's
    tiles_of_counterfactual: int = 0
    elements: int = 0
    telling: int = 0

    @property
    def contract_holds(self) -> bool:
        """Whether every bit is the contract's."""
        return 0 < self.tiles == self.tiles_of_contract

    @property
    def counterfactual_holds(self) -> bool:
        """Whether every bit is the counterfactual's."""
        return 0 < self.tiles == self.tiles_of_counterfactual

    def __add__(self, other: "Trial") -> "Trial":
        return Trial(
            self.name,
            self.cases + other.cases,
            self.tiles + other.tiles,
            self.tiles_of_contract + other.tiles_of_contract,
            self.tiles_of_counterfactual + other.tiles_of_counterfactual,
            self.elements + other.elements,
            self.telling + other.telling,
        )

    def __str__(self) -> str:
        return f"{self.telling:,} of {self.elements:,} elements reject {self.name}"


@dataclass(frozen=True, eq=False)
class Pushed:
    """Push mode's recordings, by file name, and what today's source compiles to; needs no GPU."""

    recordings: Mapping[str, PushRecording]
    compiled: Mapping[str, str]  # kernel and sizes -> hash of today's machine code
    trials: Mapping[str, Trial]  # by counterfactual
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Evidence:
    """All that an audit found."""

    source: str
    host: Host | None
    cases: tuple[CaseEvidence, ...]
    checks: Mapping[str, Check]
    machine_code: Mapping[str, str]  # signature -> SHA-256 of what ran
    compiled: Mapping[str, str] = field(default_factory=dict)  # the same of today's source
    compiler: str = ""  # the DSL's version here
    findings: Mapping[str, Mapping[str, CodeFinding]] = field(default_factory=dict)  # by signature
    trials: Mapping[str, Trial] = field(default_factory=dict)  # by counterfactual
    push: Pushed | None = None  # None: not gathered
    guarded: GuardedRecording | None = None  # of this schedule; None: not gathered
    stale: tuple[str, ...] = ()  # cases that the recording lacks or has of other inputs
    notes: tuple[str, ...] = ()  # why something could not be gathered


def run_cases(
    runner: Runner, cases: Sequence[Case], done: Step = lambda name: None
) -> dict[str, Output]:
    """Run every case over each poison; by case name."""
    outputs = {}
    for case in cases:
        outputs[case.name] = run_poisoned(runner, case)
        done(case.name)
    return outputs


def live_case(case: Case, output: Output, assessment: Assessment) -> CaseEvidence:
    """Compare a case's results with the predicted ones."""
    latent = compare_bits(f"{case.name} latent", output.latent, assessment.latent)
    lse = compare_bits(f"{case.name} lse", output.lse, assessment.lse)
    return CaseEvidence(
        case=case,
        latent=output.latent,
        lse=output.lse,
        tiles_differing=_tiles_differing(output.latent, assessment.latent),
        lse_differing=lse.differing,
        unwritten=output.unwritten,
        strayed=output.strayed,
        rerun_differing=output.rerun.differing,
        assessment=assessment,
        details=tuple(str(c) for c in (latent, lse, output.rerun) if c.differing),
    )


def _tiles_differing(actual: NDArray[np.uint16], expected: NDArray[np.uint16]) -> int:
    differs = np.any(actual != expected, axis=-1)
    return int(np.any(differs.reshape(len(differs), -1, HEAD_TILE), axis=-1).sum())


def recorded_case(
    case: Case, record: RecordedCase, arrays: Mapping[str, NDArray[Any]], assessment: Assessment
) -> CaseEvidence:
    """Compare a recorded case's digests and arrays with the predicted results."""
    tiles = differing_tiles(record, assessment.latent)
    details = [f"{case.name} row {r}, tile {t}: the recorded digest differs" for r, t in tiles]
    stored_lse = arrays[f"{case.name}/lse"]
    lse = compare_bits(f"{case.name} lse", stored_lse, assessment.lse)
    latent = arrays.get(f"{case.name}/latent", assessment.latent)
    kept = compare_bits(f"{case.name} latent", latent, assessment.latent)
    return CaseEvidence(
        case=case,
        latent=latent,
        lse=stored_lse,
        tiles_differing=max(len(tiles), _tiles_differing(latent, assessment.latent)),
        lse_differing=lse.differing,
        unwritten=record.unwritten,
        strayed=record.strayed,
        rerun_differing=record.rerun_differing,
        assessment=assessment,
        details=(*details[:3], *(str(c) for c in (kept, lse) if c.differing)),
        digests=record.digests,
    )


def split_stale(
    cases: Sequence[Case], recording: Recording
) -> tuple[list[tuple[Case, RecordedCase]], tuple[str, ...]]:
    """Pair cases with their records; name those that are missing or have other inputs."""
    records = {record.name: record for record in recording.cases}
    paired, stale = [], []
    for case in cases:
        record = records.get(case.name)
        if record is None or record.inputs != case.digest():
            stale.append(case.name)
        else:
            paired.append((case, record))
    return paired, tuple(stale)
