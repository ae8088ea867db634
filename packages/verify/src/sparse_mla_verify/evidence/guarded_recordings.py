"""Recordings of runs on a guarded cache: what faulted, and which bits came out."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.evidence.recordings import FOLDER, Host
from sparse_mla_verify.inputs.cases import COLUMNS, LATENT, Case
from sparse_mla_verify.inputs.guarded_cases import MAPPED, ROWS, SHAPES, as_given
from sparse_mla_verify.measure.predict import Bits, predict

SCHEMA = 1
FILE = "guarded_h200.json"

#: Reserved on either side: all that an int32 can name, else what the nearest ids do.
EVERY_ID, NEAREST = 2**31 * COLUMNS, 64 * 2**20

# What a read of unmapped memory is: errors of CUDA's driver.
FAULTS = ("CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED")


@dataclass(frozen=True)
class Layout:
    """Bytes of the cache, and of the unmapped reservation before and after it, at the least."""

    rows: int
    mapped: int
    before: int
    after: int


@dataclass(frozen=True)
class GuardedRun:
    """A case on a schedule: how its bits compare with the reference's.

    `digests` are of each row's latents and LSEs, as the kernel gave them. `error` is what ended the
    run: "" for nothing. Then there are no bits.
    """

    schedule: str
    case: str
    given: str
    signature: str
    inputs: str
    elements: int = 0
    differing: int = 0
    digests: tuple[str, ...] = ()
    first: str = ""
    error: str = ""

    @property
    def same(self) -> bool:
        """Whether it ran to its end and no bit differs."""
        return not self.error and self.elements > 0 and self.differing == 0


@dataclass(frozen=True)
class GivenRow:
    """What happened to a kernel whose whole cache was the one row that an id points to.

    `mapped` is whether there is memory, `access` what the driver says of it; `error` is CUDA's when
    all work was to be finished, "" for none.
    """

    schedule: str
    id: int
    mapped: bool
    access: str
    error: str

    @property
    def faulted(self) -> bool:
        """Whether the read faulted."""
        return self.error in FAULTS


@dataclass(frozen=True)
class GuardedRecording:
    """All of a run; `machine_code` by signature."""

    host: Host
    layout: Layout
    machine_code: Mapping[str, str]
    runs: tuple[GuardedRun, ...]
    given_rows: tuple[GivenRow, ...]
    schema: int = SCHEMA

    def of(self, schedule: str) -> "GuardedRecording":
        """What is of one schedule."""
        runs = tuple(run for run in self.runs if run.schedule == schedule)
        keys = {run.signature for run in runs}
        return replace(
            self,
            machine_code={key: sha for key, sha in self.machine_code.items() if key in keys},
            runs=runs,
            given_rows=tuple(row for row in self.given_rows if row.schedule == schedule),
        )

    def save(self, path: Path) -> None:
        """Write JSON."""
        json_files.write(path, asdict(self))


def load(path: Path) -> GuardedRecording:
    """Read a recording. Raises ValueError if the file is none, or of another schema."""
    return json_files.read(path, "a recording of guarded caches", _from_plain, SCHEMA)


def _from_plain(plain: dict[str, Any]) -> GuardedRecording:
    return GuardedRecording(
        Host(**plain["host"]),
        Layout(**plain["layout"]),
        plain["machine_code"],
        tuple(GuardedRun(**{**r, "digests": tuple(r["digests"])}) for r in plain["runs"]),
        tuple(GivenRow(**r) for r in plain["given_rows"]),
    )


def shipped() -> Path:
    """The recording that comes with the package."""
    return FOLDER / FILE


def row_digests(bits: Bits) -> tuple[str, ...]:
    """Of each row of latent `[batch, heads, 512]` and lse `[batch, heads]`: 128 bits of SHA-256."""
    found = []
    for latent, lse in zip(*bits, strict=True):
        parts = np.ascontiguousarray(latent, "<u2"), np.ascontiguousarray(lse, "<u4")
        found.append(hashlib.sha256(b"".join(p.tobytes() for p in parts)).hexdigest()[:32])
    return tuple(found)


def holds(recording: GuardedRecording) -> bool:
    """Whether all ran without an error, no bit differs, and exactly the unmapped rows faulted."""
    rows = recording.given_rows
    as_mapped = all(not row.error if row.mapped else row.faulted for row in rows)
    return bool(recording.runs) and all(run.same for run in recording.runs) and as_mapped


def stale(recording: GuardedRecording) -> list[str]:
    """What differs from today's cases: the mapped range, inputs, sizes, machine code."""
    layout, found = recording.layout, []
    if (layout.rows, layout.mapped) != (ROWS, MAPPED):
        found.append(f"a cache of {layout.rows} rows, {layout.mapped} bytes mapped")
    if min(layout.before, layout.after) < NEAREST:
        found.append(f"{layout.before} and {layout.after} bytes unmapped, not {NEAREST} or more")
    for run in recording.runs:
        if run.case not in SHAPES:
            found.append(f"{run.case}: no case of today's")
            continue
        case = _case_of(run)
        size = case.batch * case.heads * (LATENT + 1)
        of_today = run.signature, run.inputs
        if (
            of_today != (case.signature.key, case.digest())
            or run.signature not in recording.machine_code
        ):
            found.append(f"{run.case}, {run.given}: other inputs, or other machine code")
        elif not run.error and (run.elements, len(run.digests)) != (size, case.batch):
            found.append(f"{run.case}, {run.given}: {run.elements} elements, not {size}")
    return found


def unpredicted(recording: GuardedRecording) -> list[str]:
    """The runs whose recorded bits of the row with the fewest keys are not the reference's."""
    found = []
    for run in recording.runs:
        case = _case_of(run)
        least = int(np.argmin(case.counts))
        expected = row_digests(predict(case.row(least)))[0]
        if not run.error and run.digests[least] != expected:
            found.append(f"{run.case}, {run.given}, row {least}: other bits than the reference's")
    return found


def _case_of(run: GuardedRun) -> Case:
    return as_given(run.case, run.schedule, run.given)


def said(recording: GuardedRecording) -> list[str]:
    """A recording in lines."""
    layout = recording.layout
    sides = f"{layout.before:,} before and {layout.after:,} after"
    lines = [f"{layout.mapped:,} bytes mapped, reserved and unmapped: {sides}"]
    for run in recording.runs:
        found = run.error or f"{run.differing:,} of {run.elements:,} elements differ {run.first}"
        lines.append(f"{run.schedule}, {run.case}, {run.given}: {found}")
    for row in recording.given_rows:
        kind = "mapped" if row.mapped else "unmapped"
        found = row.error or "no error"
        lines.append(f"{row.schedule}, given row {row.id} ({kind}, {row.access}): {found}")
    return lines
