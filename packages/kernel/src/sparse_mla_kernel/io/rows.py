"""Cache rows: which ids name one, and where it lies."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from sparse_mla_kernel.schedule import ROW_COLUMNS


@cute.jit
def is_cached(mKv: cute.Tensor, row_id: Int32) -> cutlass.Boolean:
    """Whether an id names a cache row. Any other id is masked: nothing is read for it.

    Args:
        mKv: ``[N, 576]`` bytes; ``N * 576`` may pass 2^31.
        row_id: Any int32.
    """
    return row_id >= 0 and Int64(row_id) < Int64(mKv.shape[0])


@cute.jit
def cache_row(mKv: cute.Tensor, row_id: Int32) -> Int64:
    """The address of a cache row's 576 bytes.

    Args:
        mKv: ``[N, 576]`` bytes.
        row_id: An id that names a row.
    """
    return mKv.iterator.toint() + Int64(row_id) * ROW_COLUMNS
