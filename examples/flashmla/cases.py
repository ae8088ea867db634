"""Inputs of the recorded run, made from seeds."""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from examples.flashmla.model import BLOCK, COLUMNS, LATENT, Tokens
from examples.recording import input_digest
from sparse_mla_reference import bf16, e4m3

HEADS, CACHE_ROWS, PAGE_ROWS = 64, 1024, 64
TOKEN_BYTES = LATENT + 4 * (LATENT // 128) + 2 * (COLUMNS - LATENT)


@dataclass(frozen=True)
class Case:
    """A call of ``sparse_decode_fwd``, and which of its rows are kept and modelled.

    Attributes:
        query: [B, 64, 576] bfloat16.
        cache: [N, 656] bytes: 512 E4M3, 4 float32 scales, 64 bfloat16.
        ids: [B, width] int32 cache rows, -1 for none; width a multiple of 64.
        softmax_scale: the factor on the logits.
        kept: row numbers.
    """

    name: str
    query: NDArray[ml_dtypes.bfloat16]
    cache: NDArray[np.uint8]
    ids: NDArray[np.int32]
    softmax_scale: float
    kept: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.ids.shape[1] // BLOCK

    def tokens(self, row: int) -> Tokens:
        """A row's keys."""
        ids = self.ids[row]
        lines = np.ascontiguousarray(self.cache[np.maximum(ids, 0)])
        scales = np.ascontiguousarray(lines[:, LATENT : LATENT + 16]).view(np.float32)
        rope = np.ascontiguousarray(lines[:, LATENT + 16 :]).view(ml_dtypes.bfloat16)
        return Tokens(lines[:, :LATENT], scales, rope, ids >= 0)

    def digest(self) -> str:
        """Of all inputs."""
        scale = np.array([self.softmax_scale])
        return input_digest(self.query.view(np.uint16), self.cache, self.ids, scale)


Scales = Callable[[np.random.Generator], NDArray[np.float32]]


def _ones(rng: np.random.Generator) -> NDArray[np.float32]:
    return np.ones((CACHE_ROWS, LATENT // 128), np.float32)


def _any(rng: np.random.Generator) -> NDArray[np.float32]:
    """Scales with all their bits, so that BF16(scale) and the product round."""
    return np.exp2(rng.uniform(-2, 2, (CACHE_ROWS, LATENT // 128))).astype(np.float32)


def _case(
    name: str,
    seed: int,
    counts: list[int],
    width: int,
    scales: Scales,
    softmax_scale: float,
    kept: tuple[int, ...],
) -> Case:
    rng = np.random.default_rng(seed)
    query = bf16.encode(rng.standard_normal((len(counts), HEADS, COLUMNS)))
    cache = np.empty((CACHE_ROWS, TOKEN_BYTES), np.uint8)
    cache[:, :LATENT] = e4m3.encode(rng.standard_normal((CACHE_ROWS, LATENT)))
    cache[:, LATENT : LATENT + 16] = scales(rng).view(np.uint8)
    rope = bf16.encode(rng.standard_normal((CACHE_ROWS, COLUMNS - LATENT)))
    cache[:, LATENT + 16 :] = rope.view(np.uint8)
    ids = np.stack([rng.permutation(CACHE_ROWS)[:width] for _ in counts]).astype(np.int32)
    ids[np.arange(width) >= np.array(counts)[:, None]] = -1
    return Case(name, query, cache, ids, softmax_scale, kept)


def cases() -> list[Case]:
    """All cases of the run."""
    natural = COLUMNS**-0.5
    return [
        # One block, one split: no order but a lane's own.
        _case("one_block", 1, [64, 40, 1, 0], 64, _ones, natural, (0, 1, 2, 3)),
        # Scales that round, and logits that spread P over many binades.
        _case("scaled", 2, [64, 64], 64, _any, 0.25, (0, 1)),
        # As many rows as SMs: several blocks a row and, with the scheduler's costs, no splits.
        _case("blocks", 3, [256] * 127 + [150], 256, _ones, natural, (0, 127)),
        # Few rows: every block is a split. One row's last blocks are empty.
        _case("splits", 4, [384, 200], 384, _ones, natural, (0, 1)),
        # Between: splits of several blocks.
        _case("long_splits", 5, [384] * 40, 384, _any, natural, (0, 39)),
    ]
