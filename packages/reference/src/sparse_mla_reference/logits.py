"""QK: scaled logits of one chunk of keys."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.machine import Machine, Real
from sparse_mla_reference.schedule import Schedule


def logits(
    query: NDArray[Any], keys: NDArray[Any], scale_log2: Any, schedule: Schedule, machine: Machine
) -> Real:
    """Base-2 logits, (query . key) * scale_log2 (rounding steps R1 to R3).

    Args:
        query: [H, C] operands of ``machine.mma``; C a multiple of the machine's step.
        keys: [n, C] operands.
        scale_log2: scalar of ``machine.real``.
        schedule: gives the accumulator chains.
        machine: the arithmetic.

    Returns:
        [H, n] array of ``machine.real``.
    """
    step = np.arange(query.shape[-1]) // machine.step
    if schedule.qk_order == "strided":
        chain_of = step % schedule.qk_chains
    else:
        chain_of = step * schedule.qk_chains // (query.shape[-1] // machine.step)
    zero = np.zeros((query.shape[0], keys.shape[0]), machine.real)
    total = zero
    for chain in range(schedule.qk_chains):
        columns = chain_of == chain
        product = machine.mma(query[:, columns], keys[:, columns].T, zero)
        total = product if chain == 0 else machine.add(total, product)
    return machine.mul(total, scale_log2)
