"""The schedules that ship, by name, as each layer states them; a test holds them together.

The layers share no constant, so that a shared mistake can't hide: the kernel says how it is
scheduled, the reference says what it models, and the names tie one to the other.
"""

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from sparse_mla_reference import schedule as reference

if TYPE_CHECKING:
    from sparse_mla_kernel import Schedule as KernelSchedule

BASE = "base"
LOW_LATENCY = "low-latency"
#: The low-latency schedule with another split, for batches of which clusters of 8 leave too few.
LOW_LATENCY_4, LOW_LATENCY_2 = "low-latency-4", "low-latency-2"

#: What the reference models under each name.
REFERENCE = MappingProxyType(
    {
        BASE: reference.BASE,
        LOW_LATENCY: reference.LOW_LATENCY,
        LOW_LATENCY_4: replace(reference.LOW_LATENCY, split=4),
        LOW_LATENCY_2: replace(reference.LOW_LATENCY, split=2),
    }
)


def kernel_schedule(name: str) -> "KernelSchedule":
    """What the kernel compiles under a name. Needs the kernel's package."""
    import sparse_mla_kernel

    return {
        BASE: sparse_mla_kernel.BASE,
        LOW_LATENCY: sparse_mla_kernel.LOW_LATENCY,
        LOW_LATENCY_4: replace(sparse_mla_kernel.LOW_LATENCY, split=4),
        LOW_LATENCY_2: replace(sparse_mla_kernel.LOW_LATENCY, split=2),
    }[name]
