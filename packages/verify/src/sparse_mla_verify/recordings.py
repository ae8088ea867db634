"""Recordings of GPU runs: JSON with a digest of every result, and an npz with some of the bits.

A recording ties three things together: the inputs (a digest per case), the code (the SHA-256 of
the cubin per signature) and the outputs (a digest per row and head tile). A machine with no GPU
can then check that today's source compiles to that cubin and that the reference gives those bits.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cases import HEAD_TILE, Case, Signature
from .compare import Comparison
from .runs import Output

SCHEMA = 1
KERNEL, SYNTHETIC = "kernel", "synthetic"  # where the bits came from
FOLDER = Path(__file__).parent / "data"
WHOLE_TILES = 4  # cases of at most this many tiles are kept whole, latent bits and all


@dataclass(frozen=True)
class Host:
    """The machine and the versions of a run."""

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
    """A check that is no comparison with the reference of one case: its name, size and result."""

    name: str
    about: str
    elements: int
    differing: int
    first: str = ""

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
class RecordedCase:
    """What a kernel gave for a case: a digest `[row][tile]` of its bits, and the counts."""

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
    cubins: Mapping[str, str]  # signature -> SHA-256
    cases: tuple[RecordedCase, ...]
    checks: tuple[Check, ...]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    schema: int = SCHEMA

    def signatures(self) -> tuple[Signature, ...]:
        """The signatures that were compiled."""
        return tuple(signature_of(key) for key in self.cubins)

    def save(self, path: Path) -> None:
        """Write `path` (JSON) and, beside it, the arrays (npz of the same stem)."""
        plain = {f: getattr(self, f) for f in ("schema", "source")}
        plain |= {"host": asdict(self.host), "cubins": dict(self.cubins)}
        plain |= {"checks": [asdict(c) for c in self.checks]}
        plain |= {"cases": [asdict(c) for c in self.cases]}
        path.write_text(json.dumps(plain, indent=1) + "\n")
        np.savez_compressed(path.with_suffix(".npz"), **dict(self.arrays))  # type: ignore[arg-type]


def load(path: Path) -> Recording:
    """Read a recording. Raises ValueError for another schema or a file that isn't one."""
    plain = json.loads(path.read_text())
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise ValueError(f"path: {path} is no recording of schema {SCHEMA}")
    cases = tuple(
        RecordedCase(**{**c, "digests": tuple(map(tuple, c["digests"]))}) for c in plain["cases"]
    )
    with np.load(path.with_suffix(".npz")) as stored:
        arrays = {name: stored[name] for name in stored.files}
    checks = tuple(Check(**c) for c in plain["checks"])
    host = Host(**plain["host"])
    return Recording(plain["source"], host, plain["cubins"], cases, checks, arrays)


def shipped() -> Path | None:
    """The recording that comes with the package, if there is one."""
    return next(iter(sorted(FOLDER.glob("*.json"))), None)


def signature_of(key: str) -> Signature:
    """The signature that `Signature.key` names. Raises ValueError for another word."""
    parts = key.split("-")
    if [p[:1] for p in parts] != list("bhpwc"):
        raise ValueError(f"key: {key!r} is no signature such as b5-h96-p96-w256-c5")
    return Signature(*(int(p[1:]) for p in parts))


def tile_digest(latent: NDArray[np.uint16], lse: NDArray[np.uint32]) -> str:
    """The first 128 bits of SHA-256 over a tile's encodings, `[16, 512]` and `[16]`."""
    state = hashlib.sha256(np.ascontiguousarray(latent, "<u2").tobytes())
    state.update(np.ascontiguousarray(lse, "<u4").tobytes())
    return state.hexdigest()[:32]


def digests_of(latent: NDArray[np.uint16], lse: NDArray[np.uint32]) -> tuple[tuple[str, ...], ...]:
    """The digest of every (row, head tile) of `[batch, heads, 512]` and `[batch, heads]`."""
    tiles = range(0, latent.shape[1], HEAD_TILE)
    return tuple(
        tuple(tile_digest(a[t : t + HEAD_TILE], b[t : t + HEAD_TILE]) for t in tiles)
        for a, b in zip(latent, lse, strict=True)
    )


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
        digests=digests_of(output.latent, output.lse),
    )


def arrays_of(case: Case, output: Output) -> dict[str, NDArray[Any]]:
    """The bits that a recording keeps of a case: all of the LSE, the latents of small cases."""
    kept: dict[str, NDArray[Any]] = {f"{case.name}/lse": output.lse}
    if case.tiles <= WHOLE_TILES:
        kept[f"{case.name}/latent"] = output.latent
    return kept


def differing_tiles(
    record: RecordedCase, latent: NDArray[np.uint16], lse: NDArray[np.uint32]
) -> list[tuple[int, int]]:
    """The (row, tile) whose digests differ from the recorded ones.

    Raises ValueError when the recording has other rows or tiles than the arrays.
    """
    found = digests_of(latent, lse)
    shape, wanted = ([len(r) for r in rows] for rows in (found, record.digests))
    if shape != wanted:
        raise ValueError(f"record: {record.name} has tiles {wanted} a row, the arrays {shape}")
    pairs = zip(found, record.digests, strict=True)
    return [
        (r, t)
        for r, (ours, theirs) in enumerate(pairs)
        for t, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b
    ]
