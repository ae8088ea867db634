"""Recordings of GPU runs: JSON with digests of all results, and an npz with some of their bits.

A recording ties three things together: the inputs (a digest per case), the code (the hash
of the machine code per signature) and the outputs (a digest per row and head tile of the latents;
all of the LSE). A computer without a GPU can then check that today's source compiles to that code
and that the reference gives those bits.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.inputs.cases import (
    HEAD_TILE,
    LATENT,
    Case,
    Signature,
)
from sparse_mla_verify.inputs.schedules import BASE, REFERENCE
from sparse_mla_verify.measure.bits import Comparison
from sparse_mla_verify.measure.poisoned import Output

SCHEMA = 1
PARTS = ("source", "host", "arrays_sha256", "machine_code", "checks", "cases")  # of every recording
KERNEL, SYNTHETIC = "kernel", "synthetic"  # where the bits came from
ARCHITECTURES = "sm_90", "sm_100", "sm_103", "sm_120"  # that the reference models
FOLDER = Path(__file__).parents[1] / "data"
WHOLE_TILES = 4  # cases of at most this many tiles are kept whole, latent bits and all


@dataclass(frozen=True)
class Host:
    """The GPU, the driver and the versions of a run."""

    date: str
    gpu: str
    gpu_count: int
    arch: str
    driver: str
    python: str
    torch: str
    cuda: str
    dsl: str
    tvm_ffi: str
    numpy: str


@dataclass(frozen=True)
class Check:
    """A check that is no comparison with the reference of one case: its name, size and result.

    `expected` is a digest of what it was compared with, where that can be told from today's
    sources.
    """

    name: str
    about: str
    elements: int
    differing: int
    first: str = ""
    expected: str = ""

    @property
    def same(self) -> bool:
        """Whether something was compared and no bit differs."""
        return self.elements > 0 and self.differing == 0

    @classmethod
    def of(cls, name: str, about: str, comparisons: list[Comparison]) -> "Check":
        """The sum of several comparisons."""
        elements = sum(c.elements for c in comparisons)
        differing = sum(c.differing for c in comparisons)
        return cls(
            name, about, elements, differing, next((str(c) for c in comparisons if c.first), "")
        )


@dataclass(frozen=True)
class Outcome:
    """How a claim came out where the recording was made."""

    name: str
    statement: str
    kind: str
    status: str
    figures: str


@dataclass(frozen=True)
class RecordedCase:
    """What a kernel gave for a case: a digest `[row][tile]` of its latents, and the counts."""

    name: str
    signature: str
    inputs: str
    elements: int
    unwritten: int
    strayed: int
    rerun_differing: int
    digests: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """One run over all case families."""

    source: str
    host: Host
    machine_code: Mapping[str, str]  # signature -> SHA-256
    cases: tuple[RecordedCase, ...]
    checks: tuple[Check, ...]
    outcomes: tuple[Outcome, ...] = ()
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    schema: int = SCHEMA

    def signatures(self) -> tuple[Signature, ...]:
        """The signatures that were compiled."""
        return tuple(signature_of(key) for key in self.machine_code)

    def save(self, path: Path) -> None:
        """Write `path` (JSON) and, beside it, the arrays (npz of the same stem)."""
        arrays = path.with_suffix(".npz")
        np.savez_compressed(arrays, **dict(self.arrays))  # type: ignore[arg-type]
        plain = {
            "schema": self.schema,
            "source": self.source,
            "host": asdict(self.host),
            "arrays_sha256": hashlib.sha256(arrays.read_bytes()).hexdigest(),
            "machine_code": dict(self.machine_code),
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "checks": [asdict(check) for check in self.checks],
            "cases": [asdict(case) for case in self.cases],
        }
        json_files.write(path, plain)


def load(path: Path) -> Recording:
    """Read a recording.

    Raises ValueError for another schema, a file that is none or lacks a part, or arrays of another
    recording.
    """
    return json_files.read(path, "a recording", partial(_from_plain, path=path), SCHEMA)


def _from_plain(plain: Mapping[str, Any], path: Path) -> Recording:
    if absent := [part for part in PARTS if part not in plain]:
        raise ValueError(
            f"the file must have {', '.join(PARTS)}, got a file of another kind, "
            f"without {', '.join(absent)}"
        )
    beside = path.with_suffix(".npz")
    if hashlib.sha256(beside.read_bytes()).hexdigest() != plain["arrays_sha256"]:
        raise ValueError(
            f"the arrays must be those that {path} was written with, got others in {beside}"
        )
    with np.load(beside) as stored:
        arrays = {name: stored[name] for name in stored.files}
    cases = tuple(
        RecordedCase(**{**c, "digests": tuple(map(tuple, c["digests"]))}) for c in plain["cases"]
    )
    checks = tuple(Check(**c) for c in plain["checks"])
    outcomes = tuple(Outcome(**o) for o in plain.get("outcomes", ()))
    host = Host(**plain["host"])
    code = plain["machine_code"]
    recording = Recording(plain["source"], host, code, cases, checks, outcomes, arrays)
    if lacking := _lacking(recording):
        raise ValueError(f"the recording must be whole, got one in which {lacking}")
    return recording


def _lacking(recording: Recording) -> str:
    """What of a recording isn't as its signatures say; "" for nothing."""
    if recording.host.arch not in ARCHITECTURES:
        return f"arch is {recording.host.arch}, not one of {', '.join(ARCHITECTURES)}"
    for key in recording.machine_code:
        signature_of(key)
    for record in recording.cases:
        signature = signature_of(record.signature)
        shape = signature.batch, signature.heads
        tiles = {len(row) for row in record.digests}
        if len(record.digests) != shape[0] or tiles != {shape[1] // HEAD_TILE}:
            return f"{record.name} has not a digest of each of {shape[0]} rows and its tiles"
        wanted = {"lse": shape, "latent": (*shape, LATENT)}
        for what, size in wanted.items():
            array = recording.arrays.get(f"{record.name}/{what}")
            if (array is None and what == "lse") or (array is not None and array.shape != size):
                found = "none" if array is None else list(array.shape)
                return f"{record.name}/{what} is {found}, not {list(size)}"
    return ""


def shipped(schedule: str = BASE) -> Path | None:
    """The recording of a schedule's kernel that comes with the package, if there is one."""
    path = FOLDER / ("h200.json" if schedule == BASE else f"h200-{schedule}.json")
    return path if path.exists() else None


def signature_of(key: str) -> Signature:
    """The signature that `Signature.key` names. Raises ValueError for another word."""
    match = re.fullmatch(r"b(\d+)-h(\d+)-p(\d+)-w(\d+)-c(\d+)(?:-([a-z][a-z0-9-]*))?", key)
    if match is None or (match[6] or BASE) not in REFERENCE:
        raise ValueError(f"key must be a signature such as b5-h96-p96-w256-c5, got {key!r}")
    batch, heads, padded, width, cap = map(int, match.groups()[:5])
    return Signature(batch, heads, padded, width, cap, match[6] or BASE)


def tile_digest(latent: NDArray[np.uint16]) -> str:
    """The first 128 bits of SHA-256 over a tile's encodings, `[16, 512]`, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(latent, "<u2").tobytes()).hexdigest()[:32]


def digests_of(latent: NDArray[np.uint16]) -> tuple[tuple[str, ...], ...]:
    """The digest of every (row, head tile) of `[batch, heads, 512]`."""
    starts = range(0, latent.shape[1], HEAD_TILE)
    return tuple(tuple(tile_digest(row[s : s + HEAD_TILE]) for s in starts) for row in latent)


def recorded(case: Case, output: Output) -> RecordedCase:
    """A case's results as a recording keeps them."""
    return RecordedCase(
        name=case.name,
        signature=case.signature.key,
        inputs=case.digest(),
        elements=output.elements,
        unwritten=output.unwritten,
        strayed=output.strayed,
        rerun_differing=output.rerun.differing,
        digests=digests_of(output.latent),
    )


def arrays_of(case: Case, output: Output) -> dict[str, NDArray[Any]]:
    """The bits that a recording keeps of a case: all of the LSE, the latents of small cases."""
    kept: dict[str, NDArray[Any]] = {f"{case.name}/lse": output.lse}
    if case.tiles <= WHOLE_TILES:
        kept[f"{case.name}/latent"] = output.latent
    return kept


def differing_tiles(record: RecordedCase, latent: NDArray[np.uint16]) -> list[tuple[int, int]]:
    """The (row, tile) of `[batch, heads, 512]` whose digests differ from the recorded ones.

    Raises ValueError when the recording has other rows or tiles than the array.
    """
    found = digests_of(latent)
    shape, wanted = ([len(row) for row in rows] for rows in (found, record.digests))
    if shape != wanted:
        raise ValueError(
            f"latent must have the tiles of {record.name}, {wanted} in its rows, got {shape}"
        )
    return [
        (r, t)
        for r, (ours, theirs) in enumerate(zip(found, record.digests, strict=True))
        for t, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b
    ]
