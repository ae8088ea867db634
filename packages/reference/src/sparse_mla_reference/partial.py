"""One CTA's share of a row: online softmax and PV over its chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.machine import Machine, Real
from sparse_mla_reference.schedule import LATENT, Schedule
from sparse_mla_reference.softmax import SoftmaxSteps, chunk_softmax


class Partial(NamedTuple):
    """The state of an online softmax.

    Attributes:
        max: [H] running max of the base-2 logits; -inf if there was no key.
        sum: [H] sum of the numerators, each 448 for a logit of ``max``; 0 if there was no key.
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


def start(logits: Real, used: NDArray[np.bool_], part: slice, machine: Machine) -> Partial:
    """The state of a CTA before its first key, which no logit decides.

    Args:
        logits: [H, n] base-2 logits of all of the row's keys.
        used: [n] bool, False for a masked key.
        part: which of the keys are the CTA's.
        machine: the arithmetic.
    """
    return empty_partial(len(logits), machine)


def running_sum(before: Real, alpha: Real, chunk_sum: Real, machine: Machine) -> Real:
    """The sum of the numerators so far: [H]."""
    return machine.fma(before, alpha, chunk_sum)  # R9


def rescale(acc: Real, alpha: Real, machine: Machine) -> Real:
    """The accumulators under the raised max: [H, 512]."""
    return machine.mul(acc, alpha[:, None])  # R10


def quantise(p: Real, machine: Machine) -> NDArray[Any]:
    """P as an operand of PV: [H, n], E4M3 bytes on a GPU."""
    return machine.quantise(p)  # R11


def pv(
    p: NDArray[Any], values: NDArray[np.uint8], acc: Real, schedule: Schedule, machine: Machine
) -> Real:
    """acc + P x V: [H, 512].

    Args:
        p: [H, n] operands.
        values: [n, 512] E4M3 bytes.
        acc: [H, 512] accumulators.
        schedule: says up to which multiple of keys P and V are padded with zeros.
        machine: the arithmetic.
    """
    absent = -len(values) % schedule.pv_keys
    v = machine.operand(np.pad(values, [(0, absent), (0, 0)]))
    return machine.mma(np.pad(p, [(0, 0), (0, absent)]), v, acc)  # R12


@dataclass(frozen=True)
class PartialSteps(SoftmaxSteps):
    """The steps of ``partial``; replace one to ask what another kernel would give.

    ``start`` is called once for each CTA, the others once for each chunk.
    """

    start: Callable[..., Partial] = start
    running_sum: Callable[..., Real] = running_sum
    rescale: Callable[..., Real] = rescale
    quantise: Callable[..., NDArray[Any]] = quantise
    pv: Callable[..., Real] = pv


PARTIAL_STEPS = PartialSteps()


def partial(
    state: Partial,
    logits: Real,
    keys: NDArray[np.uint8],
    used: NDArray[np.bool_],
    schedule: Schedule,
    machine: Machine,
    steps: PartialSteps = PARTIAL_STEPS,
) -> Partial:
    """Attend to the keys of one CTA, chunk by chunk (rounding steps R4 to R12).

    Args:
        state: the state before the first key, ``empty_partial`` in the contract.
        logits: [H, n] base-2 logits of ``machine.real``, any n.
        keys: [n, 576] E4M3 bytes; zero bytes where ``used`` is False.
        used: [n] bool, False for a masked key.
        schedule: chunks and order of sums.
        machine: the arithmetic.
        steps: what is computed, step by step; the contract's unless said.
    """
    for chunk in schedule.chunks(len(keys)):
        softmax = chunk_softmax(logits[:, chunk], used[chunk], state.max, schedule, machine, steps)
        total = steps.running_sum(state.sum, softmax.alpha, softmax.sum, machine)
        acc = steps.rescale(state.acc, softmax.alpha, machine)
        p = steps.quantise(softmax.p, machine)
        acc = steps.pv(p, keys[chunk, :LATENT], acc, schedule, machine)
        state = Partial(softmax.max, total, acc)
    return state
