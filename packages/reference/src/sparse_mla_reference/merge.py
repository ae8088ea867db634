"""Merges: of a cluster's partials into a row, and of finished rows over disjoint keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.arguments import check_kind
from sparse_mla_reference.lse import LN_2, Base, lse2
from sparse_mla_reference.machine import SM90, Machine, Real
from sparse_mla_reference.partial import Partial


class Merged(NamedTuple):
    """A finished row.

    Attributes:
        row: [H, 512] normalised, before the rounding to BF16; 0 if there was no key.
        lse2: [H] base-2 log-sum-exp; -inf if there was no key.
    """

    row: Real
    lse2: Real


class Sums(NamedTuple):
    """A cluster's partials, merged and not yet normalised.

    Attributes:
        max: [H] max of the base-2 logits over all CTAs; -inf if there was no key.
        total: [H] sum of the numerators, each 448 for a logit of ``max``; 0 if there was no key.
        row: [H, 512] sum of numerator x value.
    """

    max: Real
    total: Real
    row: Real


def merge_partials(partials: Sequence[Partial], machine: Machine) -> Sums:
    """The partials added in CTA order, each with the weight 2^(its max - the largest max).

    An empty partial, one whose sum is 0, has weight 0; a NaN sum is not empty.
    """
    top = np.fmax.reduce([p.max for p in partials])
    total, row = np.zeros_like(top), np.zeros_like(partials[0].acc)
    for p in partials:
        weight = machine.ex2(machine.sub(p.max, top))  # R13
        weight = np.where(p.sum == 0, machine.constant(0.0), weight)  # R13
        total = machine.fma(weight, p.sum, total)  # R13
        row = machine.fma(weight[:, None], p.acc, row)  # R13
    return Sums(top, total, row)


def normalise(row: Real, total: Real, out_scale: Real, machine: Machine) -> Real:
    """The row times out_scale / total; 0 if there was no key: [H, 512]."""
    inverse = machine.div(out_scale, total)  # R15
    scaled = machine.mul(row, inverse[:, None])  # R15
    return np.where(total[:, None] == 0, machine.constant(0.0), scaled)


@dataclass(frozen=True)
class MergeSteps:
    """The steps of ``merge``; replace one to ask what another kernel would give."""

    merge_partials: Callable[..., Sums] = merge_partials
    normalise: Callable[..., Real] = normalise
    lse2: Callable[..., Real] = lse2


MERGE_STEPS = MergeSteps()


def merge(
    partials: Sequence[Partial],
    out_scale: Real,
    machine: Machine,
    steps: MergeSteps = MERGE_STEPS,
) -> Merged:
    """Rounding steps R13 to R15, up to the rounding to BF16.

    Args:
        partials: at least one, in CTA order.
        out_scale: scalar of ``machine.real``.
        machine: the arithmetic.
        steps: what is computed, step by step; the contract's unless said.
    """
    top, total, row = steps.merge_partials(partials, machine)
    scaled = steps.normalise(row, total, out_scale, machine)
    return Merged(scaled, steps.lse2(top, total, machine))


@np.errstate(all="ignore")
def merge_states(
    values: NDArray[Any], lses: NDArray[Any], *, base: Base, machine: Machine = SM90
) -> tuple[Real, Real]:
    """Merge attention over S disjoint sets of keys into attention over all of them.

    In FP32, state after state: w_s = exp(lse_s - max lse), by one EX2 (in base e of the difference
    times log2 e); total = sum of the w_s; the value is the sum of (w_s / total) value_s by FMA; the
    LSE is max + log(total). One state alone comes out as it is. A state whose LSE is -inf is empty:
    it changes no bit and its value is not read. If all are empty the value is 0, the LSE -inf.
    A NaN or +inf LSE gives NaN.

    Args:
        values: [S, ..., D] normalised values, ``machine.real`` or ``ml_dtypes.bfloat16``.
        lses: [S, ...] LSEs, ``machine.real``, with -inf for an empty state (``lse.convert``).
        base: ``"2"`` or ``"e"``, that of the LSEs, in and out.
        machine: the arithmetic.

    Returns:
        value: [..., D] ``machine.real``, not rounded further.
        lse: [...] ``machine.real``.

    Raises:
        TypeError: ``values`` or ``lses`` has the wrong dtype, or ``machine`` is no ``Machine``.
        ValueError: the shapes don't fit each other, there is no state, or ``base`` is unknown.
    """
    values, lses = _check_states(values, lses, base, machine)
    top = np.fmax.reduce(lses)
    used = lses != -np.inf
    weights = [
        np.where(u, _exponential(machine.sub(x, top), base, machine), machine.constant(0.0))
        for x, u in zip(lses, used, strict=True)
    ]
    total = np.zeros_like(top)
    for weight in weights:
        total = machine.add(total, weight)
    # -0, not +0: the identity of addition, so that a first value of -0 stays.
    row = np.full(values.shape[1:], -0.0, machine.real)
    for weight, value, u in zip(weights, values, used, strict=True):
        share = machine.div(weight, total)[..., None]
        row = np.where(u[..., None], machine.fma(share, value, row), row)
    nothing = ~used.any(axis=0)
    row = np.where(nothing[..., None], machine.constant(0.0), row)
    rise = machine.log2(total)
    if base == "e":
        rise = machine.mul(rise, machine.constant(LN_2))
    return row, np.where(nothing, top, machine.add(top, rise))


def _exponential(x: Real, base: Base, machine: Machine) -> Real:
    return machine.ex2(x if base == "2" else machine.mul(x, machine.constant(1 / LN_2)))


def _check_states(
    values: NDArray[Any], lses: NDArray[Any], base: Base, machine: Machine
) -> tuple[Real, Real]:
    check_kind("machine", machine, Machine, "such as SM90")
    if base not in ("2", "e"):
        raise ValueError(f"base must be '2' or 'e', got {base!r}")
    values, lses = np.asarray(values), np.asarray(lses)
    if values.dtype == ml_dtypes.bfloat16:
        values = values.astype(machine.real)  # exact
    for name, x in (("values", values), ("lses", lses)):
        if x.dtype != machine.real:
            raise TypeError(f"{name} must be {np.dtype(machine.real)}, got {x.dtype}")
    if lses.ndim < 1 or len(lses) < 1 or values.shape[:-1] != lses.shape:
        raise ValueError(
            f"values must be [S, ..., D] and lses [S, ...] with S of 1 or more, "
            f"got {list(values.shape)} and {list(lses.shape)}"
        )
    return values, lses
