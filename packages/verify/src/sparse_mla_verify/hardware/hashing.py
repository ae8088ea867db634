"""A hash of many results, the same on the GPU and on the CPU.

Multilinear, with odd pseudo-random weights modulo 2^64, over blocks of 2^17 words and then over the
64 blocks of a *head*: the 2^23 float32 encodings of one sign and exponent. A single wrong word
always changes it (its weight is odd), and so does an exchange of words (their weights differ).
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 17
HEAD = 1 << 23
HEADS = 512


@cache
def weights(count: int) -> NDArray[np.uint64]:
    """Odd weights [count]: splitmix64 of the position.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    z = np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z ^ (z >> np.uint64(31))) | np.uint64(1))


def block_hash(words: NDArray[np.uint32]) -> np.uint64:
    """Hash of `BLOCK` words."""
    return np.uint64(words.astype(np.uint64) @ weights(BLOCK))


def head_hash(blocks: NDArray[np.uint64]) -> int:
    """Hash of a head from those of its 64 blocks."""
    return int(blocks @ weights(HEAD // BLOCK))


def head_hashes(words: Any) -> Any:
    """`head_hash` of a device's results.

    Args:
        words: int32 torch tensor, a multiple of `HEAD` results, on any device.

    Returns:
        int64 torch tensor, the hash of each head, as the signed integer of the same bits.
    """
    import torch

    def signed(count: int) -> Any:
        return torch.from_numpy(weights(count).view(np.int64)).to(words.device)

    unsigned = words.view(-1, BLOCK).to(torch.int64) & 0xFFFFFFFF
    blocks = (unsigned * signed(BLOCK)).sum(dim=1)
    return (blocks.view(-1, HEAD // BLOCK) * signed(HEAD // BLOCK)).sum(dim=1)
