"""Runs of a kernel over poisoned buffers: which elements it wrote, and which it should not have.

A runner is anything that decodes a case into given buffers: the GPU's, or a stand-in in a test.
Each case runs twice, over a NaN pattern and over a finite one. An element that keeps the pattern in
both runs was never written, whatever value it should have got.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparse_mla_verify.inputs.cases import LATENT, Case
from sparse_mla_verify.measure.bits import Comparison, compare_bits

GUARD_ROWS = 1  # rows after the last one decoded, in both outputs; nothing may write there

# Encodings that no decode gives: NaN with a payload (hardware gives the canonical one), and
# 123.5 and 123.456, which the case families' outputs don't reach in every element.
POISONS = MappingProxyType({"NaN": (0x7FA5, 0x7FA5A5A5), "finite": (0x42F7, 0x42F6E979)})


class Runner(Protocol):
    """Decodes a case into buffers of encodings, in place.

    latent `[batch + GUARD_ROWS, padded, 512]` uint16 (BF16), lse `[batch + GUARD_ROWS, padded]`
    uint32 (FP32); rows from `batch` on and heads from `heads` on are not to be written.
    """

    def __call__(self, case: Case, latent: NDArray[np.uint16], lse: NDArray[np.uint32]) -> None:
        """Decode."""


@dataclass(frozen=True, eq=False)
class Output:
    """What a kernel wrote for a case, and where it didn't write or shouldn't have.

    latent `[batch, heads, 512]` uint16 and lse `[batch, heads]` uint32 are encodings, of the run
    over the NaN pattern.
    """

    latent: NDArray[np.uint16]
    lse: NDArray[np.uint32]
    unwritten: int  # elements that keep both poisons
    strayed: int  # elements past `heads` or `batch` that lost a poison
    rerun: Comparison  # the second run against the first

    @property
    def elements(self) -> int:
        """Elements that the case must give."""
        return self.latent.size + self.lse.size


def poisoned(case: Case, poison: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Fresh output buffers for a case, filled with one of `POISONS`: latent and lse."""
    latent, lse = POISONS[poison]
    rows = case.batch + GUARD_ROWS
    return (
        np.full((rows, case.padded, LATENT), latent, np.uint16),
        np.full((rows, case.padded), lse, np.uint32),
    )


def run_poisoned(runner: Runner, case: Case) -> Output:
    """Run a case over each poison and say what was written."""
    own = (slice(case.batch), slice(case.heads))
    written, kept, strayed = [], [], 0
    for poison in POISONS:
        buffers = poisoned(case, poison)
        runner(case, *buffers)
        fresh = poisoned(case, poison)
        same = [np.equal(b, p) for b, p in zip(buffers, fresh, strict=True)]
        written.append([b[own] for b in buffers])
        kept.append([s[own] for s in same])
        strayed += sum(int(np.sum(~s)) - int(np.sum(~s[own])) for s in same)
    unwritten = sum(int(np.sum(a & b)) for a, b in zip(*kept, strict=True))
    (latent, lse), again = written
    return Output(latent.copy(), lse.copy(), unwritten, strayed, _rerun(case, (latent, lse), again))


def _rerun(case: Case, first: Any, second: Any) -> Comparison:
    """One comparison of both outputs of two runs."""
    pairs = zip(("latent", "lse"), second, first, strict=True)
    parts = [
        compare_bits(f"{case.name} {name}", actual, expected) for name, actual, expected in pairs
    ]
    return Comparison(
        f"{case.name}, run again",
        sum(p.elements for p in parts),
        sum(p.differing for p in parts),
        tuple(d for p in parts for d in p.first),
    )
