"""Distributed shared memory: what a CTA stores in another CTA of its cluster."""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32, cute
from cutlass.cute.arch import inline_ptx


@cute.jit
def store_cluster_b32(address: Int32, word: Int32) -> None:
    """One word to a cluster address (:func:`map_shared`)."""
    inline_ptx("st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[address, word])


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
