"""What all decode kernels have in common: their sizes, and their launch in latent mode."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, cute

from sparse_mla_kernel.checks import check_geometry, check_schedule
from sparse_mla_kernel.schedule import Schedule


class DecodeKernel:
    """A decode kernel for one batch shape. Each kernel defines ``kernel`` and ``shape``.

    Args:
        batch: Decode rows.
        heads: Query heads that are used: a multiple of 16, at most ``padded``.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        schedule: Order of rounding.
        name: The kernel's name. The schedule must be one that this kernel runs.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range.
    """

    #: The device code: ``(mQuery, mKv, mRows, mValid, mLatent, mLse, scale_log2, out_scale)``.
    kernel: Any

    def __init__(
        self, batch: int, heads: int, padded: int, width: int, schedule: Schedule, name: str
    ) -> None:
        check_geometry(batch, heads, padded, width)
        check_schedule(schedule, name)
        self.batch = batch
        self.heads = heads
        self.padded = padded
        self.width = width
        self.schedule = schedule

    def shape(self) -> dict[str, Any]:
        """Grid, block and cluster of a launch, as the DSL's ``launch`` takes them."""
        raise NotImplementedError

    @cute.jit
    def __call__(
        self,
        mQuery: cute.Tensor,
        mKv: cute.Tensor,
        mRows: cute.Tensor,
        mValid: cute.Tensor,
        mLatent: cute.Tensor,
        mLse: cute.Tensor,
        scale_log2: Float32,
        out_scale: Float32,
        stream: object,
    ) -> None:
        """Launch on ``stream``, as a programmatic dependent of what runs there.

        Args:
            mQuery: ``[cap, padded, 576]`` E4M3 bytes.
            mKv: ``[N, 576]`` E4M3 bytes.
            mRows: ``[>= batch, width]`` int32.
            mValid: ``[>= batch]`` int32.
            mLatent: ``[batch, padded, 512]`` BF16, out.
            mLse: ``[batch, padded]`` f32, out.
            scale_log2: Softmax scale x tensor scales x log2(e).
            out_scale: The V scale.
            stream: A DSL stream handle.
        """
        self.kernel(mQuery, mKv, mRows, mValid, mLatent, mLse, scale_log2, out_scale).launch(
            stream=stream, use_pdl=True, **self.shape()
        )
