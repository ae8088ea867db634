"""The schedule: everything of a kernel that decides the order of its roundings.

>>> [(part.start, part.stop) for part in BASE.parts(10)]
[(0, 3), (3, 6), (6, 9), (9, 10)]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

# Columns of a cache row: the latent part is K and V, the rope part K alone.
LATENT = 512
ROPE = 64
ROW = LATENT + ROPE


@dataclass(frozen=True)
class Schedule:
    """How one row's keys are divided and in which order their results are added.

    Attributes:
        split: CTAs of a cluster that share a row's keys.
        chunk: keys that one CTA handles between two rises of the running max.
        qk_chains: independent accumulators of the QK product; step k goes to chain
            k mod qk_chains and the chains are added in order.
        warp_keys: keys of one warp in the softmax; warps are added in order, the keys within a
            warp as a balanced tree (a lane's pair, then lanes xor 1, xor 2).
        pv_keys: V rows past a chunk's count are zero up to a multiple of this.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    split: int = 4
    chunk: int = 64
    qk_chains: int = 2
    warp_keys: int = 8
    pv_keys: int = 32

    def __post_init__(self) -> None:
        for name in ("split", "chunk", "qk_chains", "warp_keys", "pv_keys"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.warp_keys & (self.warp_keys - 1):
            raise ValueError(f"warp_keys must be a power of two, got {self.warp_keys}")
        if self.chunk % self.warp_keys:
            raise ValueError(
                f"chunk must be a multiple of warp_keys ({self.warp_keys}), got {self.chunk}"
            )

    def parts(self, count: int) -> list[slice]:
        """The CTAs' shares of ``count`` keys, by list position: ceil(count / split) each."""
        per = -(-count // self.split)
        edges = [min(count, i * per) for i in range(self.split + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]

    def chunks(self, count: int) -> Iterator[slice]:
        """One CTA's keys in chunks."""
        for start in range(0, count, self.chunk):
            yield slice(start, min(count, start + self.chunk))


BASE = Schedule()
