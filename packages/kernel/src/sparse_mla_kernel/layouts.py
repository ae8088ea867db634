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

from sparse_mla_kernel.schedule import (
    LATENT_COLUMNS,
    ROW_COLUMNS,
    STEP,
    TILE_HEADS,
    TILE_KEYS,
    Schedule,
)

WARP = 32
#: Latent columns that one warp accumulates in PV: four MMAs of 8 columns.
WARP_COLUMNS = 32
#: 16 warps of 32 latent columns.
WARPS = LATENT_COLUMNS // WARP_COLUMNS
THREADS = WARPS * WARP
PV_TILES = WARP_COLUMNS // TILE_KEYS

#: A row of 576 bytes is stored 592 apart: 148 words is 20 modulo the 32 banks, so the eight rows
#: of a B fragment (and of an A fragment) start in eight different groups of four banks.
ROW_STRIDE_BYTES = ROW_COLUMNS + 16


def _align(offset: int, to: int) -> int:
    return -(-offset // to) * to


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets into a CTA's dynamic shared memory, one region after the other."""

    schedule: Schedule

    @property
    def cta_columns(self) -> int:
        """Latent columns that one CTA owns in the merge."""
        return LATENT_COLUMNS // self.schedule.split

    @property
    def logit_warps(self) -> int:
        """Warps that have keys in QK and softmax."""
        return self.schedule.chunk // TILE_KEYS

    # The gather's target: query rows, then the chunk's cache rows.
    @property
    def query(self) -> int:
        return 0

    @property
    def kv(self) -> int:
        return self.query + TILE_HEADS * ROW_STRIDE_BYTES

    # Softmax: P bytes [16][chunk], padded so that eight heads start in eight groups of banks.
    @property
    def p_stride_bytes(self) -> int:
        return self.schedule.chunk + 16

    @property
    def p(self) -> int:
        return self.kv + self.schedule.chunk * ROW_STRIDE_BYTES

    # Which of the chunk's keys count: one word a key.
    @property
    def live(self) -> int:
        return self.p + TILE_HEADS * self.p_stride_bytes

    # Row maxima and row sums of each warp's 8 keys: [logit_warps][16] f32.
    @property
    def warp_max(self) -> int:
        return self.live + 4 * self.schedule.chunk

    @property
    def warp_sum(self) -> int:
        return self.warp_max + 4 * self.logit_warps * TILE_HEADS

    # The merge's mailbox, filled by every CTA of the cluster.
    @property
    def peer_rows(self) -> int:
        """``[split][16][cta_columns]`` f32: each CTA's accumulators of the owned columns."""
        return _align(self.warp_sum + 4 * self.logit_warps * TILE_HEADS, 16)

    @property
    def peer_stats(self) -> int:
        """``[split][16][2]`` f32: each CTA's running maximum and row sum."""
        return self.peer_rows + 4 * self.schedule.split * TILE_HEADS * self.cta_columns

    # Barriers, 8 bytes each.
    @property
    def gather_barrier(self) -> int:
        return _align(self.peer_stats + 8 * self.schedule.split * TILE_HEADS, 8)

    @property
    def merge_barrier(self) -> int:
        return self.gather_barrier + 8

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.merge_barrier + 8

    @property
    def merge_bytes(self) -> int:
        """Bytes that the cluster's CTAs, itself included, push to one CTA."""
        return self.gather_barrier - self.peer_rows


assert ROW_COLUMNS % STEP == 0 and ROW_STRIDE_BYTES % 16 == 0  # bulk copies land 16-byte aligned
