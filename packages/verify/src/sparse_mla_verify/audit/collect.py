"""Gathering evidence: from the GPU that is there, or from a recording of one."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Protocol

import numpy as np

from sparse_mla_verify.evidence import guarded_recordings, push_recordings
from sparse_mla_verify.evidence.evidence import (
    COMPILED,
    LIVE,
    RECORDED,
    CaseEvidence,
    Evidence,
    Pushed,
    Trial,
    live_case,
    recorded_case,
    run_cases,
    split_stale,
)
from sparse_mla_verify.evidence.guarded_recordings import GuardedRecording
from sparse_mla_verify.evidence.instruction_checks import (
    CODE_CHECKS,
    Artifact,
    Code,
    CodeFinding,
)
from sparse_mla_verify.evidence.recordings import (
    FOLDER,
    KERNEL,
    Recording,
    arrays_of,
    recorded,
    signature_of,
)
from sparse_mla_verify.inputs.cases import Case, Signature
from sparse_mla_verify.inputs.schedules import kernel_schedule
from sparse_mla_verify.measure.predict import assess_all
from sparse_mla_verify.models import counterfactuals
from sparse_mla_verify.processes.workers import spread
from sparse_mla_verify.push import lse_counterfactuals
from sparse_mla_verify.terminal.progress import Progress


class Hashed(Artifact, Protocol):
    """An artifact that knows the hash of its machine code."""

    @property
    def code_sha256(self) -> str:
        """In hex."""


def from_gpu(
    cases: Sequence[Case], progress: Progress, *, workers: int | None = None
) -> tuple[Evidence, Recording]:
    """Run all cases, of one schedule, and checks on the GPU, then predict them; also recorded.

    The kernel runs before the reference does, lest recycled memory hold the answer.
    """
    from sparse_mla_verify.gpu_runs import gpu, launch_checks

    runner = gpu.GpuRunner()
    progress.start("kernel", len(cases))
    outputs = run_cases(runner, cases, lambda name: progress.advance("kernel"))
    progress.start("live checks", len(launch_checks.LAUNCH_CHECKS))
    checks = {}
    for name, check in launch_checks.LAUNCH_CHECKS.items():
        checks[name] = check(schedule=cases[0].schedule)
        progress.advance("live checks")
    host = gpu.host()
    found = {name: (o.latent, o.lse) for name, o in outputs.items()}
    progress.start("reference", sum(case.tiles for case in cases))
    assessed = assess_all(
        cases,
        found,
        machine=machine_of(host.arch),
        workers=workers,
        advance=lambda case, tiles: progress.advance("reference", tiles),
    )
    compared = tuple(live_case(c, outputs[c.name], assessed[c.name]) for c in cases)
    trials = _try_all(compared, host.arch, progress, workers)
    ran = {key: inspect(artifact) for key, artifact in runner.artifacts.items()}
    source, notes = _inspect_source(map(signature_of, ran), host.arch, progress, workers)
    machine_code = {key: inspected.code_sha256 for key, inspected in ran.items()}
    evidence = Evidence(
        source=LIVE,
        host=host,
        cases=compared,
        checks=checks,
        machine_code=machine_code,
        compiled={key: inspected.code_sha256 for key, inspected in source.items()},
        compiler=dsl_version(),
        findings={key: inspected.findings for key, inspected in ran.items()},
        trials=trials,
        notes=notes,
    )
    recording = Recording(
        source=KERNEL,
        host=host,
        machine_code=machine_code,
        cases=tuple(recorded(case, outputs[case.name]) for case in cases),
        checks=tuple(checks.values()),
        arrays={k: v for case in cases for k, v in arrays_of(case, outputs[case.name]).items()},
    )
    return evidence, recording


def from_recording(
    recording: Recording,
    cases: Sequence[Case],
    progress: Progress,
    *,
    workers: int | None = None,
) -> Evidence:
    """Hold a recording against the reference, and today's source against its machine_code."""
    paired, stale = split_stale(cases, recording)
    progress.start("reference", sum(case.tiles for case, _ in paired))
    assessed = assess_all(
        [case for case, _ in paired],
        _kept(recording, [case for case, _ in paired]),
        machine=machine_of(recording.host.arch),
        workers=workers,
        advance=lambda case, tiles: progress.advance("reference", tiles),
    )
    compared = tuple(
        recorded_case(case, record, recording.arrays, assessed[case.name])
        for case, record in paired
    )
    trials = _try_all(compared, recording.host.arch, progress, workers)
    needed = sorted({case.signature.key for case in cases} & set(recording.machine_code))
    source, notes = _inspect_source(
        map(signature_of, needed), recording.host.arch, progress, workers
    )
    return Evidence(
        source=RECORDED if recording.source == KERNEL else recording.source,
        host=recording.host,
        cases=compared,
        checks={check.name: check for check in recording.checks},
        machine_code={key: recording.machine_code[key] for key in needed},
        compiled={key: inspected.code_sha256 for key, inspected in source.items()},
        compiler=dsl_version(),
        findings={key: inspected.findings for key, inspected in source.items()},
        trials=trials,
        stale=stale,
        notes=notes,
    )


def from_nothing(
    cases: Sequence[Case], progress: Progress, *, workers: int | None = None
) -> Evidence:
    """Neither a GPU nor a recording: what the compiled code alone can say."""
    source, notes = _inspect_source({c.signature for c in cases}, "sm_90", progress, workers)
    return Evidence(
        source=COMPILED,
        host=None,
        cases=(),
        checks={},
        machine_code={},
        compiled={key: inspected.code_sha256 for key, inspected in source.items()},
        compiler=dsl_version(),
        findings={key: inspected.findings for key, inspected in source.items()},
        notes=notes,
    )


def pushed(progress: Progress, *, workers: int | None = None) -> Pushed:
    """Push mode, from the recordings of it that come with the package, and today's machine_code."""
    progress.start("push", lse_counterfactuals.jobs())
    push = recorded_push(workers=workers, advance=lambda: progress.advance("push"))
    arch = next(iter(push.recordings.values())).host.arch
    wanted = sorted(
        {push_recordings.sizes_of(key) for r in push.recordings.values() for key in r.machine_code}
    )
    progress.start("compile push", len(wanted))
    compiled: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    try:
        for _, found in spread(compile_step, [(*sizes, f"{arch}a") for sizes in wanted], workers):
            compiled |= found
            progress.advance("compile push")
    except ImportError as missing:
        compiled, notes = {}, (f"the kernel package can't be imported: {missing}",)
    return replace(push, compiled=compiled, notes=notes)


def recorded_push(
    *, workers: int | None = None, advance: Callable[[], None] = lambda: None
) -> Pushed:
    """Push mode's recordings and its counterfactuals against them; nothing is compiled."""
    recordings = {
        name: push_recordings.load(FOLDER / name) for name in lse_counterfactuals.RECORDINGS
    }
    trials = lse_counterfactuals.try_all(recordings, workers=workers, advance=advance)
    return Pushed(recordings, {}, trials)


def guarded_caches(schedule: str) -> GuardedRecording:
    """A schedule's runs on guarded caches, from the recording that comes with the package."""
    return guarded_recordings.load(guarded_recordings.shipped()).of(schedule)


def compile_step(batch: int, owner_heads: int, ranks: int, width: int, arch: str) -> dict[str, str]:
    """The SHA-256 of a step's machine_code, by kernel and sizes."""
    from sparse_mla_kernel import MailboxLayout, cross_compile_step

    box = MailboxLayout(owner_heads * ranks, owner_heads, ranks, batch)
    step = cross_compile_step(batch, width, box, arch)
    return {
        push_recordings.key_of(n, batch, owner_heads, ranks, width): a.code_sha256
        for n, a in step.items()
    }


def _try_all(
    compared: Sequence[CaseEvidence], arch: str, progress: Progress, workers: int | None
) -> dict[str, Trial]:
    """The counterfactuals against the results of all cases."""
    progress.start("falsify", counterfactuals.jobs(compared))
    return counterfactuals.try_all(
        compared,
        machine_of(arch),
        workers=workers,
        advance=lambda: progress.advance("falsify"),
    )


def machine_of(arch: str) -> str:
    """The reference's machine for an architecture, by name: `sm_90` is `SM90`."""
    return arch.upper().replace("_", "")


def dsl_version() -> str:
    """The DSL's version, or "" where it isn't installed."""
    try:
        return metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        return ""


def _kept(recording: Recording, cases: Sequence[Case]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The cases whose bits the recording holds whole."""
    arrays = recording.arrays
    names = [case.name for case in cases if f"{case.name}/latent" in arrays]
    return {name: (arrays[f"{name}/latent"], arrays[f"{name}/lse"]) for name in names}


@functools.cache
def cross_compiled(signature: Signature, arch: str) -> Hashed:
    """Today's source compiled for a signature; once a process."""
    from sparse_mla_kernel import cross_compile

    artifact: Hashed = cross_compile(
        signature.batch,
        signature.heads,
        signature.padded,
        signature.width,
        signature.cap,
        arch,
        schedule=kernel_schedule(signature.schedule),
    )
    return artifact


@dataclass(frozen=True)
class Inspected:
    """A kernel's hash of its machine code, what the structural checks found, and notes.

    A note says what kept a check from being made.
    """

    code_sha256: str
    findings: Mapping[str, CodeFinding]
    notes: tuple[str, ...] = ()


def inspect(artifact: Hashed) -> Inspected:
    """Every structural check on an artifact; those that need a missing tool are left out."""
    code, findings, notes = Code(artifact), {}, set()
    for name, check in CODE_CHECKS.items():
        try:
            findings[name] = check(code)
        except (FileNotFoundError, RuntimeError) as missing:  # no disassembler, or an old one
            notes.add(str(missing))
    return Inspected(artifact.code_sha256, findings, tuple(sorted(notes)))


def _compile_and_inspect(signature: Signature, arch: str) -> Inspected:
    return inspect(cross_compiled(signature, arch))


def _inspect_source(
    signatures: Iterable[Signature], arch: str, progress: Progress, workers: int | None
) -> tuple[dict[str, Inspected], tuple[str, ...]]:
    """Today's source, compiled for every signature and inspected, by signature; and notes."""
    wanted = sorted(signatures)
    progress.start("compile", len(wanted))
    found: dict[str, Inspected] = {}
    try:
        tasks = [(signature, f"{arch}a") for signature in wanted]
        for k, inspected in spread(_compile_and_inspect, tasks, workers):
            found[wanted[k].key] = inspected
            progress.advance("compile")
    except ImportError as missing:
        return {}, (f"the kernel package can't be imported: {missing}",)
    return found, tuple(sorted({note for each in found.values() for note in each.notes}))
