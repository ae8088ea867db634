"""What decides the order of rounding, as data.

The reference has a ``Schedule`` of its own, with more fields. Tests of the verify layer compare
the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparse_mla_kernel.schedule.registry import KERNELS, Kernel

#: Columns of a cache row and of a query row: 512 latent columns, then 64 rope columns.
ROW_COLUMNS = 576
#: Columns of V and of an output row: the latent part of a cache row.
LATENT_COLUMNS = 512
#: Query heads of a tile: one of the sides of every matrix product.
TILE_HEADS = 16


@dataclass(frozen=True)
class Schedule:
    """The shape of the computation, wherever it decides the order in which numbers are rounded.

    The defaults are those of the base kernel. The registry says what each kernel can run
    (:data:`sparse_mla_kernel.schedule.registry.KERNELS`).

    Args:
        split: CTAs that share a row's keys. Each owns ``512 / split`` latent columns in the merge.
        chunk: Keys that a CTA attends to between two updates of its running maximum.
        qk_chains: Independent FP32 accumulators of a QK product, added in order. The base kernel
            puts step ``k`` into chain ``k mod qk_chains``; the low-latency kernel gives each chain
            a run of consecutive columns.
        kernel: The kernel that runs it: ``"base"`` multiplies E4M3, ``"low_latency"`` multiplies
            FP16 after an exact conversion.
        deal: Keys are dealt to the CTAs in turn, in runs of this many. With 0 each CTA has one run
            of ``ceil(n / split)`` keys.

    Raises:
        TypeError: A number is no int.
        ValueError: There is no such kernel, or the kernel can't run a field's value.
    """

    split: int = 4
    chunk: int = 64
    qk_chains: int = 2
    kernel: str = "base"
    deal: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, str) or self.kernel not in KERNELS:
            names = " or ".join(map(repr, KERNELS))
            raise ValueError(f"kernel must be {names}, got {self.kernel!r}")
        for name in ("split", "chunk", "qk_chains", "deal"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
            values = getattr(self.entry, name)
            if value not in values:
                wanted = ", ".join(map(str, values))
                raise ValueError(
                    f"{name} must be one of {wanted} for kernel {self.kernel!r}, got {value}"
                )

    @property
    def entry(self) -> Kernel:
        """The registry's entry of the kernel that runs it."""
        return KERNELS[self.kernel]

    @property
    def mma(self) -> str:
        """What multiplies: ``"e4m3"`` or ``"f16"``."""
        return self.entry.mma


#: The base schedule, which ships as the default.
BASE = Schedule()
#: Fewer waits and conversions in a row's chain of steps, for few (rows, heads). For more of them
#: ``replace(LOW_LATENCY, split=4)`` and ``split=2`` ship as well.
LOW_LATENCY = Schedule(split=8, qk_chains=4, kernel="low_latency", deal=8)
