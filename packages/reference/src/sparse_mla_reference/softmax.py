"""Online softmax: one chunk's numerators, their sum, and the rescaling of what came before."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.machine import Machine, Real
from sparse_mla_reference.schedule import Schedule

# The numerator P of the key with the largest logit of a CTA's keys so far is 448, the largest E4M3
# number, up to the roundings of R6 and R7.
P_SCALE_LOG2 = float(np.log2(448.0))


class ChunkSoftmax(NamedTuple):
    """What a chunk contributes.

    Attributes:
        max: [H] running max after the chunk, in base-2 logits.
        alpha: [H] factor for everything accumulated before.
        p: [H, n] numerators, 448 for a key whose logit is the running max; 0 for a masked key.
        sum: [H] sum of the numerators, which are not quantised yet.
    """

    max: Real
    alpha: Real
    p: Real
    sum: Real


def running_max(logits: Real, used: NDArray[np.bool_], before: Real) -> Real:
    """The larger of ``before`` and of the max of the chunk's used logits; NaN is ignored: [H]."""
    lowest = logits.dtype.type(-np.inf)
    # max.f32 returns the operand that is not a NaN, as fmax does.
    chunk = np.fmax.reduce(np.where(used, logits, lowest), axis=1, initial=lowest)  # R4
    return np.asarray(np.fmax(before, chunk))  # R4


def alpha(before: Real, after: Real, machine: Machine) -> Real:
    """The factor for what was accumulated under the max ``before``; 1 if there was no key: [H]."""
    rescale = machine.ex2(machine.sub(before, after))  # R5
    return np.where(before == -np.inf, machine.constant(1.0), rescale)  # R5


def bias(top: Real, machine: Machine, *, p_scale_log2: float = P_SCALE_LOG2) -> Real:
    """What is subtracted from the logits so that P = 2^p_scale_log2 for a logit of ``top``: [H]."""
    return machine.sub(top, machine.constant(p_scale_log2))  # R6


def numerators(logits: Real, bias: Real, used: NDArray[np.bool_], machine: Machine) -> Real:
    """P = 2^(logit - bias); 0 for a masked key: [H, n]."""
    p = machine.ex2(machine.sub(logits, bias[:, None]))  # R7
    return np.where(used, p, machine.constant(0.0))  # R7


def ordered_sum(p: Real, schedule: Schedule, machine: Machine) -> Real:
    """Sum over the last axis as the warps do it: a balanced tree within ``warp_keys`` keys, then
    warp after warp (R8). Absent keys count as +0.

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
        tree = machine.add(tree[..., 0::2], tree[..., 1::2])  # R8
    total = tree[..., 0, 0]
    for warp in range(1, tree.shape[-2]):
        total = machine.add(total, tree[..., warp, 0])  # R8
    return total


@dataclass(frozen=True)
class SoftmaxSteps:
    """The steps of ``chunk_softmax``; replace one to ask what another kernel would give."""

    running_max: Callable[..., Real] = running_max
    alpha: Callable[..., Real] = alpha
    bias: Callable[..., Real] = bias
    numerators: Callable[..., Real] = numerators
    chunk_sum: Callable[..., Real] = ordered_sum


SOFTMAX_STEPS = SoftmaxSteps()


def chunk_softmax(
    logits: Real,
    used: NDArray[np.bool_],
    before: Real,
    schedule: Schedule,
    machine: Machine,
    steps: SoftmaxSteps = SOFTMAX_STEPS,
) -> ChunkSoftmax:
    """Rounding steps R4 to R8.

    Args:
        logits: [H, n] base-2 logits of ``machine.real``, n at most ``schedule.chunk``.
        used: [n] bool, False for a masked key.
        before: [H] running max of the CTA's earlier chunks, -inf at the start.
        schedule: gives the order of the sum.
        machine: the arithmetic.
        steps: what is computed, step by step; the contract's unless said.
    """
    top = steps.running_max(logits, used, before)
    factor = steps.alpha(before, top, machine)
    p = steps.numerators(logits, steps.bias(top, machine), used, machine)
    return ChunkSoftmax(top, factor, p, steps.chunk_sum(p, schedule, machine))
