"""Where everything lies in a CTA's shared memory, and which lane holds what of a fragment.

Fragments of ``mma.m16n8k32`` (one warp, ``g = lane / 4``, ``q = lane % 4``)::

    A  16 x 32 bytes   word 0: row g,     bytes 4q ..      word 2: row g,     bytes 4q + 16 ..
                       word 1: row g + 8, bytes 4q ..      word 3: row g + 8, bytes 4q + 16 ..
    B  32 x 8 bytes    word 0: column g,  bytes 4q ..      word 1: column g,  bytes 4q + 16 ..
    C  16 x 8 f32      0, 1: row g,     columns 2q, 2q + 1
                       2, 3: row g + 8, columns 2q, 2q + 1

QK has A = query (16 heads x 32 columns), B = 8 keys, C = logits (16 heads x 8 keys).

PV has A = P (16 heads x 32 keys), B = V (32 keys x 8 latent columns), C = 16 heads x 8 columns.
V lies with its columns contiguous, so a lane reads one word (4 columns) from each of 4 keys and
transposes the 4 x 4 bytes: word j of the transpose is column ``4g + j`` of the warp's 32. MMA j
therefore multiplies columns ``j, 4 + j, 8 + j, .. 28 + j``, and a lane's accumulators of one head
are 8 contiguous columns ``8q .. 8q + 7``::

    column  8q + i      is  acc[i][0 or 2]   for i < 4
    column  8q + 4 + i  is  acc[i][1 or 3]
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, TILE_HEADS, Schedule

WARP = 32
#: Keys of one MMA: the N of ``mma.m16n8k32`` in QK.
TILE_KEYS = 8
#: Columns (QK) or keys (PV) that one MMA multiplies: the K of ``mma.m16n8k32``.
MMA_K = 32
#: Latent columns that one warp accumulates in PV: four MMAs of 8 columns.
WARP_COLUMNS = 32
#: 16 warps of 32 latent columns.
WARPS = LATENT_COLUMNS // WARP_COLUMNS
THREADS = WARPS * WARP
PV_TILES = WARP_COLUMNS // TILE_KEYS

#: A row of 576 bytes is stored 592 apart: 148 words is 20 modulo the 32 banks, so the eight rows
#: of a B fragment (and of an A fragment) start in eight different groups of four banks.
ROW_STRIDE_BYTES = ROW_COLUMNS + 16


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets into a CTA's dynamic shared memory, in the order of the fields.

    Args:
        query: ``[16]`` query rows, ``ROW_STRIDE_BYTES`` apart: the gather's target.
        kv: ``[chunk]`` cache rows, ``ROW_STRIDE_BYTES`` apart: the gather's target.
        p: ``[16]`` rows of ``chunk`` P bytes, ``p_stride_bytes`` apart.
        live: ``[chunk]`` words, 1 for a key that counts.
        warp_max: ``[logit_warps][16]`` f32, the largest logit among a warp's 8 keys.
        warp_sum: ``[logit_warps][16]`` f32, the sum of P over a warp's 8 keys.
        peer_rows: ``[split][16][cta_columns]`` f32, each CTA's accumulators of the owned columns.
        peer_stats: ``[split][16][2]`` f32, each CTA's running maximum and row sum.
        gather_barrier: An mbarrier on which a chunk's copies complete.
        merge_barrier: An mbarrier on which the peers' pushes complete.
        lost: In push mode, a word that is not 0 once a query row of the cluster never came.
        size: Bytes in all.
        schedule: What the layout is for.
        cta_columns: Latent columns that one CTA owns in the merge.
        logit_warps: Warps that have keys in QK and softmax.
        p_stride_bytes: ``chunk`` and 16 more: eight heads start in eight groups of four banks.
    """

    query: int
    kv: int
    p: int
    live: int
    warp_max: int
    warp_sum: int
    peer_rows: int
    peer_stats: int
    gather_barrier: int
    merge_barrier: int
    lost: int
    size: int
    schedule: Schedule
    cta_columns: int
    logit_warps: int
    p_stride_bytes: int

    @property
    def merge_bytes(self) -> int:
        """Bytes that the cluster's CTAs, itself included, push to one CTA."""
        return self.gather_barrier - self.peer_rows


def shared_layout(schedule: Schedule, push: bool = False) -> SharedLayout:
    """Lay out a CTA's shared memory, one region after the other; all rows are 16-byte aligned."""
    cta_columns = LATENT_COLUMNS // schedule.split
    logit_warps = schedule.chunk // TILE_KEYS
    p_stride_bytes = schedule.chunk + 16
    sizes = {
        "query": TILE_HEADS * ROW_STRIDE_BYTES,
        "kv": schedule.chunk * ROW_STRIDE_BYTES,
        "p": TILE_HEADS * p_stride_bytes,
        "live": 4 * schedule.chunk,
        "warp_max": 4 * logit_warps * TILE_HEADS,
        "warp_sum": 4 * logit_warps * TILE_HEADS,
        "peer_rows": 4 * schedule.split * TILE_HEADS * cta_columns,
        "peer_stats": 8 * schedule.split * TILE_HEADS,
        "gather_barrier": 8,
        "merge_barrier": 8,
        "lost": 4 if push else 0,
    }
    offsets = dict(zip(sizes, accumulate((0, *sizes.values())), strict=False))
    return SharedLayout(
        **offsets,
        size=sum(sizes.values()),
        schedule=schedule,
        cta_columns=cta_columns,
        logit_warps=logit_warps,
        p_stride_bytes=p_stride_bytes,
    )
