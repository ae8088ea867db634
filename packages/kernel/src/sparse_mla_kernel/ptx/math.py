"""Float32 arithmetic, each operation with its rounding in the instruction.

No compiler stage may contract, reassociate or flush what is written as the instruction itself."""

from __future__ import annotations

from cutlass import Float32, cute
from cutlass.cute.arch import inline_ptx


@cute.jit
def add_rn(a: Float32, b: Float32) -> Float32:
    """``a + b``, rounded to nearest even; subnormals kept."""
    return inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def sub_rn(a: Float32, b: Float32) -> Float32:
    """``a - b``, rounded to nearest even; subnormals kept."""
    return inline_ptx(
        "sub.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def mul_rn(a: Float32, b: Float32) -> Float32:
    """``a * b``, rounded to nearest even; subnormals kept. Never contracted into an FMA."""
    return inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """``a * b + c`` with one rounding, to nearest even; subnormals kept."""
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


@cute.jit
def div_rn(a: Float32, b: Float32) -> Float32:
    """``a / b``, correctly rounded; subnormals kept."""
    return inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def max_f32(a: Float32, b: Float32) -> Float32:
    """The larger of two numbers. A NaN operand is ignored: it shows in the row sum instead."""
    return inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def ex2_approx_ftz(x: Float32) -> Float32:
    """``2^x`` by the special function unit (one MUFU.EX2); subnormal in and out are zero."""
    return inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
