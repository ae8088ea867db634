"""Gather: the cache rows that a row's list names."""

import numpy as np
from numpy.typing import NDArray


def gather(
    kv: NDArray[np.uint8], ids: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Cache rows by id. An id outside [0, N) is masked: no cache row is read for it.

    Args:
        kv: [N, 576] E4M3 bytes.
        ids: [n] row ids, any values.

    Returns:
        keys: [n, 576] E4M3 bytes, zero where masked.
        used: [n] bool, False where masked.
    """
    used = (ids >= 0) & (ids < len(kv))
    keys = np.zeros((len(ids), kv.shape[1]), np.uint8)
    keys[used] = kv[ids[used]]
    return keys, used
