"""Conversions between number formats, and bytes and words in registers."""

from __future__ import annotations

from cutlass import Float32, Uint16, Uint32, cute
from cutlass.cute.arch import inline_ptx


@cute.jit
def cvt_e4m3x2(low: Float32, high: Float32) -> Uint16:
    """Two E4M3 bytes, ``low`` in bits 0-7: nearest even, saturating to +-448, NaN to 0x7F."""
    # The instruction takes the operand of the high byte first.
    return inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint16],
        read_only_args=[low, high],
    )


@cute.jit
def cvt_e4m3x4_f16x4(word: Uint32) -> tuple[Uint32, Uint32]:
    """Four E4M3 bytes as two words of two FP16 each, bytes 0 and 1 first; exact, NaN to NaN."""
    return inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
    )


@cute.jit
def cvt_e4m3x4(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four numbers rounded to E4M3 as :func:`cvt_e4m3x2` does, ``a`` in bits 0-7."""
    return inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


@cute.jit
def cvt_bf16x2(low: Float32, high: Float32) -> Uint32:
    """Two BF16, ``low`` in bits 0-15: nearest even, NaN to 0x7FFF."""
    return inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


@cute.jit
def as_f32(word: Uint32) -> Float32:
    """The float32 whose encoding is ``word``."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


@cute.jit
def as_b32(value: Float32) -> Uint32:
    """The encoding of a float32."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


@cute.jit
def prmt(a: Uint32, b: Uint32, selector: int) -> Uint32:
    """Four of the eight bytes of ``b:a``; nibble ``i`` of ``selector`` says which is byte ``i``."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[a, b, Uint32(selector)],
    )


@cute.jit
def transpose4(
    w0: Uint32, w1: Uint32, w2: Uint32, w3: Uint32
) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Transpose a 4 x 4 matrix of bytes held as one word a row.

    ::

        w0 = a0 a1 a2 a3            a0 b0 c0 d0
        w1 = b0 b1 b2 b3     ->     a1 b1 c1 d1
        w2 = c0 c1 c2 c3            a2 b2 c2 d2
        w3 = d0 d1 d2 d3            a3 b3 c3 d3      (byte 0 = bits 0-7 on the left)

    Returns:
        The four words of the transpose. Eight byte permutes, in registers.
    """
    ab01 = prmt(w0, w1, 0x5140)
    ab23 = prmt(w0, w1, 0x7362)
    cd01 = prmt(w2, w3, 0x5140)
    cd23 = prmt(w2, w3, 0x7362)
    return (
        prmt(ab01, cd01, 0x5410),
        prmt(ab01, cd01, 0x7632),
        prmt(ab23, cd23, 0x5410),
        prmt(ab23, cd23, 0x7632),
    )
