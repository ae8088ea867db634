"""The tensor core: one warp's matrix products."""

from __future__ import annotations

from cutlass import Float32, Uint32, cute
from cutlass.cute.arch import inline_ptx


@cute.jit
def mma_e4m3(c: cute.Tensor, a: cute.Tensor, b0: Uint32, b1: Uint32) -> None:
    """``c += a @ b`` on one warp: ``mma.sync.m16n8k32``, E4M3 in, FP32 accumulators in place.

    Args:
        c: ``[4]`` f32, a C fragment (``layouts`` draws the fragments), in and out.
        a: ``[4]`` words of 4 bytes, an A fragment.
        b0: The first word of a B fragment.
        b1: The second.
    """
    c[0], c[1], c[2], c[3] = inline_ptx(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]],
    )


@cute.jit
def mma_f16(c: cute.Tensor, a: cute.Tensor, b0: Uint32, b1: Uint32) -> None:
    """``c += a @ b`` on one warp: ``mma.sync.m16n8k16``, FP16 in, FP32 accumulators in place.

    Args:
        c: ``[4]`` f32, a C fragment (``low_latency.layouts`` draws the fragments), in and out.
        a: ``[4]`` words of two FP16, an A fragment.
        b0: The first word of a B fragment.
        b1: The second.
    """
    c[0], c[1], c[2], c[3] = inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]],
    )
