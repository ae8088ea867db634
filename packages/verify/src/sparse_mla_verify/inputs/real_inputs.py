"""Inputs from a real model's activations, as stored in `data/real_activations.npz`.

`packages/verify/tools/make_real_inputs.py` made the file, and docs/real-inputs.md says how. It is
read when its cases are made, not when a module is imported.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).parents[1] / "data" / "real_activations.npz"
FIGURES = ("max / RMS", "kurtosis", "column max / median", "column RMS / median", "column kurtosis")


@dataclass(frozen=True, eq=False)
class RealInputs:
    """E4M3 bytes, one scale a tensor, of consecutive positions of a text.

    kv `[positions, 576]` and query `[tokens, heads, 576]` uint8; keys `[tokens, 256]` int16, the
    positions that each token attends to, the highest mean logit first. `scale_log2` and
    `out_scale` (kv's scale) are exact float32 values. `made` says how: package, versions, digests,
    figures.
    """

    query: NDArray[np.uint8]
    kv: NDArray[np.uint8]
    keys: NDArray[np.int16]
    scale_log2: float
    out_scale: float
    made: Mapping[str, Any]


@cache
def load() -> RealInputs:
    """The stored inputs; the file is read once."""
    with np.load(FILE) as stored:
        scales = stored["scales"]
        return RealInputs(
            query=stored["query"],
            kv=stored["kv"],
            keys=stored["keys"],
            scale_log2=float(scales[0]),
            out_scale=float(scales[1]),
            made=json.loads(str(stored["made"])),
        )


def outliers(values: NDArray[Any]) -> dict[str, float]:
    """How far a few columns stand out from the rest: the figures named by `FIGURES`.

    Of `values` `[..., columns]`: the largest magnitude over the RMS of all; the kurtosis of all (3
    if normal); the largest over the median of the columns' largest magnitudes, then of their RMS;
    the largest kurtosis of a column.
    """
    x = np.asarray(values, np.float64).reshape(-1, np.shape(values)[-1])
    top, rms = np.abs(x).max(axis=0), np.sqrt(np.mean(x * x, axis=0))
    found = (
        top.max() / np.sqrt(np.mean(x * x)),
        float(_kurtosis(x.reshape(-1, 1))[0]),
        top.max() / np.median(top),
        rms.max() / np.median(rms),
        _kurtosis(x).max(),
    )
    return {name: round(float(f), 2) for name, f in zip(FIGURES, found, strict=True)}


def _kurtosis(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The fourth central moment of each column of `[n, columns]` over its variance squared."""
    centred = x - x.mean(axis=0)
    square = centred * centred
    return np.asarray(np.mean(square * square, axis=0) / np.mean(square, axis=0) ** 2)


def markdown(figures: Mapping[str, Mapping[str, float]]) -> str:
    """A table of `outliers` by tensor."""
    lines = ["| tensor | " + " | ".join(FIGURES) + " |", "|---|" + "---:|" * len(FIGURES)]
    for name, row in figures.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[f]:.1f}" for f in FIGURES) + " |")
    return "\n".join(lines)
