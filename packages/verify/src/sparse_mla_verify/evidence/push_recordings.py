"""Recordings of push mode: what ran on how many GPUs, with which code, how fast."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sparse_mla_verify.evidence import json_files
from sparse_mla_verify.evidence.recordings import Check, Host

SCHEMA = 1


@dataclass(frozen=True)
class Timing:
    """Microseconds of one step, the slowest rank's, median of repeated runs.

    `mode` is `graph` or `eager`; `runs_us` are the single runs, one a repetition.
    """

    name: str
    about: str
    mode: str
    us: float
    runs_us: tuple[float, ...]


@dataclass(frozen=True)
class PushRecording:
    """One run: the machine, the hash of each kernel's machine code, the checks and the timings.

    `host.gpu_count` is how many GPUs took part. A name in `machine_code` is the kernel's, then
    the sizes that it was compiled for.
    """

    host: Host
    machine_code: Mapping[str, str]
    checks: tuple[Check, ...]
    timings: tuple[Timing, ...]
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Write JSON."""
        json_files.write(path, asdict(self))


def load(path: Path) -> PushRecording:
    """Read a recording. Raises ValueError if the file is none, or of another schema."""
    return json_files.read(path, "a recording of push mode", _from_plain, SCHEMA)


def _from_plain(plain: dict[str, Any]) -> PushRecording:
    return PushRecording(
        Host(**plain["host"]),
        plain["machine_code"],
        tuple(Check(**c) for c in plain["checks"]),
        tuple(Timing(**{**t, "runs_us": tuple(t["runs_us"])}) for t in plain["timings"]),
    )


class _Artifact(Protocol):
    @property
    def code_sha256(self) -> str: ...


class _Kernels(Protocol):
    @property
    def artifacts(self) -> Mapping[str, _Artifact]: ...


def artifacts_of(
    kernels: _Kernels, batch: int, owner_heads: int, ranks: int, width: int
) -> dict[str, str]:
    """The machine-code hashes of a compiled step, by kernel name and sizes."""
    sizes = (batch, owner_heads, ranks, width)
    return {key_of(name, *sizes): a.code_sha256 for name, a in kernels.artifacts.items()}


def key_of(kernel: str, batch: int, owner_heads: int, ranks: int, width: int) -> str:
    """The name of a kernel in a recording."""
    return f"{kernel}-b{batch}-o{owner_heads}-d{ranks}-w{width}"


def sizes_of(key: str) -> tuple[int, int, int, int]:
    """Batch, owner heads, ranks and width of a kernel's name.

    Raises ValueError for another word.
    """
    match = re.fullmatch(r"\w+-b(\d+)-o(\d+)-d(\d+)-w(\d+)", key)
    if match is None:
        raise ValueError(
            f"key must be a kernel's name such as push_decode-b5-o48-d2-w16, got {key!r}"
        )
    batch, owner_heads, ranks, width = map(int, match.groups())
    return batch, owner_heads, ranks, width
