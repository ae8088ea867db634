"""The inputs: many distinct sets a point, over a cache that no L2 holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from sparse_mla_verify.inputs.cases import COLUMNS
from sparse_mla_verify.peers.point import Point

SETS = 64  # input sets, one for each launch of a graph
# Cache rows: as many as the largest point's 64 sets name, so that no graph reads a row twice. That
# is twenty times an L2 of 60 MB, and under 2^31 bytes in FlashMLA's format.
POOL_ROWS = SETS * 16 * 2048
_SLICE = 2**17  # rows drawn at once


class Pool:
    """The KV cache: kv `[N, 576]` E4M3 bytes of a normal distribution, in an order to draw from."""

    def __init__(self, device: torch.device | str, rows: int = POOL_ROWS, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.kv = torch.empty((rows, COLUMNS), dtype=torch.uint8, device=device)
        for part in self.kv.split(_SLICE):
            part.copy_(_normal(tuple(part.shape), device, generator))
        self.order = torch.randperm(rows, dtype=torch.int32, device=device, generator=generator)

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self.kv.device

    def ids(self, sets: int, rows: int, keys: int) -> torch.Tensor:
        """Ids `[sets, rows, keys]` int32, all distinct as long as the cache has that many rows."""
        wanted = sets * rows * keys
        times = max(1, math.ceil(wanted / len(self.order)))
        return self.order.repeat(times)[:wanted].view(sets, rows, keys)


@dataclass(frozen=True, eq=False)
class Workload:
    """A point's inputs.

    query `[sets, B, H, 576]` E4M3 bytes; ids `[sets, B, keys]` int32; rows `[sets, B, width]` int32
    are the ids, then -1; valid `[B]` int32 is the number of keys. peer_width is how wide a list the
    peers are given, for which the keys are the least.
    """

    point: Point
    pool: Pool
    query: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor
    peer_width: int
    scale_log2: float = math.log2(math.e) / math.sqrt(COLUMNS)
    out_scale: float = 1.0

    @property
    def sets(self) -> int:
        """How many sets there are."""
        return len(self.query)

    @property
    def width(self) -> int:
        """Ids that a row's list holds."""
        return self.rows.shape[-1]

    def widened(self, width: int, peer_width: int) -> Workload:
        """The same inputs in lists of another width."""
        return replace(self, rows=padded_ids(self.ids, width), peer_width=peer_width)


def workload(pool: Pool, point: Point, width: int, sets: int = SETS, seed: int = 1) -> Workload:
    """Draw a point's inputs; the peers' lists are as wide as the keys."""
    generator = torch.Generator(pool.device).manual_seed(seed)
    query = _normal((sets, point.rows, point.heads, COLUMNS), pool.device, generator)
    ids = pool.ids(sets, point.rows, point.keys)
    valid = torch.full((point.rows,), point.keys, dtype=torch.int32, device=pool.device)
    return Workload(point, pool, query, ids, padded_ids(ids, width), valid, point.keys)


def padded_ids(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Ids `[..., keys]` in lists `[..., width]`, with -1 after them."""
    rows = ids.new_full((*ids.shape[:-1], width), -1)
    rows[..., : ids.shape[-1]] = ids
    return rows


def _normal(
    shape: tuple[int, ...], device: torch.device | str, generator: torch.Generator
) -> torch.Tensor:
    numbers = torch.randn(shape, device=device, generator=generator)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
