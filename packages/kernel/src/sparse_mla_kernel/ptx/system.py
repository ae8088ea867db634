"""Global memory that other GPUs write or read, and counters in it."""

from __future__ import annotations

from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute.arch import inline_ptx


@cute.jit
def load_relaxed_sys_b32(address: Int64) -> Uint32:
    """One word, as any thread of the system left it; never from a stale cache line."""
    return inline_ptx(
        "ld.relaxed.sys.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


@cute.jit
def load_relaxed_sys_b32x2(address: Int64) -> tuple[Uint32, Uint32]:
    """Two words of an 8-byte aligned address. Each word is whole; the pair may be torn."""
    return inline_ptx(
        "ld.relaxed.sys.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[address],
    )


@cute.jit
def load_relaxed_sys_b32x4(address: Int64) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four words of a 16-byte aligned address. Each word is whole; the four may be torn."""
    return inline_ptx(
        "ld.relaxed.sys.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def store_relaxed_sys_b32(address: Int64, word: Uint32) -> None:
    """One word, for any thread of the system to see."""
    inline_ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", read_only_args=[address, word])


@cute.jit
def store_relaxed_sys_b32x2(address: Int64, low: Uint32, high: Uint32) -> None:
    """Two words to an 8-byte aligned address. Each word arrives whole; the pair may be torn."""
    inline_ptx(
        "st.relaxed.sys.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[address, low, high],
    )


@cute.jit
def store_relaxed_sys_b32x4(address: Int64, a: Uint32, b: Uint32, c: Uint32, d: Uint32) -> None:
    """Four words to a 16-byte aligned address. Each word arrives whole; the four may be torn."""
    inline_ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )


@cute.jit
def red_add_relaxed_sys(address: Int64, value: Int32) -> None:
    """Add to a word that threads of several GPUs add to."""
    inline_ptx("red.relaxed.sys.global.add.s32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def atom_add_relaxed_gpu(address: Int64, value: Int32) -> Int32:
    """Add to a word of this GPU; its value before."""
    return inline_ptx(
        "atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, value],
    )


@cute.jit
def atom_cas_relaxed_gpu(address: Int64, expected: Int32, value: Int32) -> Int32:
    """Replace a word of this GPU if it is ``expected``; its value before."""
    return inline_ptx(
        "atom.relaxed.gpu.global.cas.b32 {$w0}, [{$r0}], {$r1}, {$r2};",
        write_only_types=[Int32],
        read_only_args=[address, expected, value],
    )
