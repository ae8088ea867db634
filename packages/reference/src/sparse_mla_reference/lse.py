"""Log-sum-exp of a finished row."""

import numpy as np

from sparse_mla_reference.machine import Machine, Real
from sparse_mla_reference.softmax import P_SCALE_LOG2

LN_2 = float(np.log(2.0))


def lse2(top: Real, total: Real, machine: Machine) -> Real:
    """Base-2 LSE of numerators that are 448 at the max (R14): (top - log2 448) + log2 total."""
    scale = machine.constant(P_SCALE_LOG2)
    return machine.add(machine.sub(top, scale), machine.log2(total))


def natural(lse2: Real, machine: Machine) -> Real:
    """A base-2 LSE in natural units: one multiply by ln 2 (R14)."""
    return machine.mul(lse2, machine.constant(LN_2))
