"""QK: the scaled logits of a row's keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.machine import Machine, Real
from sparse_mla_reference.schedule import Schedule


def products(
    query: NDArray[np.uint8], keys: NDArray[np.uint8], schedule: Schedule, machine: Machine
) -> list[Real]:
    """Matrix product of each accumulator chain: [H, n] a chain.

    Args:
        query: [H, C] E4M3 bytes; C a multiple of the machine's step.
        keys: [n, C] E4M3 bytes.
        schedule: gives the chains.
        machine: the arithmetic.
    """
    q, k = machine.operand(query), machine.operand(keys)
    steps = query.shape[-1] // machine.step
    step = np.arange(query.shape[-1]) // machine.step
    strided = schedule.qk_order == "strided"
    chain_of = step % schedule.qk_chains if strided else step * schedule.qk_chains // steps
    zero = np.zeros((len(query), len(keys)), machine.real)
    every = [chain_of == chain for chain in range(schedule.qk_chains)]
    return [machine.mma(q[:, columns], k[:, columns].T, zero) for columns in every]  # R1


def sum_of_chains(chains: Sequence[Real], machine: Machine) -> Real:
    """The chains added in order: [H, n]."""
    total = chains[0]
    for chain in chains[1:]:
        total = machine.add(total, chain)  # R2
    return total


def logit(dots: Real, scale_log2: Any, machine: Machine) -> Real:
    """Dot products as base-2 logits: [H, n]."""
    return machine.mul(dots, scale_log2)  # R3


@dataclass(frozen=True)
class LogitSteps:
    """The steps of ``logits``; replace one to ask what another kernel would give."""

    products: Callable[..., list[Real]] = products
    sum_of_chains: Callable[..., Real] = sum_of_chains
    logit: Callable[..., Real] = logit


LOGIT_STEPS = LogitSteps()


def logits(
    query: NDArray[np.uint8],
    keys: NDArray[np.uint8],
    scale_log2: Any,
    schedule: Schedule,
    machine: Machine,
    steps: LogitSteps = LOGIT_STEPS,
) -> Real:
    """Base-2 logits, (query . key) * scale_log2 (rounding steps R1 to R3).

    Args:
        query: [H, C] E4M3 bytes; C a multiple of the machine's step.
        keys: [n, C] E4M3 bytes.
        scale_log2: scalar of ``machine.real``.
        schedule: gives the accumulator chains.
        machine: the arithmetic.
        steps: what is computed, step by step; the contract's unless said.

    Returns:
        [H, n] array of ``machine.real``.
    """
    chains = steps.products(query, keys, schedule, machine)
    return steps.logit(steps.sum_of_chains(chains, machine), scale_log2, machine)
