"""The cluster merge: the CTAs' partials of one row become its output."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparse_mla_reference.lse import lse2
from sparse_mla_reference.machine import Machine, Real
from sparse_mla_reference.partial import Partial


class Merged(NamedTuple):
    """A finished row.

    Attributes:
        row: [H, 512] normalised, before the rounding to BF16; 0 if there was no key.
        lse2: [H] base-2 log-sum-exp; -inf if there was no key.
    """

    row: Real
    lse2: Real


def merge(partials: Sequence[Partial], out_scale: Real, machine: Machine) -> Merged:
    """Rounding steps R13 to R15, up to the rounding to BF16.

    An empty partial, one whose sum is 0, has weight 0; a NaN sum is not empty.

    Args:
        partials: at least one, in CTA order.
        out_scale: scalar of ``machine.real``.
        machine: the arithmetic.
    """
    zero = machine.constant(0.0)
    top = np.fmax.reduce([p.max for p in partials])
    total, row = np.zeros_like(top), np.zeros_like(partials[0].acc)
    for p in partials:
        weight = np.where(p.sum == 0, zero, machine.ex2(machine.sub(p.max, top)))
        total = machine.fma(weight, p.sum, total)
        row = machine.fma(weight[:, None], p.acc, row)
    inverse = machine.div(out_scale, total)
    scaled = machine.mul(row, inverse[:, None])
    return Merged(
        np.where(total[:, None] == 0, zero, scaled),
        np.where(total == 0, machine.constant(-np.inf), lse2(top, total, machine)),
    )
