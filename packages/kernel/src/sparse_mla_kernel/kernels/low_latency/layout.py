"""Shared memory of a CTA, and what each warp and each lane holds at each stage.

Fragments of ``mma.m16n8k16`` (one warp, ``g = lane / 4``, ``q = lane % 4``; a word is two FP16)::

    A  16 x 16   word 0: row g, k 2q, 2q + 1        word 2: row g, k 2q + 8, 2q + 9
                 word 1: row g + 8, k 2q, 2q + 1    word 3: row g + 8, k 2q + 8, 2q + 9
    B  16 x 8    word 0: column g, k 2q, 2q + 1     word 1: column g, k 2q + 8, 2q + 9
    C  16 x 8    0, 1: row g, columns 2q, 2q + 1    2, 3: row g + 8

An MMA sums its 16 products exactly before it rounds, so which of them is which k is free. QK uses
this: k = 2q, 2q + 1, 2q + 8, 2q + 9 are the columns ``4q .. 4q + 3`` of 16 consecutive ones, one
word of bytes. PV takes its keys in natural order.

A CTA attends with ``16 tiles`` heads to its own keys:

* QK: warp w has the columns ``144 (w % 4) ..`` of the keys ``16 (w / 4) ..`` and ``32 + 16 (w / 4)
  ..``. A = keys, B = query, C = [key][head].
* Softmax: warp w has the heads w, w + 8, w + 16, ..; a lane the keys 2 lane and 2 lane + 1. P is
  stored as the bytes of A fragments: a lane of PV reads those of 32 keys as one vector.

What follows depends on the row's keys. A = P, B = V, C = [head][column]; of 16 columns (a unit) one
tile has the even ones and one the odd ones, so that a lane's accumulators of one head are the 4
contiguous columns ``4q ..``:

* Two chunks or more (``partial``): warp w has the latent columns ``64w ..`` of the CTA's own keys.
* One chunk (``exchange``): P of all CTAs meets V of all CTAs, in the columns that the CTA owns.
  Warp w has a quarter (w % 4) of these and a half (w / 4) of the CTAs, an accumulator for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from sparse_mla_kernel.kernels.base.layout import ROW_STRIDE_BYTES
from sparse_mla_kernel.schedule import LATENT_COLUMNS, ROW_COLUMNS, TILE_HEADS, Schedule

WARP = 32
#: Warps that multiply, their threads, and warps that copy: a warp group of four, so that the
#: registers that it does not need can go to the other two.
WARPS = 8
MULTIPLYING = WARPS * WARP
COPY_WARPS = 4
COPYING = COPY_WARPS * WARP
THREADS = MULTIPLYING + COPYING
#: Registers of a thread after the hand-over; at most 65,536 in all.
COPY_REGISTERS = 40
MULTIPLY_REGISTERS = 232
#: Named barriers (0 is that of all threads): the multiplying warps meet; the query has been asked
#: for, among the copying warps; the first keys have been asked for; from the last on, one for each
#: of ``COLUMN_WARPS`` pairs of warps, the first half's rows have been handed over.
MEETING, QUERY_ASKED, KEYS_ASKED, HANDED_OVER = 1, 2, 3, 4
#: For clusters of so many CTAs, one CTA on each SM: how many run at once on an H200 with 132 SMs
#: (``cudaOccupancyMaxActiveClusters``). On another GPU the number may differ. That can cost time,
#: but changes no bit.
RESIDENT_CLUSTERS = {2: 66, 4: 30, 8: 15}
#: Columns or keys that one MMA multiplies: the K of ``mma.m16n8k16``.
MMA_K = 16
#: Keys of a chunk.
CHUNK = 64
#: Warps that share the columns of a key in QK, and columns that each has.
QUARTERS = 4
QUARTER_COLUMNS = ROW_COLUMNS // QUARTERS
#: Keys that a warp asks for in a gather.
GATHER_KEYS = 8
#: Bytes of a key that a warp's lanes copy at once, a vector of 16 each. The other bytes of
#: ``GATHER_KEYS`` keys are one more vector a lane, ``KEY_LANES`` lanes a key.
KEY_BYTES = 16 * WARP
KEY_LANES = (ROW_COLUMNS - KEY_BYTES) // 16
#: Keys of a later chunk that a copying warp asks for.
WARP_KEYS = CHUNK // COPY_WARPS
#: Rounds of a batch in which a copying warp asks for slices of V.
BATCH_ROUNDS = 4
#: Chunks of keys in flight: the logits of one and V of the one before, while the next one arrives.
BUFFERS = 3
#: The 64 logits of a head start 68 words after those of the head before, so that the stores of a C
#: fragment hit every bank once.
LOGIT_STRIDE_BYTES = 4 * 68
#: Keys whose A fragments make one vector of a lane, and bytes of a warp's such vectors.
PAIR_KEYS = 2 * MMA_K
PAIR_BYTES = 16 * WARP
#: Columns of one transposing load: two tiles of 8.
UNIT_COLUMNS = 16
#: Latent columns and units that a warp has of its own CTA's keys.
WARP_COLUMNS = LATENT_COLUMNS // WARPS
WARP_UNITS = WARP_COLUMNS // UNIT_COLUMNS
#: Warps that share the owned columns where P is exchanged; as many halves of the CTAs as are left.
COLUMN_WARPS = 4
HALVES = WARPS // COLUMN_WARPS


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets into a CTA's dynamic shared memory, in the order of the fields.

    Args:
        query: ``[16 tiles]`` query rows, ``ROW_STRIDE_BYTES`` apart.
        keys: ``[BUFFERS][64]`` cache rows, ``ROW_STRIDE_BYTES`` apart. After the last chunk
            ``[split][blocks][32]`` vectors of 4 f32: each CTA's accumulators of the owned columns,
            in the order of the sender's registers.
        values: In the place of the later buffers where there is one chunk: ``[split][64]`` slices
            of cache rows, ``value_stride_bytes`` apart, the owned columns of every CTA's keys.
        logit: ``[2][QUARTERS][16 tiles]`` rows of 64 f32, ``LOGIT_STRIDE_BYTES`` apart: a chunk's
            sums over a quarter. Where there is one chunk, the second part is for the first half's
            rows, which the second half continues.
        p: ``[split][tiles][2][32]`` vectors of 16 bytes: the CTAs' P, as A fragments. Where P is
            not exchanged, the first two are this CTA's for one chunk and the next.
        alpha: ``[2][16 tiles]`` f32, by how much older weights shrink at a chunk.
        live: ``[BUFFERS][64]`` words, 1 for a key that counts.
        stats: ``[split][16 tiles][2]`` f32, each CTA's running maximum and row sum.
        query_barrier: An mbarrier on which the query's rows complete.
        first_barrier: An mbarrier on which the first chunk's copies complete.
        full_barrier: ``[BUFFERS]`` mbarriers on which a later chunk's copies complete.
        free_barrier: ``[BUFFERS]`` mbarriers on which all threads have multiplied a chunk.
        value_barrier: An mbarrier on which the copies of V complete.
        p_barrier: An mbarrier on which the P of all CTAs completes.
        stats_barrier: An mbarrier on which the CTAs' statistics complete.
        rows_barrier: An mbarrier on which the other CTAs' accumulators complete.
        size: Bytes in all.
        split: CTAs that share a row's keys.
        tiles: Tiles of 16 heads that a CTA has.
    """

    query: int
    keys: int
    values: int
    logit: int
    p: int
    alpha: int
    live: int
    stats: int
    query_barrier: int
    first_barrier: int
    full_barrier: int
    free_barrier: int
    value_barrier: int
    p_barrier: int
    stats_barrier: int
    rows_barrier: int
    size: int
    split: int
    tiles: int

    @property
    def heads(self) -> int:
        """Heads that a CTA has."""
        return TILE_HEADS * self.tiles

    @property
    def cta_columns(self) -> int:
        """Latent columns that a CTA owns."""
        return LATENT_COLUMNS // self.split

    @property
    def value_stride_bytes(self) -> int:
        """Bytes from one slice of V to the next: 16 more, so that 8 of them hit every bank once."""
        return self.cta_columns + 16

    @property
    def value_lanes(self) -> int:
        """Lanes that copy one key's slice of V, a vector of 16 bytes each."""
        return self.cta_columns // 16

    @property
    def units(self) -> int:
        """Units of 16 columns that a warp has where P is exchanged."""
        return self.cta_columns // COLUMN_WARPS // UNIT_COLUMNS

    @property
    def half_ctas(self) -> int:
        """CTAs whose keys a warp has where P is exchanged."""
        return self.split // HALVES

    @property
    def owner_warps(self) -> int:
        """Warps of a CTA whose columns of its own keys belong to one owner."""
        return self.cta_columns // WARP_COLUMNS

    @property
    def barriers(self) -> tuple[tuple[int, int], ...]:
        """Each mbarrier's arrivals, and the bytes that it expects from the start.

        From ``query_barrier`` on, in the order of the fields: as many as a CTA has warps. P is
        expected later, when it is known of how many keys.
        """
        return (
            (1, self.query_bytes),
            (MULTIPLYING, 0),
            *[(CHUNK, 0)] * BUFFERS,
            *[(MULTIPLYING, 0)] * BUFFERS,
            (COPYING, 0),
            (1, 0),
            (1, self.stats_bytes),
            (1, self.rows_bytes),
        )

    @property
    def logit_bytes(self) -> int:
        """Bytes of a chunk's logits."""
        return QUARTERS * self.heads * LOGIT_STRIDE_BYTES

    @property
    def query_bytes(self) -> int:
        """Bytes of the query that a CTA multiplies."""
        return self.heads * ROW_COLUMNS

    @property
    def stats_bytes(self) -> int:
        """Bytes of statistics that the split's CTAs, itself included, push to one CTA."""
        return 8 * self.split * self.heads

    @property
    def rows_bytes(self) -> int:
        """Bytes of accumulators that the other CTAs of the split push to one CTA."""
        return 4 * (self.split - 1) * self.heads * self.cta_columns


def shared_layout(schedule: Schedule, tiles: int) -> SharedLayout:
    """Lay out a CTA's shared memory, one region after the other; all are 16-byte aligned."""
    split, heads = schedule.split, TILE_HEADS * tiles
    chunk_bytes = CHUNK * ROW_STRIDE_BYTES
    sizes = {
        "query": heads * ROW_STRIDE_BYTES,
        "keys": chunk_bytes,
        "values": (BUFFERS - 1) * chunk_bytes,
        "logit": 2 * QUARTERS * heads * LOGIT_STRIDE_BYTES,
        "p": split * heads * CHUNK,
        "alpha": 4 * 2 * heads,
        "live": 4 * BUFFERS * CHUNK,
        "stats": 8 * split * heads,
        "query_barrier": 8,
        "first_barrier": 8,
        "full_barrier": 8 * BUFFERS,
        "free_barrier": 8 * BUFFERS,
        "value_barrier": 8,
        "p_barrier": 8,
        "stats_barrier": 8,
        "rows_barrier": 8,
    }
    offsets = dict(zip(sizes, accumulate((0, *sizes.values())), strict=False))
    layout = SharedLayout(**offsets, size=sum(sizes.values()), split=split, tiles=tiles)
    # Each warp makes the one of its number
    assert layout.query_barrier + 8 * len(layout.barriers) == layout.size
    assert len(layout.barriers) == WARPS + COPY_WARPS
    return layout
