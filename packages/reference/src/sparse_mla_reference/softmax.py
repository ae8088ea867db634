"""Online softmax: one chunk's numerators, their sum, and the rescaling of what came before."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.machine import Machine, Real
from sparse_mla_reference.schedule import Schedule

# P is scaled to E4M3's range: the row max becomes 448.
P_SCALE_LOG2 = float(np.log2(448.0))


class ChunkSoftmax(NamedTuple):
    """What a chunk contributes.

    Attributes:
        max: [H] running max after the chunk, in base-2 logits.
        alpha: [H] factor for everything accumulated before.
        p: [H, n] numerators, 448 at the running max; 0 for a masked key.
        sum: [H] their sum, unquantised.
    """

    max: Real
    alpha: Real
    p: Real
    sum: Real


def chunk_softmax(
    logits: Real, used: NDArray[np.bool_], running_max: Real, schedule: Schedule, machine: Machine
) -> ChunkSoftmax:
    """Rounding steps R4 to R8.

    Args:
        logits: [H, n] base-2 logits of ``machine.real``, n at most ``schedule.chunk``.
        used: [n] bool, False for a masked key.
        running_max: [H] max of the chunks before, -inf at the start.
        schedule: gives the order of the sum.
        machine: the arithmetic.
    """
    zero, lowest = machine.constant(0.0), machine.constant(-np.inf)
    # max.f32 returns the operand that is not a NaN, as fmax does.
    chunk_max = np.fmax.reduce(np.where(used, logits, lowest), axis=1, initial=lowest)
    new_max = np.fmax(running_max, chunk_max)
    rescale = machine.ex2(machine.sub(running_max, new_max))
    alpha = np.where(running_max == lowest, machine.constant(1.0), rescale)
    bias = machine.sub(new_max, machine.constant(P_SCALE_LOG2))
    p = np.where(used, machine.ex2(machine.sub(logits, bias[:, None])), zero)
    return ChunkSoftmax(new_max, alpha, p, ordered_sum(p, schedule, machine))


def ordered_sum(p: Real, schedule: Schedule, machine: Machine) -> Real:
    """Sum over the last axis as the warps do it (R8): a balanced tree within ``warp_keys`` keys,
    then warp after warp. Absent keys count as +0.

    Args:
        p: [..., n] array, n at most ``schedule.chunk``.
        schedule: gives ``chunk`` and ``warp_keys``.
        machine: the arithmetic.

    Returns:
        [...] array.
    """
    padding = [(0, 0)] * (p.ndim - 1) + [(0, schedule.chunk - p.shape[-1])]
    padded = np.pad(p, padding)
    warps = schedule.chunk // schedule.warp_keys
    tree = padded.reshape(*p.shape[:-1], warps, schedule.warp_keys)
    while tree.shape[-1] > 1:
        tree = machine.add(tree[..., 0::2], tree[..., 1::2])
    total = tree[..., 0, 0]
    for warp in range(1, tree.shape[-2]):
        total = machine.add(total, tree[..., warp, 0])
    return total
