"""What decides the order of rounding, as data: the same fields as the reference's ``Schedule``."""

from __future__ import annotations

from dataclasses import dataclass

#: Columns of a cache row and of a query row: 512 latent columns, then 64 rope columns.
ROW_COLUMNS = 576
#: Columns of V and of an output row: the latent part of a cache row.
LATENT_COLUMNS = 512
#: Query heads that one cluster attends with: the M of ``mma.m16n8k32``.
TILE_HEADS = 16
#: Keys of one MMA step: the N of QK and half of what ``m16n8k32`` reads of PV's K.
TILE_KEYS = 8
#: Columns (QK) or keys (PV) that one MMA step multiplies: the K of ``mma.m16n8k32``.
STEP = 32


@dataclass(frozen=True)
class Schedule:
    """The shape of the computation, wherever it decides the order in which numbers are rounded.

    Args:
        split: CTAs of a cluster. Each attends to ``ceil(n / split)`` of a row's ``n`` keys and
            owns ``512 / split`` latent columns in the merge. 1, 2, 4 or 8 (the portable cluster
            sizes).
        chunk: Keys that a CTA attends to between two updates of its running maximum. A multiple
            of 32, at most 128 (16 warps of 8 keys).
        qk_chains: Independent FP32 accumulators of a QK product: step ``k`` adds to chain
            ``k mod qk_chains``. 1 to 18.

    Raises:
        ValueError: A field is none of the values above.
    """

    split: int = 4
    chunk: int = 64
    qk_chains: int = 2

    def __post_init__(self) -> None:
        if self.split not in (1, 2, 4, 8):
            raise ValueError(f"split is {self.split}; it may be 1, 2, 4 or 8")
        if self.chunk not in (32, 64, 96, 128):
            raise ValueError(f"chunk is {self.chunk}; it may be 32, 64, 96 or 128")
        if not 1 <= self.qk_chains <= ROW_COLUMNS // STEP:
            raise ValueError(f"qk_chains is {self.qk_chains}; it may be 1 to {ROW_COLUMNS // STEP}")


#: The schedule that ships.
BASE = Schedule()
