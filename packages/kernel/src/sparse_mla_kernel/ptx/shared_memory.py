"""Loads and stores of a CTA's own shared memory."""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32, cute
from cutlass.cute.arch import inline_ptx

from sparse_mla_kernel.ptx.convert import cvt_e4m3x2


@cute.jit
def load_shared_b32(address: Int32) -> Uint32:
    """One word of this CTA's shared memory."""
    return inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


@cute.jit
def load_shared_f32(address: Int32) -> Float32:
    """One float32 of this CTA's shared memory."""
    return inline_ptx(
        "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


@cute.jit
def load_shared_b32x2(address: Int32) -> tuple[Uint32, Uint32]:
    """Two words of this CTA's shared memory, at an 8-byte aligned address."""
    return inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[address],
    )


@cute.jit
def load_shared_f32x2(address: Int32) -> tuple[Float32, Float32]:
    """Two float32 of this CTA's shared memory, at an 8-byte aligned address."""
    return inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32] * 2,
        read_only_args=[address],
    )


@cute.jit
def load_shared_b32x4(address: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four words of this CTA's shared memory, at a 16-byte aligned address."""
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_matrices_transposed(address: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four 8 x 8 matrices of 16-bit elements, each transposed: ``ldmatrix.x4.trans``.

    Args:
        address: In lane ``l``, row ``l % 8`` of matrix ``l / 8``: 16 bytes, 16-byte aligned.

    Returns:
        A word of each matrix: lane ``l`` has its rows ``2 (l % 4)`` (low half) and
        ``2 (l % 4) + 1`` of column ``l / 4``.
    """
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_shared_f32x4(address: Int32) -> tuple[Float32, Float32, Float32, Float32]:
    """Four float32 of this CTA's shared memory, at a 16-byte aligned address."""
    return inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


@cute.jit
def store_shared_b32(address: Int32, word: Int32) -> None:
    """One word to this CTA's shared memory."""
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


@cute.jit
def store_shared_f32(address: Int32, value: Float32) -> None:
    """One float32 to this CTA's shared memory."""
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def store_shared_b32x2(address: Int32, a: Uint32, b: Uint32) -> None:
    """Two words to an 8-byte aligned address of this CTA's shared memory."""
    inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, a, b])


@cute.jit
def store_shared_b32x4(address: Int32, a: Uint32, b: Uint32, c: Uint32, d: Uint32) -> None:
    """Four words to a 16-byte aligned address of this CTA's shared memory."""
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )


@cute.jit
def store_shared_f32x4(address: Int32, a: Float32, b: Float32, c: Float32, d: Float32) -> None:
    """Four float32 to a 16-byte aligned address of this CTA's shared memory."""
    inline_ptx(
        "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )


@cute.jit
def store_fp8_pair_shared(address: Int32, low: Float32, high: Float32) -> None:
    """Quantise two numbers to E4M3 and store them, ``low`` first, at a 2-byte aligned address.

    One ``cvt.rn.satfinite.e4m3x2`` (nearest even, saturating to +-448, NaN to 0x7F) and one store.
    """
    inline_ptx("st.shared.b16 [{$r0}], {$r1};", read_only_args=[address, cvt_e4m3x2(low, high)])


@cute.jit
def store_zero_shared_b128(address: Int32) -> None:
    """16 zero bytes at a 16-byte aligned address of this CTA's shared memory."""
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
        read_only_args=[address, Uint32(0)],
    )
