"""The owner's merge: the ranks' partials of one head become its final row.

| # | step | arithmetic |
|---|---|---|
| O1 | ``m`` = the largest LSE of the ranks that are not empty | exact |
| O2 | ``w_d = exp2(lse_d - m)``, 0 for an empty rank | f32 subtract, machine EX2 |
| O3 | ``total = total + w_d``, from 0 | f32 add |
| O4 | ``w_d = w_d / total`` | correctly rounded |
| O5 | ``row = fma(w_d, payload_d, row)``, from 0 | fused |
| O6 | the row | BF16 RN-even |
| O7 | ``lse2 = m + log2f(total)``; natural: times f32(ln 2) | f32 add, f32 multiply |

Ranks in order. A head whose ranks are all empty has the row 0 and the LSE -inf.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference.arguments import check_kind
from sparse_mla_reference.lse import natural
from sparse_mla_reference.machine import SM90, Machine
from sparse_mla_reference.mailbox import EMPTY_LSE
from sparse_mla_reference.schedule import LATENT


def owner_merge(
    payload: NDArray[Any], lse2: NDArray[Any], *, machine: Machine = SM90
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Merge the partials of D ranks (O1 to O7).

    Args:
        payload: [D, ..., 512] normalised rows, ``machine.real`` or ``ml_dtypes.bfloat16``. What an
            empty rank has there is not read.
        lse2: [D, ...] base-2 LSEs, ``machine.real``. ``EMPTY_LSE`` marks an empty rank.
        machine: the arithmetic.

    Returns:
        latent: [..., 512] rows, ``ml_dtypes.bfloat16`` (float64 with ``IDEAL``).
        lse: [...] natural-log LSE, ``machine.real``.

    Raises:
        TypeError: an argument has the wrong dtype, or ``machine`` is no ``Machine``.
        ValueError: the shapes don't fit each other, there is no rank, or an LSE is -inf, which is
            never sent.
    """
    payload, lse2 = _check(payload, lse2, machine)
    zero, none = machine.constant(0.0), machine.constant(-np.inf)
    empty = lse2 == machine.constant(EMPTY_LSE)
    top = np.fmax.reduce(np.where(empty, none, lse2))  # O1
    weights = [
        np.where(e, zero, machine.ex2(machine.sub(x, top)))  # O2
        for x, e in zip(lse2, empty, strict=True)
    ]
    total = np.zeros_like(top)
    for weight in weights:
        total = machine.add(total, weight)  # O3
    row = np.zeros(payload.shape[1:], machine.real)
    for weight, value, e in zip(weights, payload, empty, strict=True):
        share = machine.div(weight, total)  # O4
        row = machine.fma(share[..., None], np.where(e[..., None], zero, value), row)  # O5
    nothing = total == 0
    latent = machine.round_out(np.where(nothing[..., None], zero, row))  # O6
    summed = np.where(nothing, none, machine.add(top, machine.log2(total)))  # O7
    return latent, natural(summed, machine)  # O7


def _check(
    payload: NDArray[Any], lse2: NDArray[Any], machine: Machine
) -> tuple[NDArray[Any], NDArray[Any]]:
    check_kind("machine", machine, Machine, "such as SM90")
    payload, lse2 = np.asarray(payload), np.asarray(lse2)
    if payload.dtype == ml_dtypes.bfloat16:
        payload = payload.astype(machine.real)  # exact
    for name, array in (("payload", payload), ("lse2", lse2)):
        if array.dtype != machine.real:
            raise TypeError(f"{name} must be {np.dtype(machine.real)}, got {array.dtype}")
    fits = payload.ndim >= 2 and payload.shape == (*lse2.shape, LATENT)
    if not fits or len(payload) < 1:
        raise ValueError(
            f"payload must be [D, ..., 512] and lse2 [D, ...] with D of 1 or more, "
            f"got {list(payload.shape)} and {list(lse2.shape)}"
        )
    lowest = np.argwhere(lse2 == -np.inf)
    if lowest.size:
        raise ValueError(
            f"lse2 must be EMPTY_LSE ({EMPTY_LSE:g}) for an empty rank "
            f"(lse.convert(..., target=lse.MAILBOX) writes it), got -inf at {lowest[0].tolist()}"
        )
    return payload, lse2
