"""Compiling the kernel: for the GPU that is there, or for any architecture without one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparse_mla_kernel.checks import (
    architecture_of,
    check_arch,
    check_cap,
    check_geometry,
    check_push,
    check_schedule,
    resolve_device,
)
from sparse_mla_kernel.host import cache
from sparse_mla_kernel.host.artifact import Artifact
from sparse_mla_kernel.schedule import BASE, Schedule

if TYPE_CHECKING:
    from sparse_mla_kernel.host.build import Entry

Push = tuple[int, int, int]


@dataclass(frozen=True)
class CompiledSparse:
    """A loaded kernel and the sizes that it was compiled for; :func:`run_sparse` launches it."""

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
        push: ``(owner heads, ranks, cap)`` for push mode, of a mailbox with as many rows.
        schedule: Order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range, or the device can't run the kernel.
        RuntimeError: There is no usable CUDA device.
    """
    check_geometry(batch, heads, padded, width)
    check_cap(cap, batch)
    if push is not None:
        check_push(push, heads, cap)
    check_schedule(schedule)
    where = resolve_device(device)
    return _compile_loaded(batch, heads, padded, width, cap, where, push, schedule)


@functools.cache
def _compile_loaded(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    device: torch.device,
    push: Push | None,
    schedule: Schedule,
) -> CompiledSparse:
    sizes, entry = _sparse_entry(batch, heads, padded, width, cap, push, schedule)
    launch, artifact = obtain("decode", sizes, device, entry)
    return CompiledSparse(
        batch, heads, padded, width, cap, device, schedule, artifact, launch, push
    )


def _sparse_entry(
    batch: int,
    heads: int,
    padded: int,
    width: int,
    cap: int,
    push: Push | None,
    schedule: Schedule,
) -> tuple[dict[str, object], Callable[[], Entry]]:
    """What the cache knows the kernel by, and what makes what is compiled."""

    def entry() -> Entry:
        from sparse_mla_kernel.host import build

        kernel = build.decode_kernel(batch, heads, padded, width, push, schedule)
        return build.decode_entry(kernel, cap)

    sizes: dict[str, object] = {
        "batch": batch,
        "heads": heads,
        "padded": padded,
        "width": width,
        "cap": cap,
        "push": push,
        "schedule": asdict(schedule),
    }
    return sizes, entry


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
    """Compile a kernel into the cache, for a later :func:`compile_sparse` on this machine.

    Nothing is loaded or launched: several processes may compile a kernel each, at once.

    Args:
        batch: As :func:`compile_sparse`, with the other sizes.
        heads: See there.
        padded: See there.
        width: See there.
        cap: See there.
        arch: As :func:`cross_compile`.
        push: See :func:`compile_sparse`.
        schedule: Order of rounding.

    Returns:
        Whether the cache has it now. Not if it is off or can't be written; then nothing is compiled
        in the first case, and nothing kept in the second.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range.
    """
    check_geometry(batch, heads, padded, width)
    check_cap(cap, batch)
    if push is not None:
        check_push(push, heads, cap)
    check_arch(arch)
    check_schedule(schedule)
    if cache.folder() is None:
        return False
    sizes, entry = _sparse_entry(batch, heads, padded, width, cap, push, schedule)
    inputs = cache.describe("decode", arch, sizes)
    return cache.holds(inputs) or _compiled(inputs, entry, arch)[2]


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
    """Compile the kernel for an architecture, on a machine with or without a GPU; reads no cache.

    Args:
        batch: As :func:`compile_sparse`, with the other sizes.
        heads: See there.
        padded: See there.
        width: See there.
        cap: See there.
        arch: ``"sm_90a"``, ``"sm_100a"``, ``"sm_103a"`` or ``"sm_120a"``.
        push: See :func:`compile_sparse`.
        schedule: Order of rounding.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of range.
    """
    check_geometry(batch, heads, padded, width)
    check_cap(cap, batch)
    if push is not None:
        check_push(push, heads, cap)
    check_arch(arch)
    check_schedule(schedule)
    from sparse_mla_kernel.host import build

    kernel = build.decode_kernel(batch, heads, padded, width, push, schedule)
    return artifact_of(build.compile_entry(*build.decode_entry(kernel, cap), arch), arch)


def obtain(
    name: str, sizes: Mapping[str, object], device: torch.device, entry: Callable[[], Entry]
) -> tuple[Callable[..., None], Artifact]:
    """A kernel out of the cache, or else compiled and kept there.

    Args:
        name: Which entry point.
        sizes: All that it's compiled for, but for the architecture.
        device: Where it will run.
        entry: Makes what is compiled; not called, nor the DSL imported, if the cache has it.
    """
    arch = architecture_of(device)
    inputs = cache.describe(name, arch, sizes)
    found = cache.find(inputs)
    if found is None:
        from sparse_mla_kernel.host import build

        with torch.cuda.device(device):
            compiled, artifact, kept = _compiled(inputs, entry, arch)
        # What was kept is what runs: later processes do nothing that this one didn't.
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
    """What the DSL made of a kernel, as bytes and text."""
    return Artifact(arch, compiled.__ptx__, compiled.__cubin__)
