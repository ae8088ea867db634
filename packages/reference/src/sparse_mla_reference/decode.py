"""Sparse MLA decode, one line per stage.

``decode`` with a GPU machine computes every bit that the kernel writes; with ``IDEAL`` the same
algorithm runs in float64 and rounds nothing.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_mla_reference import arguments
from sparse_mla_reference.gather import gather
from sparse_mla_reference.lse import natural
from sparse_mla_reference.machine import SM90, Machine
from sparse_mla_reference.merge import Merged, merge
from sparse_mla_reference.partial import partial
from sparse_mla_reference.schedule import BASE, LATENT, Schedule


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

    Returns:
        latent: [B, H, 512] normalised rows, ``ml_dtypes.bfloat16`` (float64 with ``IDEAL``).
        lse: [B, H] natural-log LSE, float32 (float64 with ``IDEAL``).
        A row without keys gives 0 and -inf. A NaN in a key or query that is used gives NaN rows
        and LSEs in the heads that it reaches, latent 0x7FFF and LSE 0x7FFFFFFF.

    Raises:
        TypeError: an argument has the wrong dtype; the message names it.
        ValueError: an argument has the wrong shape; the message names it.
    """
    args = arguments.check(query, kv, rows, valid, scale_log2, out_scale, schedule, machine)
    batch, heads = args.query.shape[:2]
    latent = machine.round_out(np.zeros((batch, heads, LATENT), machine.real))
    lse = np.zeros((batch, heads), machine.real)
    for b in range(batch):
        merged = decode_row(args, b, schedule, machine)
        latent[b] = machine.round_out(merged.row)
        lse[b] = natural(merged.lse2, machine)
    return latent, lse


def decode_row(args: arguments.Arguments, b: int, schedule: Schedule, machine: Machine) -> Merged:
    """Row ``b`` of a decode before its last roundings: the LSE in base 2, the row not yet BF16."""
    machine = machine.multiplying(schedule.mma)
    ids = args.row_ids(b)
    keys, used = gather(args.kv, ids[schedule.order(len(ids))])
    scale, out_scale = (machine.constant(x) for x in (args.scale_log2, args.out_scale))
    partials = [
        partial(args.query[b], keys[part], used[part], scale, schedule, machine)
        for part in schedule.parts(len(keys))
    ]
    return merge(partials, out_scale, machine)
