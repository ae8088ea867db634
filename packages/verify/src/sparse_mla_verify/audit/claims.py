"""The claims: statements about the kernel, each with the function that decides it from evidence."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from types import MappingProxyType

import numpy as np

from sparse_mla_verify.evidence.evidence import (
    LIVE,
    RECORDED,
    CaseEvidence,
    Evidence,
    Trial,
)
from sparse_mla_verify.evidence.guarded_recordings import GuardedRecording, stale, unpredicted
from sparse_mla_verify.evidence.instruction_checks import CODE_CHECKS as STRUCTURE
from sparse_mla_verify.inputs.cases import LATENT, NAN_BYTE, Case
from sparse_mla_verify.inputs.guarded_cases import GIVEN, OUTSIDE, SHAPES
from sparse_mla_verify.measure.bits import values_of
from sparse_mla_verify.measure.poisoned import GUARD_ROWS, POISONS
from sparse_mla_verify.models.counterfactuals import CATALOGUE, Counterfactual
from sparse_mla_verify.models.counterfactuals import CLAIMS as CONTRACT
from sparse_mla_verify.push import lse_counterfactuals

NEGATIVE_INFINITY = 0xFF800000  # FP32


class Status(Enum):
    """How a claim came out."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """A status with its figures, and the details to show when the status is not a pass."""

    status: Status
    figures: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A statement, the stage that it is about, the kind of its evidence, and how it is decided."""

    name: str
    statement: str
    stage: str
    kind: str
    decide: Callable[[Evidence], Verdict]
    counterfactuals: tuple[Counterfactual, ...] = ()


_CLAIMS: list[Claim] = []


def claim(
    stage: str, kind: str
) -> Callable[[Callable[[Evidence], Verdict]], Callable[..., Verdict]]:
    """Register a function as a claim of its own name; its docstring is the statement."""

    def register(decide: Callable[[Evidence], Verdict]) -> Callable[..., Verdict]:
        statement = " ".join((decide.__doc__ or "").split())
        name = decide.__name__.replace("_", "-")
        _CLAIMS.append(Claim(name, statement, stage, kind, decide))
        return decide

    return register


def all_claims() -> tuple[Claim, ...]:
    """The claims in the order of reports."""
    contract = tuple(map(_of_the_contract, CONTRACT))
    return (*_CLAIMS, _unread(), *contract, _pushed_lse(), *map(_structural, STRUCTURE))


def _undecided(why: str) -> Verdict:
    return Verdict(Status.UNDECIDED, why)


def _decided(ok: bool, figures: str, details: Iterable[str] = ()) -> Verdict:
    return Verdict(Status.PASS if ok else Status.FAIL, figures, () if ok else tuple(details))


def _of_a_kernel(
    evidence: Evidence, ok: bool, figures: str, details: Iterable[str] = ()
) -> Verdict:
    """A verdict that only a kernel's own results can pass."""
    if ok and evidence.source not in (LIVE, RECORDED):
        return _undecided(f"{figures}, but these are a stand-in's results, not a kernel's")
    return _decided(ok, figures, details)


def _over_cases(
    evidence: Evidence,
    wrong: Callable[[CaseEvidence], int],
    total: Callable[[CaseEvidence], int],
    unit: str,
) -> Verdict:
    """A count that must be zero over all cases. A stale recording leaves a pass undecided."""
    if not evidence.cases:
        return _undecided("no run and no recording to decide from")
    bad = sum(wrong(c) for c in evidence.cases)
    size = sum(total(c) for c in evidence.cases)
    if size == 0:
        return _undecided(f"none of these cases has such elements ({unit})")
    details = [d for c in evidence.cases if wrong(c) for d in (c.details or (c.case.name,))]
    verdict = _of_a_kernel(evidence, bad == 0, f"{bad:,} of {size:,} {unit}", details[:10])
    if verdict.status is Status.PASS and evidence.stale:
        stale = ", ".join(evidence.stale[:5])
        return _undecided(f"{verdict.figures}; {len(evidence.stale)} cases not recorded: {stale}")
    return verdict


def _outputs(c: CaseEvidence) -> int:
    return c.latent.size + c.lse.size


@claim("decode", "bit-exact")
def latent_bits(evidence: Evidence) -> Verdict:
    """Every bit of every latent row is the bit that the reference predicts."""
    elements = sum(c.latent.size for c in evidence.cases)
    unit = f"tiles (16 heads of a row) differ; they hold {elements:,} BF16 elements"
    return _over_cases(evidence, lambda c: c.tiles_differing, lambda c: c.case.tiles, unit)


@claim("lse", "bit-exact")
def lse_bits(evidence: Evidence) -> Verdict:
    """Every bit of every log-sum-exp is the bit that the reference predicts."""
    return _over_cases(
        evidence, lambda c: c.lse_differing, lambda c: c.lse.size, "FP32 elements differ"
    )


@claim("decode", "bounded")
def error_bounds(evidence: Evidence) -> Verdict:
    """The error of every element is at most the bound that is derived for it."""
    worst = max((c.assessment.bounds.worst_share for c in evidence.cases), default=0.0)
    free = sum(c.assessment.bounds.unbounded for c in evidence.cases)
    unit = (
        f"elements outside; the largest error is {worst:.4f} of its bound; "
        f"{free:,} have no finite bound"
    )
    if evidence.cases and free == sum(c.assessment.bounds.elements for c in evidence.cases):
        return _undecided("no element has a finite bound")
    first = [d for c in evidence.cases for d in c.assessment.bounds.first]
    verdict = _over_cases(
        evidence,
        lambda c: c.assessment.bounds.outside,
        lambda c: c.assessment.bounds.elements,
        unit,
    )
    return Verdict(verdict.status, verdict.figures, tuple(first[:10]) or verdict.details)


@claim("decode", "bit-exact")
def all_written(evidence: Evidence) -> Verdict:
    """Every element of the used rows and heads is written."""
    return _over_cases(
        evidence, lambda c: c.unwritten, _outputs, "elements keep the poison in both runs"
    )


@claim("decode", "bit-exact")
def nothing_else_written(evidence: Evidence) -> Verdict:
    """Nothing outside the used rows and heads is written."""
    return _over_cases(evidence, lambda c: c.strayed, _outside, "other elements changed")


def _outside(c: CaseEvidence) -> int:
    """Elements of the buffers that must stay as they are, over all runs of a case."""
    held = sum(part[0].size for part in (c.latent, c.lse)) // c.case.heads
    rows = (c.case.batch + GUARD_ROWS) * c.case.padded - c.case.batch * c.case.heads
    return len(POISONS) * rows * held


@claim("decode", "bit-exact")
def run_to_run(evidence: Evidence) -> Verdict:
    """Two runs over differently poisoned buffers give the same bits."""
    return _over_cases(evidence, lambda c: c.rerun_differing, _outputs, "elements differ")


@claim("decode", "bit-exact")
def empty_rows(evidence: Evidence) -> Verdict:
    """A row without keys, or with masked ids alone, gets latents of +0 and an LSE of -infinity."""

    def wrong(c: CaseEvidence) -> int:
        rows = [r for r in range(c.case.batch) if not _used_keys(c.case, r).size]
        return int(np.sum(c.latent[rows] != 0) + np.sum(c.lse[rows] != NEGATIVE_INFINITY))

    def total(c: CaseEvidence) -> int:
        rows = [r for r in range(c.case.batch) if not _used_keys(c.case, r).size]
        return len(rows) * (c.latent[0].size + c.lse[0].size)

    return _over_cases(evidence, wrong, total, "elements of such rows are otherwise")


@claim("decode", "bit-exact")
def nan_reach(evidence: Evidence) -> Verdict:
    """A NaN in a used key or query gives NaN in exactly the heads that it reaches."""

    def wrong(c: CaseEvidence) -> int:
        reached = _reached_by_nan(c.case)
        latent, lse = np.isnan(values_of(c.latent)), np.isnan(values_of(c.lse))
        return int(np.sum(latent != reached[..., None]) + np.sum(lse != reached))

    return _over_cases(evidence, wrong, _outputs, "elements are wrongly NaN, or wrongly not NaN")


def _used_keys(case: Case, row: int) -> np.ndarray:
    """The ids of a row that count and lie inside the cache."""
    ids = case.rows[row, : case.counts[row]]
    return np.asarray(ids[(ids >= 0) & (ids < len(case.kv))])


def _reached_by_nan(case: Case) -> np.ndarray:
    """`[batch, heads]`: whether a NaN in a used key or the query reaches them.

    A NaN in the query of a row without keys reaches nothing.
    """
    reached = np.zeros((case.batch, case.heads), bool)
    for row in range(case.batch):
        ids = _used_keys(case, row)
        if ids.size:
            query = np.any(case.query[row, : case.heads] & 0x7F == NAN_BYTE, axis=-1)
            reached[row] = query | np.any(case.kv[ids] & 0x7F == NAN_BYTE)
    return reached


# Claims about the contract, decided against the models in which they are false


def _of_the_contract(name: str) -> Claim:
    """A claim that holds if the bits are the contract's and not those of a counterfactual."""
    stage, statement = CONTRACT[name]
    against = tuple(c for c in CATALOGUE if c.claim == name)

    def decide(evidence: Evidence) -> Verdict:
        trials = [evidence.trials[c.name] for c in against if c.name in evidence.trials]
        if len(trials) < len(against):
            return _undecided("no run and no recording to decide from")
        return _decided_by(evidence, trials)

    return Claim(name, statement, stage, "counterfactual", decide, against)


def _decided_by(evidence: Evidence, trials: Sequence[Trial]) -> Verdict:
    figures = "; ".join(map(str, trials))
    instead = [t for t in trials if t.counterfactual_holds and not t.contract_holds]
    if instead:
        details = [f"all {t.tiles:,} tiles are those of {t.name}" for t in instead]
        return _decided(False, figures, details)
    other = [t for t in trials if not t.contract_holds]
    if other:
        return _undecided(
            f"{other[0].tiles - other[0].tiles_of_contract:,} of {other[0].tiles:,} tiles are "
            f"neither the contract's nor all {other[0].name}'s"
        )
    blind = [t.name for t in trials if not t.telling]
    if blind:
        return _undecided(f"no element of these cases rejects {' or '.join(blind)}")
    return _of_a_kernel(evidence, True, figures)


# Checks on a GPU, live or recorded


_BATCH, _CHECKPOINT = 64 * 32 * (LATENT + 1), 5 * 96 * (LATENT + 1)


@dataclass(frozen=True)
class GpuCheck:
    """What a check on a GPU claims, of which stage, and how many outputs it has to compare."""

    stage: str
    statement: str
    compared: int


#: By the name of the check (`gpu_runs.launch_checks`), which is the claim's too.
GPU_CHECKS = MappingProxyType(
    {
        "batch-independence": GpuCheck(
            "schedule",
            "A row that is decoded alone gets the same bits as in a batch of 64 rows.",
            _BATCH,
        ),
        "graph-replay": GpuCheck(
            "launch",
            "A CUDA graph that is replayed 100 times gives the same bits each time.",
            100 * (_BATCH + _CHECKPOINT),
        ),
        "runs-agree": GpuCheck(
            "launch", "100 launches, one right after the other, give the same bits.", 99 * _BATCH
        ),
        "far-rows": GpuCheck(
            "gather", "Cache offsets above 2^31 bytes are addressed correctly.", _CHECKPOINT
        ),
        "dependent-launches": GpuCheck(
            "launch",
            "Under programmatic dependent launch a kernel sees all that the kernel before it "
            "wrote.",
            100 * _CHECKPOINT,
        ),
    }
)


def _checked(name: str) -> Claim:
    """The claim of a check on a GPU."""
    asked = GPU_CHECKS[name]

    def decide(evidence: Evidence) -> Verdict:
        check = evidence.checks.get(name)
        if check is None:
            return _undecided("this check was neither run nor recorded")
        figures = f"{check.differing:,} of {check.elements:,} elements differ"
        if check.same and check.elements < asked.compared:
            return _undecided(f"{figures}; {asked.compared:,} have to be compared")
        return _of_a_kernel(evidence, check.same, figures, [check.first])

    return Claim(name, asked.statement, asked.stage, "bit-exact", decide)


_CLAIMS.extend(map(_checked, GPU_CHECKS))


# Guarded caches, recorded; the recording decides in an audit on a GPU too

UNREAD = "masked-ids-unread"


def _unread() -> Claim:
    """The claim that no masked id is read, with the reads that have to fault."""
    statement = (
        "The kernel never reads memory that a masked id, or an id past the count, points to. No "
        "decode faults where only the cache is mapped, and a read outside it does fault."
    )
    about = "gets as its cache the row that such an id points to, and so reads it"
    reader = Counterfactual("given-row", UNREAD, about, data=tuple(SHAPES))

    def decide(evidence: Evidence) -> Verdict:
        if evidence.guarded is None:
            return _undecided("the recording of guarded caches was not looked at")
        if other := _of_other_code(evidence, evidence.guarded):
            return other
        if old := stale(evidence.guarded):
            return _undecided(f"the recording is not of today's cases: {'; '.join(old[:3])}")
        return _of_guarded(evidence.guarded)

    return Claim(UNREAD, statement, "gather", "fault", decide, (reader,))


def _of_other_code(evidence: Evidence, guarded: GuardedRecording) -> Verdict | None:
    """Undecided unless the machine code that ran is that of today's source."""
    if not evidence.compiled:
        return _undecided("; ".join(evidence.notes) or "nothing was compiled")
    if evidence.compiler != guarded.host.dsl:
        return _undecided(f"compiled by DSL {evidence.compiler} here, by {guarded.host.dsl} there")
    other = [key for key, sha in guarded.machine_code.items() if evidence.compiled.get(key) != sha]
    if other or not guarded.machine_code:
        return _undecided(
            f"{len(other)} of {len(guarded.machine_code)} kernels differ: {other[:3]}"
        )
    return None


def _of_guarded(guarded: GuardedRecording) -> Verdict:
    unmapped = [row for row in guarded.given_rows if not row.mapped]
    runs, ended = guarded.runs, sum(bool(run.error) for run in guarded.runs)
    differing, elements = (
        sum(getattr(r, name) for r in runs) for name in ("differing", "elements")
    )
    figures = (
        f"{ended} of {len(runs)} decodes fault; {differing:,} of {elements:,} elements differ; "
        f"{sum(row.faulted for row in unmapped)} of {len(unmapped)} reads of unmapped rows fault"
    )
    wrong = [f"{r.case}, {r.given}: {r.error or r.first}" for r in runs if not r.same]
    wrong += unpredicted(guarded)
    wrong += [f"row {r.id} was read, and did not fault" for r in unmapped if not r.faulted]
    wrong += [
        f"row {r.id} is mapped: {r.error}" for r in guarded.given_rows if r.mapped and r.error
    ]
    ran = {(run.case, run.given) for run in runs}
    given = {row.id for row in guarded.given_rows}
    lacking = [f"{case}, {how}" for case, how in product(SHAPES, GIVEN) if (case, how) not in ran]
    lacking += [f"row {id_}" for id_ in (0, *OUTSIDE) if id_ not in given]
    if lacking and not wrong:
        return _undecided(f"{figures}; not recorded: {'; '.join(lacking)}")
    return _decided(not wrong, figures, wrong[:10])


# Push mode, recorded; its recordings decide in an audit on a GPU too

NOT_GATHERED = "the push recordings were not looked at"
# How the names of the checks of bits begin. The other checks count words, or compare no step.
_STEPS = ("special", "steps", "graph", "streams", "after")


@claim("push", "bit-exact")
def pushed_steps(evidence: Evidence) -> Verdict:
    """Every bit of every recorded push step is the bit that the simulated step predicts."""
    if evidence.push is None:
        return _undecided(NOT_GATHERED)
    checks = [
        check
        for recording in evidence.push.recordings.values()
        for check in recording.checks
        if check.name.startswith(_STEPS)
    ]
    if not checks:
        return _undecided("no push recording holds steps")
    differing, elements = (sum(getattr(c, n) for c in checks) for n in ("differing", "elements"))
    gpus = " and ".join(str(r.host.gpu_count) for r in evidence.push.recordings.values())
    figures = f"{differing:,} of {elements:,} elements differ; recorded on {gpus} GPUs"
    wrong = [f"{check.name}: {check.first}" for check in checks if not check.same]
    return _decided(not wrong, figures, wrong[:10])


def _pushed_lse() -> Claim:
    """The claim about the base of pushed LSEs, with its counterfactuals."""
    against = tuple(c for c, _ in lse_counterfactuals.COUNTERFACTUALS.values())

    def decide(evidence: Evidence) -> Verdict:
        push = evidence.push
        if push is None or any(c.name not in push.trials for c in against):
            return _undecided(NOT_GATHERED)
        recorded = replace(evidence, source=RECORDED)
        return _decided_by(recorded, [push.trials[c.name] for c in against])

    return Claim(
        lse_counterfactuals.CLAIM,
        lse_counterfactuals.STATEMENT,
        "push",
        "counterfactual",
        decide,
        against,
    )


# The code


@claim("push", "structural")
def same_push_code(evidence: Evidence) -> Verdict:
    """Today's source compiles to the machine code that gave the recorded push steps."""
    if evidence.push is None:
        return _undecided(NOT_GATHERED)
    if not evidence.push.compiled:
        return _undecided("; ".join(evidence.push.notes) or "nothing was compiled")
    recordings = evidence.push.recordings.values()
    for dsl in {r.host.dsl for r in recordings} - {evidence.compiler}:
        return _undecided(f"compiled by DSL {evidence.compiler} here, by {dsl} there")
    ran = [pair for recording in recordings for pair in recording.machine_code.items()]
    other = [key for key, sha in ran if evidence.push.compiled.get(key) != sha]
    figures = f"{len(other)} of {len(ran)} kernels differ"
    return _decided(
        bool(ran) and not other, figures, [f"{k}: other machine code" for k in other[:10]]
    )


@claim("compile", "structural")
def same_code(evidence: Evidence) -> Verdict:
    """Today's source compiles to the machine code that gave these results."""
    if not evidence.machine_code or not evidence.compiled:
        return _undecided("; ".join(evidence.notes) or "nothing was compiled or recorded")
    if evidence.compiler != (recorded := evidence.host.dsl if evidence.host else ""):
        return _undecided(f"compiled by DSL {evidence.compiler} here, by {recorded} there")
    other = [key for key, sha in evidence.machine_code.items() if evidence.compiled.get(key) != sha]
    figures = f"{len(other)} of {len(evidence.machine_code)} kernels differ"
    return _decided(not other, figures, [f"{key}: other machine code" for key in other[:10]])


def _structural(name: str) -> Claim:
    def decide(evidence: Evidence) -> Verdict:
        found = {key: f[name] for key, f in evidence.findings.items() if name in f}
        if not found:
            return _undecided("; ".join(evidence.notes) or "nothing was compiled")
        wrong = [f"{key}: {finding.reason}" for key, finding in found.items() if not finding.ok]
        reason = next(iter(found.values())).reason
        figures = f"{len(found) - len(wrong)} of {len(found)} kernels; the first: {reason}"
        return _decided(not wrong, figures, wrong[:10])

    statement = " ".join((STRUCTURE[name].__doc__ or "").split("\n\n")[0].split())
    return Claim(name, statement, "code", "structural", decide)


def exit_status(verdicts: Iterable[Verdict]) -> int:
    """0 when every claim holds, 1 when one fails, 2 when none fails but one is undecided."""
    statuses = {verdict.status for verdict in verdicts}
    if Status.FAIL in statuses:
        return 1
    return 2 if Status.UNDECIDED in statuses or not statuses else 0
