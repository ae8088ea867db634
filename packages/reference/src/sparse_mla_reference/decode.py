"""Sparse MLA decode, one line per stage.

``decode`` with a GPU machine computes every bit that the kernel writes; with ``IDEAL`` the same
algorithm runs in float64 and rounds nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import arguments
from sparse_mla_reference.gather import gather
from sparse_mla_reference.logits import LogitSteps, logits
from sparse_mla_reference.lse import natural
from sparse_mla_reference.machine import SM90, Machine, Real
from sparse_mla_reference.merge import Merged, MergeSteps, merge
from sparse_mla_reference.partial import PartialSteps, partial
from sparse_mla_reference.schedule import BASE, LATENT, Schedule


def round_out(row: Real, machine: Machine) -> NDArray[Any]:
    """A finished row in the type that is written: [H, 512], BF16 on a GPU."""
    return machine.round_out(row)  # R15


@dataclass(frozen=True)
class Steps(LogitSteps, PartialSteps, MergeSteps):
    """A decode, step by step: the fields are functions, and the defaults are the contract's.

    ``dataclasses.replace`` puts another function in the place of one, which asks what a kernel
    would give that departs from the contract there. Every step that rounds takes the machine as its
    last positional argument.

    >>> from dataclasses import replace
    >>> from sparse_mla_reference import bf16
    >>> def truncated(row, machine):
    ...     return bf16.encode(row, rounding="rz")
    >>> truncating = replace(CONTRACT, round_out=truncated)  # decode(..., steps=truncating)

    Raises:
        TypeError: a step is no function.
    """

    gather: Callable[..., tuple[NDArray[np.uint8], NDArray[np.bool_]]] = gather
    natural: Callable[..., Real] = natural
    round_out: Callable[..., NDArray[Any]] = round_out

    def __post_init__(self) -> None:
        for field in fields(self):
            step = getattr(self, field.name)
            if not callable(step):
                raise TypeError(f"{field.name} must be a function, got {step!r}")


CONTRACT = Steps()


def decode(
    query: NDArray[Any],
    kv: NDArray[Any],
    rows: NDArray[Any],
    valid: NDArray[Any],
    *,
    scale_log2: float,
    out_scale: float,
    schedule: Schedule = BASE,
    machine: Machine = SM90,
    steps: Steps = CONTRACT,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Attend each row's heads to the cache rows of its list.

    Args:
        query: [B, H, 576] E4M3, uint8 or ``float8_e4m3fn``.
        kv: [N, 576] E4M3 cache rows: 512 latent columns (K and V) and 64 rope columns (K).
        rows: [>= B, width] int32 row ids, each row's to the front. Ids outside [0, N) are masked.
        valid: [>= B] int32, how many ids of a row count; clamped to [0, width].
        scale_log2: softmax scale x tensor scales x log2(e), rounded to float32.
        out_scale: the scale of V, likewise.
        schedule: order of the roundings.
        machine: the arithmetic; ``IDEAL`` for none of the roundings.
        steps: what is computed, step by step; the contract's unless said.

    Returns:
        latent: [B, H, 512] normalised rows, ``ml_dtypes.bfloat16`` (float64 with ``IDEAL``).
        lse: [B, H] natural-log LSE, float32 (float64 with ``IDEAL``).
        A row without keys gives 0 and -inf. A NaN in a key or query that is used gives NaN rows
        and LSEs in the heads that it reaches, latent 0x7FFF and LSE 0x7FFFFFFF.

    Raises:
        TypeError: an argument has the wrong dtype; the message names it.
        ValueError: an argument has the wrong shape; the message names it.
    """
    arguments.check_kind("steps", steps, Steps, "such as CONTRACT")
    args = arguments.check(query, kv, rows, valid, scale_log2, out_scale, schedule, machine)
    batch, heads = args.query.shape[:2]
    if batch == 0:
        latent = machine.round_out(np.zeros((0, heads, LATENT), machine.real))
        return latent, np.zeros((0, heads), machine.real)
    merged = [decode_row(args, b, schedule, machine, steps) for b in range(batch)]
    latent = np.stack([steps.round_out(m.row, machine) for m in merged])
    lse = np.stack([steps.natural(m.lse2, machine) for m in merged])
    return latent, lse


def decode_row(
    args: arguments.Arguments,
    b: int,
    schedule: Schedule,
    machine: Machine,
    steps: Steps = CONTRACT,
) -> Merged:
    """Row ``b`` of a decode before its last roundings: the LSE in base 2, the row not yet BF16."""
    machine = machine.multiplying(schedule.mma)
    scale, out_scale = (machine.constant(x) for x in (args.scale_log2, args.out_scale))
    query, ids = args.query[b], args.row_ids(b)
    keys, used = steps.gather(args.kv, ids[schedule.order(len(ids))])
    s = logits(query, keys, scale, schedule, machine, steps)
    partials = []
    for part in schedule.parts(len(keys)):
        state = steps.start(s, used, part, machine)
        state = partial(state, s[:, part], keys[part], used[part], schedule, machine, steps)
        partials.append(state)
    return merge(partials, out_scale, machine, steps)
