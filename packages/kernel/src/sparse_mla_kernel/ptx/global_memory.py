"""Loads and stores of global memory."""

from __future__ import annotations

from cutlass import Int64, Uint32, cute
from cutlass.cute.arch import inline_ptx


@cute.jit
def store_global_b32x2(address: Int64, low: Uint32, high: Uint32) -> None:
    """Two words to an 8-byte aligned address of global memory."""
    inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, low, high])


@cute.jit
def load_global_b64(address: Int64) -> Int64:
    """Eight bytes of global memory."""
    return inline_ptx(
        "ld.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address]
    )


@cute.jit
def load_global_b32x4(address: Int64) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four words of a 16-byte aligned address of global memory."""
    return inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
