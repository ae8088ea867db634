"""Where a debug build stores its stages: words of memory behind the latent rows.

The stages stand in the order of the data, so that the first one that differs is the one to look at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

#: What each stage is, in the order of the data. A debug build stores all of these.
STORED: Mapping[str, str] = MappingProxyType(
    {
        "logits": "R3: base-2 logits, -inf for a masked key",
        "max": "R4: the running maximum of a CTA after its last chunk",
        "p": "R7: P in FP32",
        "sum": "R9: the row sum of a CTA after its last chunk",
        "p_bytes": "R11: P as E4M3 bytes",
        "partial": "R12: the accumulators of a CTA before the merge",
    }
)
#: After these the outputs follow, which every build writes.
OUTPUTS: Mapping[str, str] = MappingProxyType(
    {"lse": "R13, R14: the natural LSE", "latent": "R13, R15: the normalised row in BF16"}
)
#: Stages that have an element for each key.
KEY_STAGES = ("logits", "p", "p_bytes")
COLUMNS = 512
#: A word that was not stored: a NaN pattern that no instruction makes, and no byte.
NOT_STORED = 0xFFFFFFFF
_SLOTS = 64  # keys of a chunk, of the longest chunk that a schedule has


@dataclass(frozen=True)
class Areas:
    """An area of 32-bit words for each stage, ``[batch, heads, split, inner]``.

    Args:
        batch: Decode rows.
        heads: Query heads that are used.
        split: CTAs that share a row's keys.
        width: Row ids that a row's list holds.
    """

    batch: int
    heads: int
    split: int
    width: int

    @property
    def slots(self) -> int:
        """Keys that a CTA has room for: all of a row's, in whole chunks."""
        return _SLOTS * math.ceil(self.width / _SLOTS)

    def inner(self, stage: str) -> int:
        """Words that one CTA has for one head: a key's, a column's, or one."""
        if stage in KEY_STAGES:
            return self.slots
        return COLUMNS if stage == "partial" else 1

    def shape(self, stage: str) -> tuple[int, int, int, int]:
        """The shape of a stage."""
        return self.batch, self.heads, self.split, self.inner(stage)

    def start(self, stage: str) -> int:
        """The first word of a stage."""
        before = list(STORED)[: list(STORED).index(stage)]
        return sum(math.prod(self.shape(name)) for name in before)

    @property
    def words(self) -> int:
        """Words of all stages."""
        return sum(math.prod(self.shape(name)) for name in STORED)

    def cut(self, words: NDArray[np.uint32]) -> dict[str, NDArray[np.uint32]]:
        """The stages of the words of all areas."""
        starts = {stage: self.start(stage) for stage in STORED}
        return {
            stage: words[start : start + math.prod(self.shape(stage))].reshape(self.shape(stage))
            for stage, start in starts.items()
        }
