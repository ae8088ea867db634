"""What decides the order of rounding, as data.

The reference has a ``Schedule`` of its own, which says more; the verify layer holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        split: CTAs that share a row's keys. Each owns ``512 / split`` latent columns in the merge.
            1, 2, 4 or 8 (the portable cluster sizes); 2, 4 or 8 for an FP16 schedule.
        chunk: Keys that a CTA attends to between two updates of its running maximum. A multiple
            of 32, at most 128 (16 warps of 8 keys); 64 for an FP16 schedule.
        qk_chains: Independent FP32 accumulators of a QK product, added in order. 1 to 18; 4 for an
            FP16 schedule.
        mma: What multiplies: ``"e4m3"``, the architecture's E4M3 ``mma``, step ``k`` into chain
            ``k mod qk_chains``; ``"f16"``, the FP16 ``mma`` after an exact conversion, each chain
            with a run of consecutive columns.
        deal: Keys are dealt to the CTAs in turn, in runs of this many; 0: each CTA has one run of
            ``ceil(n / split)`` keys. 0 for an E4M3 schedule, 8 for an FP16 one.

    Raises:
        TypeError: A number is no int.
        ValueError: A field is none of the values above.
    """

    split: int = 4
    chunk: int = 64
    qk_chains: int = 2
    mma: Literal["e4m3", "f16"] = "e4m3"
    deal: int = 0

    def __post_init__(self) -> None:
        if self.mma not in ("e4m3", "f16"):
            raise ValueError(f"mma is {self.mma!r}; it may be 'e4m3' or 'f16'")
        f16 = self.mma == "f16"
        for name, may in (
            ("split", (2, 4, 8) if f16 else (1, 2, 4, 8)),
            ("chunk", (64,) if f16 else (32, 64, 96, 128)),
            ("qk_chains", (4,) if f16 else tuple(range(1, ROW_COLUMNS // STEP + 1))),
            ("deal", (8,) if f16 else (0,)),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it may be an int")
            if value not in may:
                values = ", ".join(map(str, may))
                raise ValueError(f"{name} is {value}; with mma {self.mma!r} it may be {values}")


#: The base schedule, which ships as the default.
BASE = Schedule()
#: Fewer waits and conversions in a row's chain of steps (``low_latency``), for few (rows, heads).
#: For more of them ``replace(LOW_LATENCY, split=4)`` and ``split=2`` ship as well.
LOW_LATENCY = Schedule(split=8, qk_chains=4, mma="f16", deal=8)
