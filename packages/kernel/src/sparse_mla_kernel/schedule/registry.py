"""What each kernel is: the schedules that it runs, where it runs, and in which modes.

A new kernel gets a folder beside the others and an entry here. No other file lists the kernels. The
entries are data, and reading them loads no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: Architectures that the kernels compile for, by compute capability.
ARCHITECTURES: Mapping[tuple[int, int], str] = MappingProxyType(
    {
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (10, 3): "sm_103a",
        (12, 0): "sm_120a",
    }
)

LATENT, PUSH = "latent", "push"


@dataclass(frozen=True)
class Kernel:
    """A decode kernel.

    Args:
        folder: Its folder in ``sparse_mla_kernel.kernels``, and its name in a ``Schedule``.
        decode: The name of its class, in the folder's ``decode``.
        mma: What multiplies: ``"e4m3"``, the architecture's E4M3 ``mma``; ``"f16"``, the FP16
            ``mma`` after an exact conversion of the operands.
        split: Values that a schedule's ``split`` may have.
        chunk: Values that its ``chunk`` may have.
        qk_chains: Values that its ``qk_chains`` may have.
        deal: Values that its ``deal`` may have.
        modes: Which of latent mode and push mode it has.
        runs_on: Architectures on which its bits have been compared with the reference's.
        compiles_for: Architectures that it compiles for. Nothing has run on those that are not in
            ``runs_on``.
        shared_bytes: The most shared memory that a CTA of it takes, in bytes.
    """

    folder: str
    decode: str
    mma: str
    split: tuple[int, ...]
    chunk: tuple[int, ...]
    qk_chains: tuple[int, ...]
    deal: tuple[int, ...]
    modes: tuple[str, ...]
    runs_on: tuple[str, ...]
    compiles_for: tuple[str, ...]
    shared_bytes: int


#: The kernels, by name.
KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        kernel.folder: kernel
        for kernel in (
            Kernel(
                folder="base",
                decode="SparseDcpDecode",
                mma="e4m3",
                split=(1, 2, 4, 8),
                chunk=(32, 64, 96, 128),
                qk_chains=tuple(range(1, 19)),
                deal=(0,),
                modes=(LATENT, PUSH),
                runs_on=("sm_90a",),
                compiles_for=tuple(ARCHITECTURES.values()),
                shared_bytes=123_924,
            ),
            Kernel(
                folder="low_latency",
                decode="LowLatencyDecode",
                mma="f16",
                split=(2, 4, 8),
                chunk=(64,),
                qk_chains=(4,),
                deal=(8,),
                modes=(LATENT,),
                runs_on=("sm_90a",),
                compiles_for=tuple(ARCHITECTURES.values()),
                shared_bytes=221_792,
            ),
        )
    }
)
