"""One CTA's share of a row: online softmax and PV over its chunks."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.logits import logits
from sparse_mla_reference.machine import Machine, Real
from sparse_mla_reference.schedule import LATENT, Schedule
from sparse_mla_reference.softmax import chunk_softmax


class Partial(NamedTuple):
    """The state of an online softmax.

    Attributes:
        max: [H] running max of the base-2 logits; -inf if there was no key.
        sum: [H] sum of the numerators, 448 at the running max; 0 if there was no key.
        acc: [H, 512] sum of numerator x value.
    """

    max: Real
    sum: Real
    acc: Real


def empty_partial(heads: int, machine: Machine) -> Partial:
    """The state before the first key."""
    return Partial(
        np.full(heads, -np.inf, machine.real),
        np.zeros(heads, machine.real),
        np.zeros((heads, LATENT), machine.real),
    )


def partial(
    query: NDArray[np.uint8],
    keys: NDArray[np.uint8],
    used: NDArray[np.bool_],
    scale_log2: Any,
    schedule: Schedule,
    machine: Machine,
) -> Partial:
    """Attend to the keys of one CTA, chunk by chunk.

    Args:
        query: [H, 576] E4M3 bytes.
        keys: [n, 576] E4M3 bytes, any n; zero bytes where ``used`` is False.
        used: [n] bool, False for a masked key.
        scale_log2: scalar of ``machine.real``.
        schedule: chunks, chains and order of sums.
        machine: the arithmetic.
    """
    state = empty_partial(len(query), machine)
    for chunk in schedule.chunks(len(keys)):
        state = add_chunk(state, query, keys[chunk], used[chunk], scale_log2, schedule, machine)
    return state


def add_chunk(
    state: Partial,
    query: NDArray[np.uint8],
    keys: NDArray[np.uint8],
    used: NDArray[np.bool_],
    scale_log2: Any,
    schedule: Schedule,
    machine: Machine,
) -> Partial:
    """Add one chunk of keys to the state (rounding steps R1 to R12); arguments as ``partial``."""
    s = logits(machine.operand(query), machine.operand(keys), scale_log2, schedule, machine)
    step = chunk_softmax(s, used, state.max, schedule, machine)
    total = machine.fma(state.sum, step.alpha, step.sum)  # R9
    acc = machine.mul(state.acc, step.alpha[:, None])  # R10
    absent = -len(keys) % schedule.pv_keys
    p = np.pad(machine.quantise(step.p), [(0, 0), (0, absent)])  # R11: [H, n]
    v = machine.operand(np.pad(keys[:, :LATENT], [(0, absent), (0, 0)]))  # [n, 512]
    return Partial(step.max, total, machine.mma(p, v, acc))  # R12
