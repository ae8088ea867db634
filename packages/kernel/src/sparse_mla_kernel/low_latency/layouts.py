"""Shared memory of a CTA, and what a warp and a lane have at each stage.

Fragments of ``mma.m16n8k16`` (one warp, ``g = lane / 4``, ``q = lane % 4``; a word is two FP16)::

    A  16 x 16   word 0: row g, k 2q, 2q + 1        word 2: row g, k 2q + 8, 2q + 9
                 word 1: row g + 8, k 2q, 2q + 1    word 3: row g + 8, k 2q + 8, 2q + 9
    B  16 x 8    word 0: column g, k 2q, 2q + 1     word 1: column g, k 2q + 8, 2q + 9
    C  16 x 8    0, 1: row g, columns 2q, 2q + 1    2, 3: row g + 8

An MMA sums its 16 products exactly before it rounds, so which of them is which k is free. QK uses
this: k = 2q, 2q + 1, 2q + 8, 2q + 9 are the columns ``4q .. 4q + 3`` of 16 consecutive ones, one
word of bytes. PV takes its keys in natural order.

* QK: warp w has the columns ``144 (w % 4) ..`` of the keys ``32 (w / 4) ..``. A = keys, B = query,
  C = [key][head].
* Softmax: warp w has the heads 2w and 2w + 1, a lane the keys 2 lane and 2 lane + 1.
* PV: warp w has the latent columns ``64w ..``. A = P, B = V, C = [head][column] in eight tiles of 8
  columns: tile 4u + j has the columns ``64w + 32u + 4n + j``, so that a lane's accumulators of one
  head are the 8 contiguous columns ``64w + 32u + 8q ..``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from sparse_mla_kernel.layouts import ROW_STRIDE_BYTES
from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, TILE_HEADS, Schedule

WARP = 32
WARPS = 8
THREADS = WARPS * WARP
#: Columns or keys that one MMA multiplies: the K of ``mma.m16n8k16``.
STEP = 16
#: Warps that share the columns of a key in QK, and columns that each has.
QUARTERS = 4
QUARTER_COLUMNS = ROW_COLUMNS // QUARTERS
#: Keys that a warp has in QK: two MMAs of 16.
WARP_KEYS = 32
#: Latent columns that a warp has in PV, in two halves of 32.
WARP_COLUMNS = LATENT_COLUMNS // WARPS
HALF_COLUMNS = 32
#: Keys that a warp asks for in a gather.
GATHER_KEYS = 8
#: Chunks in flight: one is multiplied while the next one is gathered.
BUFFERS = 2
#: A query row of 576 FP16 is stored 1184 bytes apart: 296 words is 8 modulo the 32 banks, so the
#: 8-byte reads of a B fragment (4 heads x 4 lanes a phase) hit every bank once.
QUERY_STRIDE_BYTES = 2 * ROW_COLUMNS + 32
#: 64 logits of a head are stored 68 words apart: a C fragment's stores hit every bank once.
LOGIT_STRIDE_BYTES = 4 * 68
#: 64 FP16 of P are stored 36 words apart: an A fragment's reads hit every bank once.
P_STRIDE_BYTES = 4 * 36
#: A warp sends its 16 heads x 64 columns as 8 units of one 16-byte vector a lane: unit
#: ``4 half + 2u + i`` is head ``g + 8 half``, columns ``32u + 8q + 4i ..`` of the warp's.
UNITS = 8
UNIT_BYTES = 16 * WARP


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets into a CTA's dynamic shared memory, in the order of the fields.

    Args:
        kv: ``[BUFFERS][64]`` cache rows, ``ROW_STRIDE_BYTES`` apart: the gather's target.
        query: ``[16]`` query rows in FP16, ``QUERY_STRIDE_BYTES`` apart.
        logit: ``[QUARTERS][16]`` rows of 64 f32, ``LOGIT_STRIDE_BYTES`` apart: sums over a quarter.
        p: ``[16]`` rows of 64 FP16, ``P_STRIDE_BYTES`` apart: P, rounded to E4M3.
        alpha: ``[16]`` f32, by how much older weights shrink.
        live: ``[BUFFERS][64]`` words, 1 for a key that counts.
        peer_rows: ``[split][UNITS][warps of an owner][32]`` vectors of 4 f32: each CTA's
            accumulators of the owned columns, in the order of the sender's registers.
        peer_stats: ``[split][16][2]`` f32, each CTA's running maximum and row sum.
        gather_barrier: ``[BUFFERS]`` mbarriers on which a chunk's copies complete.
        stats_barrier: An mbarrier on which the peers' statistics complete.
        rows_barrier: An mbarrier on which the peers' accumulators complete.
        size: Bytes in all.
        split: CTAs that share a row's keys.
        cta_columns: Latent columns that one CTA owns in the merge.
    """

    kv: int
    query: int
    logit: int
    p: int
    alpha: int
    live: int
    peer_rows: int
    peer_stats: int
    gather_barrier: int
    stats_barrier: int
    rows_barrier: int
    size: int
    split: int
    cta_columns: int

    @property
    def owner_warps(self) -> int:
        """Warps of a CTA whose columns belong to one owner."""
        return self.cta_columns // WARP_COLUMNS

    @property
    def stats_bytes(self) -> int:
        """Bytes of statistics that the split's CTAs, itself included, push to one CTA."""
        return 8 * self.split * TILE_HEADS

    @property
    def rows_bytes(self) -> int:
        """Bytes of accumulators that the other CTAs of the split push to one CTA."""
        return 4 * (self.split - 1) * TILE_HEADS * self.cta_columns


def shared_layout(schedule: Schedule) -> SharedLayout:
    """Lay out a CTA's shared memory, one region after the other; all are 16-byte aligned."""
    cta_columns = LATENT_COLUMNS // schedule.split
    sizes = {
        "kv": BUFFERS * schedule.chunk * ROW_STRIDE_BYTES,
        "query": TILE_HEADS * QUERY_STRIDE_BYTES,
        "logit": QUARTERS * TILE_HEADS * LOGIT_STRIDE_BYTES,
        "p": TILE_HEADS * P_STRIDE_BYTES,
        "alpha": 4 * TILE_HEADS,
        "live": 4 * BUFFERS * schedule.chunk,
        "peer_rows": 4 * schedule.split * TILE_HEADS * cta_columns,
        "peer_stats": 8 * schedule.split * TILE_HEADS,
        "gather_barrier": 8 * BUFFERS,
        "stats_barrier": 8,
        "rows_barrier": 8,
    }
    offsets = dict(zip(sizes, accumulate((0, *sizes.values())), strict=False))
    return SharedLayout(
        **offsets, size=sum(sizes.values()), split=schedule.split, cta_columns=cta_columns
    )
