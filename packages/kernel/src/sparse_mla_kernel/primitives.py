"""Inline PTX, one instruction a function.

Arithmetic whose rounding the contract names is written as the instruction with its rounding, so
that no compiler stage may contract, reassociate or flush it.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute
from cutlass.cute.arch import inline_ptx

# ---- float32 arithmetic -------------------------------------------------------------------------


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


# ---- conversions and bytes ----------------------------------------------------------------------


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


# ---- tensor core --------------------------------------------------------------------------------


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


# ---- global memory ------------------------------------------------------------------------------


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


# ---- global memory that other GPUs write or read ------------------------------------------------


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


# ---- shared memory, bulk copy, cluster ----------------------------------------------------------


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


@cute.jit
def store_cluster_b32(address: Int32, word: Int32) -> None:
    """One word to a cluster address (:func:`map_shared`)."""
    inline_ptx("st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[address, word])


@cute.jit
def copy_async_b128(address: Int32, source: Int64, size_bytes: Int32) -> None:
    """Copy 16 bytes of global memory to shared memory, or zero them, without waiting.

    Args:
        address: Where to, 16-byte aligned.
        source: Where from, 16-byte aligned.
        size_bytes: 16, or 0: nothing is read and the 16 bytes become zero.
    """
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[address, source, size_bytes],
    )


@cute.jit
def arrive_after_copies(barrier: Int32) -> None:
    """Arrive on an mbarrier once this thread's :func:`copy_async_b128` so far have landed."""
    inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier])


@cute.jit
def bulk_copy_to_shared(address: Int32, source: Int64, size_bytes: int, barrier: Int32) -> None:
    """Copy ``size_bytes`` of global memory to shared memory, completing on an mbarrier.

    Args:
        address: Where to, 16-byte aligned.
        source: Where from, 16-byte aligned.
        size_bytes: A multiple of 16; as many bytes are counted off the mbarrier's transactions.
        barrier: The mbarrier.
    """
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[address, source, Int32(size_bytes), barrier],
    )


@cute.jit
def bulk_multicast_to_shared(
    address: Int32, source: Int64, size_bytes: int, barrier: Int32, ctas: Uint16
) -> None:
    """As :func:`bulk_copy_to_shared`, to the same place in every CTA of the cluster in ``ctas``.

    Args:
        address: Where to, in each of those CTAs, 16-byte aligned.
        source: Where from, 16-byte aligned.
        size_bytes: A multiple of 16.
        barrier: The mbarrier, in each of those CTAs.
        ctas: One bit a cluster rank.
    """
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[address, source, Int32(size_bytes), barrier, ctas],
    )


@cute.jit
def fence_proxy_async_shared() -> None:
    """Order this thread's ordinary shared memory accesses before later bulk copies."""
    inline_ptx("fence.proxy.async.shared::cta;")


@cute.jit
def mbarrier_arrive_expect_tx(barrier: Int32, bytes_expected: Int32) -> None:
    """Expect as many more bytes on an mbarrier, and arrive on it."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[barrier, bytes_expected],
    )


@cute.jit
def map_shared(address: Int32, cta: Int32) -> Int32:
    """The cluster address of the same shared memory location in CTA ``cta`` of the cluster."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, cta],
    )


@cute.jit
def store_async_f32x4(
    address: Int32, a: Float32, b: Float32, c: Float32, d: Float32, barrier: Int32
) -> None:
    """Store 16 bytes to another CTA's shared memory, completing on its mbarrier.

    Both addresses are cluster addresses (:func:`map_shared`) of one CTA; 16-byte aligned.
    """
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, a, b, c, d, barrier],
    )


@cute.jit
def store_async_f32x2(address: Int32, a: Float32, b: Float32, barrier: Int32) -> None:
    """As :func:`store_async_f32x4`, 8 bytes."""
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
        "[{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        read_only_args=[address, a, b, barrier],
    )


@cute.jit
def store_async_b32x2(address: Int32, a: Uint32, b: Uint32, barrier: Int32) -> None:
    """As :func:`store_async_f32x4`, two words."""
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 "
        "[{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        read_only_args=[address, a, b, barrier],
    )


@cute.jit
def store_async_b32(address: Int32, word: Uint32, barrier: Int32) -> None:
    """As :func:`store_async_f32x4`, one word."""
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[address, word, barrier],
    )
