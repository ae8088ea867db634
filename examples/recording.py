"""What an example keeps of a GPU run: a digest of every output row, some heads of it, the host.

A digest covers all the bits of a row, so a model that reproduces it has predicted them all; the
heads that are kept show where one that doesn't goes wrong.
"""

import hashlib
import json
import platform
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_HEADS = 4


@dataclass(frozen=True)
class Rows:
    """Output rows of a case.

    Attributes:
        latent: [R, H, D] BF16 encodings, uint16.
        lse: [R, H] float32 encodings, uint32.
    """

    latent: NDArray[np.uint16]
    lse: NDArray[np.uint32]

    @classmethod
    def of(cls, latent: NDArray[Any], lse: NDArray[Any]) -> "Rows":
        """From a model's bfloat16 and float32 arrays."""
        return cls(latent.view(np.uint16), lse.view(np.uint32))

    def digests(self) -> list[str]:
        """SHA-256 of each row: its latent, then its LSEs, little endian."""
        return [
            hashlib.sha256(row.astype("<u2").tobytes() + lse.astype("<u4").tobytes()).hexdigest()
            for row, lse in zip(self.latent, self.lse, strict=True)
        ]

    def kept(self) -> NDArray[np.uint16]:
        """[R, KEPT_HEADS, D] the heads that a recording holds."""
        return self.latent[:, kept_heads(self.latent.shape[1])]

    def differing(self, other: "Rows") -> tuple[int, int]:
        """How many latent elements and how many LSEs differ from another's."""
        return (
            int(np.count_nonzero(self.latent != other.latent)),
            int(np.count_nonzero(self.lse != other.lse)),
        )


def kept_heads(heads: int) -> NDArray[np.intp]:
    """The first, the last and two between."""
    return np.linspace(0, heads - 1, KEPT_HEADS).astype(np.intp)


def input_digest(*arrays: NDArray[Any]) -> str:
    """SHA-256 of a case's inputs, to notice a random generator that changed."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclass
class Recording:
    """A run's cases by name, and facts about the run.

    Attributes:
        facts: JSON values; ``facts["cases"][name]`` has each case's digests.
        arrays: per case, ``name/latent`` (kept heads), ``name/lse``, and what else it needs.
    """

    facts: dict[str, Any] = field(default_factory=lambda: {"cases": {}})
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def add(self, name: str, rows: Rows, inputs: str, **facts: Any) -> None:
        """Add a case."""
        self.facts["cases"][name] = {"inputs": inputs, "digests": rows.digests(), **facts}
        self.arrays[f"{name}/latent"] = rows.kept()
        self.arrays[f"{name}/lse"] = rows.lse

    def save(self, folder: Path) -> None:
        """Write ``recording.json`` and ``recording.npz``."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.facts, indent=1, sort_keys=True) + "\n"
        (folder / "recording.json").write_text(text)
        np.savez_compressed(folder / "recording.npz", **self.arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, folder: Path) -> "Recording":
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: there is no recording.
        """
        facts = json.loads((folder / "recording.json").read_text())
        with np.load(folder / "recording.npz") as file:
            return cls(facts, dict(file))


def host_facts() -> dict[str, Any]:
    """The GPU, the driver, and the versions that decide which code runs."""
    import torch

    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "driver": _driver(),
    }
    for package in ("numpy", "torch", "triton"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n", 1)[0].strip()
