"""Compiling the kernel: for the GPU that is there, or for any architecture without one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparse_mla_kernel.checks import architecture_of, check_arch, resolve_device
from sparse_mla_kernel.host import cache
from sparse_mla_kernel.host.artifact import Artifact
from sparse_mla_kernel.host.sizes import DecodeSizes, Push
from sparse_mla_kernel.schedule import BASE, Schedule

if TYPE_CHECKING:
    from sparse_mla_kernel.host.build import Entry


@dataclass(frozen=True)
class CompiledSparse:
    """A loaded kernel and the sizes that it was compiled for; :func:`run_sparse` launches it.

    Args:
        batch: Decode rows.
        heads: Query heads that are used.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        cap: Rows of the q mailbox.
        device: The CUDA device that the kernel is loaded on.
        schedule: The order of rounding.
        artifact: What the compiler made of the kernel.
        launch: Launches the kernel: a TVM-FFI function.
        push: ``(owner_heads, ranks, cap)`` of a kernel in push mode, and else None.
    """

    batch: int
    heads: int
    padded: int
    width: int
    cap: int
    device: torch.device
    schedule: Schedule
    artifact: Artifact
    launch: Callable[..., None]
    push: Push | None = None


def compile_sparse(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    device: torch.device | str | int,
    push: Push | None = None,
    *,
    schedule: Schedule = BASE,
) -> CompiledSparse:
    """Compile and load the kernel for one batch shape, once a process and device.

    What an earlier process compiled is read from disk (:mod:`sparse_mla_kernel.host.cache`).

    Args:
        batch: Decode rows.
        heads: Query heads that are used: a multiple of 16, at most ``padded``.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        cap: Rows of the q mailbox, at least ``batch``.
        device: A CUDA device.
        push: ``(owner_heads, ranks, cap)`` for push mode, with ``owner_heads x ranks = heads`` and
            the same ``cap``; None for latent mode.
        schedule: The order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or the device can't run the kernel.
        RuntimeError: PyTorch finds no CUDA device on this computer.
    """
    sizes = DecodeSizes(batch, heads, padded, width, cap, push, schedule)
    return _compile_loaded(sizes, resolve_device(device))


@functools.cache
def _compile_loaded(sizes: DecodeSizes, device: torch.device) -> CompiledSparse:
    launch, artifact = obtain("decode", asdict(sizes), device, functools.partial(_entry, sizes))
    return CompiledSparse(
        sizes.batch,
        sizes.heads,
        sizes.padded,
        sizes.width,
        sizes.cap,
        device,
        sizes.schedule,
        artifact,
        launch,
        sizes.push,
    )


def _entry(sizes: DecodeSizes) -> Entry:
    """The decode as the DSL's compiler takes it. Imports the DSL."""
    from sparse_mla_kernel.host import build

    kernel = build.decode_kernel(
        sizes.batch, sizes.heads, sizes.padded, sizes.width, sizes.push, sizes.schedule
    )
    return build.decode_entry(kernel, sizes.cap)


def precompile_sparse(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    arch: str,
    push: Push | None = None,
    *,
    schedule: Schedule = BASE,
) -> bool:
    """Compile a kernel into the cache, for a later :func:`compile_sparse` on this computer.

    Nothing is loaded or launched: several processes may compile a kernel each, at once.

    Args:
        batch: Decode rows.
        heads: Query heads that are used: a multiple of 16, at most ``padded``.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        cap: Rows of the q mailbox, at least ``batch``.
        arch: ``"sm_90a"``, ``"sm_100a"``, ``"sm_103a"`` or ``"sm_120a"``.
        push: ``(owner_heads, ranks, cap)`` for push mode; None for latent mode.
        schedule: The order of rounding.

    Returns:
        Whether the cache has the kernel now. It does not if the cache is off (then nothing is
        compiled) or can't be written.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range.
    """
    sizes = DecodeSizes(batch, heads, padded, width, cap, push, schedule)
    check_arch(arch)
    if cache.folder() is None:
        return False
    inputs = cache.describe("decode", arch, asdict(sizes))
    if cache.holds(inputs):
        return True
    *_, kept = _compiled(inputs, functools.partial(_entry, sizes), arch)
    return kept


def cross_compile(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    arch: str = "sm_90a",
    push: Push | None = None,
    *,
    schedule: Schedule = BASE,
) -> Artifact:
    """Compile the kernel for an architecture, on a computer with or without a GPU; reads no cache.

    Args:
        batch: Decode rows.
        heads: Query heads that are used: a multiple of 16, at most ``padded``.
        padded: Query heads that a row of ``query``, ``latent`` and ``lse`` has.
        width: Row ids that a row's list holds.
        cap: Rows of the q mailbox, at least ``batch``.
        arch: ``"sm_90a"``, ``"sm_100a"``, ``"sm_103a"`` or ``"sm_120a"``.
        push: ``(owner_heads, ranks, cap)`` for push mode; None for latent mode.
        schedule: The order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range.
    """
    sizes = DecodeSizes(batch, heads, padded, width, cap, push, schedule)
    check_arch(arch)
    from sparse_mla_kernel.host import build

    return artifact_of(build.compile_entry(*_entry(sizes), arch), arch)


def obtain(
    name: str, sizes: Mapping[str, object], device: torch.device, entry: Callable[[], Entry]
) -> tuple[Callable[..., None], Artifact]:
    """A kernel's launcher and artifact, read from the cache, or else compiled and kept there.

    Args:
        name: The entry point, such as ``"decode"`` (:func:`sparse_mla_kernel.host.cache.describe`
            lists them).
        sizes: Everything that the kernel is compiled for, but for the architecture.
        device: The device that the kernel will run on.
        entry: Makes what the DSL compiles. If the cache has the kernel, ``entry`` is not called and
            the DSL is not imported.

    Raises:
        ValueError: ``device`` can't run the kernel.
        RuntimeError: PyTorch finds no CUDA device on this computer.
    """
    arch = architecture_of(device)
    inputs = cache.describe(name, arch, sizes)
    found = cache.find(inputs)
    if found is None:
        from sparse_mla_kernel.host import build

        with torch.cuda.device(device):
            compiled, artifact, kept = _compiled(inputs, entry, arch)
        # The kept kernel is what runs, so that this process runs just what later ones will.
        found = cache.find(inputs) if kept else None
        if found is None:
            return build.launcher(compiled), artifact
    return found.launch, Artifact(arch, found.ptx, found.cubin)


def _compiled(
    inputs: Mapping[str, object], entry: Callable[[], Entry], arch: str
) -> tuple[Any, Artifact, bool]:
    """What the DSL makes of an entry, its code, and whether the cache has kept it."""
    from sparse_mla_kernel.host import build

    compiled = build.compile_entry(*entry(), arch)
    artifact = artifact_of(compiled, arch)
    kept = cache.folder() is not None and cache.keep(
        inputs, build.object_file(compiled), artifact.ptx, artifact.cubin
    )
    return compiled, artifact, kept


def artifact_of(compiled: Any, arch: str) -> Artifact:
    """The PTX and the machine code that the DSL made of a kernel."""
    return Artifact(arch, compiled.__ptx__, compiled.__cubin__)
