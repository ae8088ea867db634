"""The schedule: everything of a kernel that decides the order of its roundings.

>>> [(part.start, part.stop) for part in BASE.parts(10)]
[(0, 3), (3, 6), (6, 9), (9, 10)]
>>> dealt = Schedule(split=2, deal=2)
>>> dealt.order(7).tolist(), [(part.start, part.stop) for part in dealt.parts(7)]
([0, 1, 4, 5, 2, 3, 6], [(0, 4), (4, 7)])
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Columns of a cache row: the latent part is K and V, the rope part K alone.
LATENT = 512
ROPE = 64
ROW = LATENT + ROPE

# The least and the largest value of a schedule's integers.
_LIMITS = {
    "split": (1, 64),
    "chunk": (1, 4096),
    "qk_chains": (1, ROW // 16),
    "warp_keys": (1, 4096),
    "pv_keys": (1, 4096),
    "deal": (0, 1024),
}


@dataclass(frozen=True)
class Schedule:
    """How one row's keys are divided and in which order their results are added.

    Attributes:
        split: CTAs of a cluster that share a row's keys; 1 to 64.
        chunk: keys that one CTA handles between two rises of the running max; 1 to 4096.
        qk_chains: independent accumulators of the QK product, added in chain order; 1 to 36, the
            most steps of 576 columns.
        qk_order: which chain step k goes to: ``"strided"``, k mod qk_chains; ``"blocked"``, the
            chains take runs of consecutive steps, as equal as can be.
        warp_keys: keys of one warp in the softmax; warps are added in order, the keys within a
            warp as a balanced tree (a lane's pair, then lanes xor 1, xor 2).
        pv_keys: V rows past a chunk's count are zero up to a multiple of this;
            on a GPU this must be a multiple of the step of its instruction.
        deal: keys are dealt to the CTAs in turn, in runs of this many; 0: each CTA has one run of
            ceil(n / split) keys. At most 1024.
        mma: what multiplies E4M3: ``"e4m3"``, the architecture's E4M3 ``mma``; ``"f16"``, its FP16
            ``mma`` after an exact conversion of the operands.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    split: int = 4
    chunk: int = 64
    qk_chains: int = 2
    warp_keys: int = 8
    pv_keys: int = 32
    qk_order: Literal["strided", "blocked"] = "strided"
    deal: int = 0
    mma: Literal["e4m3", "f16"] = "e4m3"

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not least <= value <= most:
                raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}")
        if self.qk_order not in ("strided", "blocked"):
            raise ValueError(f"qk_order must be 'strided' or 'blocked', got {self.qk_order!r}")
        if self.mma not in ("e4m3", "f16"):
            raise ValueError(f"mma must be 'e4m3' or 'f16', got {self.mma!r}")
        if self.warp_keys & (self.warp_keys - 1):
            raise ValueError(f"warp_keys must be a power of two, got {self.warp_keys}")
        if self.chunk % self.warp_keys:
            raise ValueError(
                f"chunk must be a multiple of warp_keys ({self.warp_keys}), got {self.chunk}"
            )

    def order(self, count: int) -> NDArray[np.int64]:
        """List positions of ``count`` keys, the first CTA's first: [count] int64.

        Each CTA keeps its keys in list order.
        """
        position = np.arange(count)
        if not self.deal:
            return position
        return np.argsort(position // self.deal % self.split, kind="stable")

    def parts(self, count: int) -> list[slice]:
        """The CTAs' shares of ``count`` keys, as slices of ``order(count)``."""
        if self.deal:
            owner = np.arange(count) // self.deal % self.split
            edges = [0, *accumulate(np.bincount(owner, minlength=self.split).tolist())]
        else:
            per = -(-count // self.split)
            edges = [min(count, i * per) for i in range(self.split + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]

    def chunks(self, count: int) -> Iterator[slice]:
        """One CTA's keys in chunks."""
        for start in range(0, count, self.chunk):
            yield slice(start, min(count, start + self.chunk))


BASE = Schedule()
# The kernel's low-latency schedule (its package names it so too). It ships with a split of 4 and 2
# as well, for larger batches.
LOW_LATENCY = Schedule(
    split=8, qk_chains=4, qk_order="blocked", warp_keys=64, pv_keys=16, deal=8, mma="f16"
)
